"""The stores that one daemon serves: open them, find them by name, reload and drop them."""

from collections.abc import Callable, Sequence

from blockstore.closing import Closing
from blockstore.io.elsewhere import RemoteRows
from blockstore.store import Store
from blockstore.units import format_bytes, format_mem
from loaderd.api.errors import Refused
from loaderd.api.protocol import LedgerEntry
from loaderd.memory.ledger import (
    MIN_SESSION,
    EngineSettings,
    enough_mem,
    graph_min,
    make_budgets,
    slot_bytes,
    table_bytes,
    table_entries,
)
from loaderd.sessions.base import SharedResources
from loaderd.sessions.engine import Engine


def store_name(store: Store) -> str:
    """The name by which sessions ask for a store: that of its folder."""
    return store.path.resolve().name


class Stores(Closing):
    """Engines by the names of their stores, in one arena.

    Only one thread at a time may open or drop stores.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        settings: EngineSettings,
        row_source: Callable[[Store], RemoteRows | None] = lambda _store: None,
    ) -> None:
        """Open all.

        row_source   as in `SharedResources`

        Raises BudgetTooSmall, StoreError, Refused: two of one name.
        """
        self.settings = settings
        check_names(stores)
        budgets = make_budgets([s.manifest for s in stores], settings)
        num_slots = sum(budget.num_slots for budget in budgets)
        budget = budgets[0]
        self._shared = SharedResources(
            settings, num_slots, budget.slot_bytes, budget.unused_bytes, row_source
        )
        self.arena, self.lock = self._shared.arena, self._shared.lock
        self.engines: dict[str, Engine] = {}
        self.retired: list[Engine] = []  # reopened or dropped, while sessions still use them
        self._reserve = settings.reserve_bytes  # what is left of it for tables
        self._tables: dict[Engine, range] = {}  # slots with tables of stores opened later
        first = 0
        try:
            for store, budget in zip(stores, budgets, strict=True):
                slots = range(first, first + budget.num_slots)
                self.engines[store_name(store)] = Engine(store, settings, self._shared, slots)
                first += budget.num_slots
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for engine in self.all():
            engine.close()
        self._shared.close()

    def all(self) -> list[Engine]:
        """Engines that serve, and retired ones that sessions still use."""
        return [*self.engines.values(), *self.retired]

    def find(self, name: str) -> Engine:
        """The engine of a store; "": of the only one.  Raises Refused."""
        if not name and len(self.engines) == 1:
            return next(iter(self.engines.values()))
        if name not in self.engines:
            found = f"store {name!r} is not served" if name else "no store was named"
            served = ", ".join(sorted(self.engines))
            raise Refused(f"{found}: expected one of {served}: name it with store=, or --store")
        return self.engines[name]

    def name_of(self, engine: Engine) -> str:
        return store_name(engine.store)

    def gather(self, engine: Engine, wanted: int, busy: Callable[[Engine], bool]) -> None:
        """Move slots to a store: all free ones of unused stores, then what it lacks from others."""
        others = sorted((e for e in self.all() if e is not engine), key=busy)
        for other in others:
            lacks = wanted - engine.broker.available()
            if not busy(other):
                engine.resize(other, self.arena.num_slots)
            elif lacks > 0:
                engine.resize(other, lacks)

    def reload(
        self,
        stores: Sequence[Store],
        busy: Callable[[Engine], bool],
        needed: Callable[[], int] = lambda: 0,
    ) -> list[str]:
        """Serve these from now on; returns what has changed, a line each.

        needed   slots that must stay free for sessions of the stores that are served now; called
                 after a new store has taken its own, as sessions come and go meanwhile

        An unchanged store goes on.  One that is not named any more, or has another
        fingerprint now, is closed by `sweep` when nobody uses it.  Raises Refused, StoreError,
        and changes nothing then.
        """
        check_names(stores)
        wanted, fresh = {store_name(store) for store in stores}, self.fresh(stores)
        for store in fresh.values():
            self._check_slot(store)
        said, opened = [], {}
        try:
            for name, store in fresh.items():
                opened[name] = self._open(store, busy, needed)
        except BaseException:
            for engine in opened.values():
                self._drop(engine)
            raise
        for name in [n for n in self.engines if n not in wanted or n in fresh]:
            self.retired.append(self.engines.pop(name))
            said += [] if name in wanted else [f"{name}: dropped"]
        for name, engine in opened.items():
            self.engines[name] = engine
            said.append(f"{name}: fingerprint {engine.store.manifest.fingerprint}")
        return said

    def fresh(self, stores: Sequence[Store]) -> dict[str, Store]:
        """Those of `stores` that are not served as they are now, by name."""
        named = ((store_name(store), store) for store in stores)
        return {name: store for name, store in named if not self._is_served(name, store)}

    def sweep(self, busy: Callable[[Engine], bool]) -> None:
        """Close retired stores that nobody uses any more."""
        for engine in [e for e in self.retired if not busy(e) and not e.ending and e.broker.whole]:
            self._drop(engine)
            self.retired.remove(engine)

    def reserve_entries(self) -> list[LedgerEntry]:
        """Memory set aside for tables, also what closed stores have given back to it."""
        if not self._reserve and not self.settings.reserve_bytes:
            return []
        basis = "for tables of stores that are opened later"
        return [LedgerEntry("reserve", self._reserve, basis)]

    def _is_served(self, name: str, store: Store) -> bool:
        known = self.engines.get(name)
        return known is not None and (
            known.store.path == store.path
            and known.store.manifest == store.manifest
            and known.store.part == store.part
        )

    def _check_slot(self, store: Store) -> None:
        width = slot_bytes(store.manifest)
        if width > self.arena.slot_bytes:
            raise Refused(
                f"{store.path}: its blocks take slots of {format_bytes(width)}, the arena has some "
                f"of {format_bytes(self.arena.slot_bytes)}: end the daemon, and serve it again"
            )

    def _tables_run(self, store: Store, busy: Callable[[Engine], bool]) -> range:
        """Slots of the arena for the tables of a store that --reserve does not hold.

        Raises Refused: there are none.
        """
        tables = _table_bytes(store)
        if tables <= self._reserve:
            return range(0)
        count = -(-table_bytes(store.manifest) // self.arena.slot_bytes)
        for other in sorted(self.all(), key=busy):
            if run := other.broker.cede_run(count):
                return run
        reserve = self.settings.reserve_bytes - self._reserve + tables
        raise Refused(
            f"{store.path}: its tables take {format_bytes(tables)}, "
            f"{format_bytes(max(0, self._reserve))} are set aside and no {count} adjacent slots of "
            "the arena are free: sessions have the others; try again later, or serve with "
            f"--reserve {format_mem(reserve)} or more"
        )

    def _open(
        self, store: Store, busy: Callable[[Engine], bool], needed: Callable[[], int]
    ) -> Engine:
        minimum = graph_min(store.manifest, self.settings) + MIN_SESSION
        run, slots = self._tables_run(store, busy), list[int]()
        for other in sorted(self.all(), key=busy):
            slots += other.broker.cede(minimum - len(slots))
        try:
            if len(slots) < minimum:
                raise Refused(
                    f"{store.path}: takes {minimum} slots of the arena, {len(slots)} are free: "
                    "sessions have the others; try again later, or serve with at least --mem "
                    f"{self._with_more(minimum - len(slots))}"
                )
            self._check_left(store, minimum, needed())
            size = self.arena.slot_bytes
            memory = self.arena.data[run.start * size : run.stop * size] if run else None
            engine = Engine(store, self.settings, self._shared, slots, memory)
        except BaseException:
            self.all()[0].broker.accept([*slots, *run], 0)
            raise
        self._tables[engine] = run
        self._reserve -= 0 if run else _table_bytes(store)
        return engine

    def _check_left(self, store: Store, minimum: int, needed: int) -> None:
        """Raises Refused: one of the served stores could no longer get the slots needed.

        A session with a stream has its slots, also for the stream that comes after it.
        """
        spare = {engine: engine.broker.spare() for engine in self.all()}
        for engine in spare if needed else ():
            left = engine.broker.free() + sum(spare.values()) - spare[engine]
            if left < needed:
                raise Refused(
                    f"{store.path}: takes {minimum} slots of the arena and would leave {left}, "
                    f"sessions without any need {needed}: try again later, or serve with at least "
                    f"--mem {self._with_more(needed - left)}"
                )

    def _with_more(self, slots: int) -> str:
        """The --mem with which the arena has so many slots more."""
        unused = self._shared.unused_bytes
        return enough_mem(self.settings, unused, slots * self.arena.slot_bytes)

    def _drop(self, engine: Engine) -> None:
        heir = next(e for e in self.all() if e is not engine)
        slots, run = engine.broker.retire(), self._tables.pop(engine, range(0))
        engine.close()
        self._reserve += 0 if run else _table_bytes(engine.store)
        heir.broker.accept([*slots, *run], 0)


def check_names(stores: Sequence[Store]) -> None:
    """Raises Refused: none, or two of one name."""
    if not stores:
        raise Refused("no store is named, expected at least one")
    by_name: dict[str, Store] = {}
    for store in stores:
        other = by_name.setdefault(store_name(store), store)
        if other is not store:
            raise Refused(
                f"{other.path} and {store.path}: both are named {store_name(store)}, expected "
                "folders of different names; rename one, or serve it by a link of another name"
            )


def _table_bytes(store: Store) -> int:
    return sum(e.num_bytes for e in table_entries(store.manifest))
