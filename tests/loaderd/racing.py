"""Trainers of two stores that come and go, in one process: what `test_schedules.py` runs."""

import logging
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockstore import concurrency
from blockstore.store import Store, open_store
from loaderd.api.errors import DaemonError
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    Blob,
    ChunkReady,
    ErrorReply,
    Release,
    RowGroup,
    SeedEdges,
    Start,
)
from loaderd.memory.ledger import (
    MIN_SESSION,
    EngineSettings,
    graph_min,
    mem_of,
    table_entries,
)
from loaderd.sessions.stores import Stores
from loaderd.streams.service import StreamService
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.stores import write_store

NODES, WIDTH, SLOT = 160, 128, 4096
OFFSETS = (0, 30, 60, 90, 91, 125, 160)
HALOS = ([70, 100, 159], [], [0, 17, 120], [21, 22], [5], [1, 2, 3, 90])
WORKERS = READERS = 2
EPOCHS, SEEDS = 3, (1, 2)
LONG_S = 120.0  # virtual: nothing takes so long

Batch = tuple[bytes, ...]  # all that a trainer gets of it


class Kind(NamedTuple):
    """Sessions that a script may attach."""

    store: str
    fields: dict[str, Any]


_SMALL = {"num_neighbors": (2, 2), "batch_size": 4}
KINDS = {
    "minibatch": Kind("graph", {"plan": "minibatch", **_SMALL}),
    "edge ids": Kind("graph", {"plan": "minibatch", **_SMALL, "return_e_id": True}),
    "all neighbors": Kind("graph", {"plan": "auto", "num_neighbors": (-1,), "batch_size": 4}),
    "links": Kind(
        "graph", {"plan": "auto", "num_neighbors": (2,), "batch_size": 2000, "edges": SeedEdges(),
                  "split": "all"},
    ),
    "hyperbatch": Kind("graph", {"plan": "hyperbatch", **_SMALL}),
    "hyperbatch of 2": Kind("graph", {"plan": "hyperbatch", **_SMALL, "hyperbatch": 2}),
    "auto": Kind("graph", {"plan": "auto", **_SMALL}),
    "macrobatch": Kind("graph", {"plan": "macrobatch", **_SMALL, "macro_partitions": 3}),
    "rank 0": Kind(
        "graph", {"plan": "macrobatch", **_SMALL, "macro_partitions": 3, "world_size": 2}
    ),
    "rank 1": Kind(
        "graph", {"plan": "macrobatch", **_SMALL, "macro_partitions": 3, "world_size": 2, "rank": 1}
    ),
    "plain rank 0": Kind("graph", {"plan": "minibatch", **_SMALL, "world_size": 2}),
    "plain rank 1": Kind("graph", {"plan": "minibatch", **_SMALL, "world_size": 2, "rank": 1}),
    "hyper rank 0": Kind("graph", {"plan": "hyperbatch", **_SMALL, "world_size": 2}),
    "hyper rank 1": Kind("graph", {"plan": "hyperbatch", **_SMALL, "world_size": 2, "rank": 1}),
    "other": Kind("other", {"plan": "auto", **_SMALL}),
    "other hyperbatch": Kind("other", {"plan": "hyperbatch", **_SMALL}),
    "other minibatch": Kind("other", {"plan": "minibatch", **_SMALL}),
    "chunks": Kind("hops", {"plan": "chunks", "batch_size": 40}),
    "rows": Kind("hops", {"plan": "rows", "batch_size": 40}),
}  # fmt: skip


class Bench:
    """Stores, and what their batches are: made once, for all schedules."""

    def __init__(self, folder: Path) -> None:
        """Stores several times larger than the memory they are served with."""
        rng = np.random.default_rng(1)
        degrees = rng.integers(20, 40, NODES)
        degrees[[5, 100]] = 700  # over two blocks
        seeds = list(range(5, NODES, 10))
        parts = {"offsets": OFFSETS, "hubs": (17, 33, 100), "halos": HALOS, "width": WIDTH}
        write_store(folder / "graph", make_csc(degrees, 2), seeds, **parts)
        write_store(folder / "new" / "graph", make_csc(degrees, 3), seeds, **parts)
        write_store(folder / "other", make_csc(2 * degrees, 4), seeds, edge_ids=False, width=WIDTH)
        write_hop_store(
            folder / "hops", {"train": make_hops(160, 64, {"sym": 1}, 1)}, block_bytes=SLOT
        )
        paths = [folder / name for name in ("graph", "other", "hops")]
        self.stores = {path: open_store(path) for path in [*paths, folder / "new" / "graph"]}
        self.paths = tuple(self.stores)
        self._known: dict[tuple[str, str, int, int, int], Batch] = {}
        for path in self.paths:
            with Serving([self.stores[path]], 3000) as serving:
                for name, kind in KINDS.items():
                    if kind.store == path.name:
                        for seed in SEEDS:
                            self._learn(serving, name, seed)

    def _learn(self, serving: "Serving", name: str, seed: int) -> None:
        """All batches of all epochs, by an engine that nobody else uses."""
        attached = serving.service.attach(request_of(name, seed), None)
        trainer = Trainer(serving, name, seed, attached, None)
        for epoch in range(EPOCHS):
            trainer.start(epoch, 0, 1)
            while trainer.steps:
                session, message = serving.inbox.get()
                assert session == attached.session
                trainer.take(message)
                for step, batch in trainer.consume():
                    key = attached.resolved.fingerprint, name, seed, epoch, step
                    self._known[key] = batch
        serving.service.detach(attached.session)

    def batch(self, trainer: "Trainer", step: int) -> Batch:
        """What it has to be."""
        fingerprint = trainer.attached.resolved.fingerprint
        return self._known[fingerprint, trainer.name, trainer.seed, trainer.epoch, step]


def request_of(name: str, seed: int) -> Attach:
    kind = KINDS[name]
    return Attach(token=0, request=1, store=kind.store, seed=seed, **kind.fields)


class Serving:
    """Some stores behind a stream service; its messages go to an inbox, as a daemon's do."""

    def __init__(
        self, stores: Sequence[Store], more_slots: int, bench: Bench | None = None
    ) -> None:
        """`more_slots`: than the least."""
        manifests = [store.manifest for store in stores]
        everything = bench.stores.values() if bench else stores
        tables = [sum(e.num_bytes for e in table_entries(s.manifest)) for s in everything]
        reserve = 3 * max(tables)
        settings = EngineSettings(0, WORKERS, READERS)
        minimum = sum(graph_min(m, settings) + MIN_SESSION for m in manifests)
        fixed = reserve + sum(e.num_bytes for m in manifests for e in table_entries(m))
        mem = mem_of(fixed + (minimum + more_slots) * SLOT)
        self.bench = bench
        self.paths = [store.path for store in stores]
        self.inbox: Any = concurrency.SimpleQueue()
        self.stores = Stores(stores, EngineSettings(mem, WORKERS, READERS, reserve_bytes=reserve))
        self.service = StreamService(self.stores, self._reopen)
        self.service.deliver = lambda session, message: self.inbox.put((session, message))
        self.data = self.stores.arena.data
        self.before = self.held()

    def _reopen(self) -> list[Store]:
        stores = self.bench.stores if self.bench else None
        return [stores[path] if stores else open_store(path) for path in self.paths]

    def held(self) -> Any:
        """What must be as at the start when all have left."""
        self.stores.sweep(lambda _engine: True)
        engines = self.stores.all()
        tables = sum(e.num_bytes for s in engines for e in table_entries(s.store.manifest))
        _, sessions, counters = self.service.status()
        return {
            "slots": sum(e.broker.num_slots for e in engines),
            "whole": [e.broker.whole for e in self.stores.engines.values()].count(False),
            "reserve": sum(e.num_bytes for e in self.stores.reserve_entries()) + tables,
            "retired": len(self.stores.retired),
            "ending": sum(e.ending for e in engines),
            "streams": counters["streams"],
            "sessions": len(sessions),
        }

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Everything has been given back; all threads end."""
        end = concurrency.monotonic() + LONG_S
        while (held := self.held()) != self.before:
            assert concurrency.monotonic() < end, f"not given back: {held}, at first {self.before}"
            concurrency.sleep(0.05)
        self.service.close()
        self.stores.close()


class Trainer:
    """One session: checks each batch when it gives it back."""

    def __init__(
        self, serving: Serving, name: str, seed: int, attached: Attached, bench: Bench | None
    ) -> None:
        self.serving, self.name, self.seed, self.attached = serving, name, seed, attached
        self.bench = bench
        self.number = attached.session
        self.run, self.epoch, self.runs = 0, 0, 0
        self.steps: list[int] = []  # of the run, that are still to be consumed
        self.came: deque[Any] = deque()
        self._batch: BatchReady | None = None  # of which row groups are missing
        self._rows: list[np.ndarray] = []
        self.slow = False

    def start(self, epoch: int, step: int, stride: int) -> None:
        self.run, self.epoch = self.run + 1, epoch
        self.steps = list(range(step, self.attached.num_steps, stride))
        self.came.clear()
        self._batch = None
        self.serving.service.start(
            Start(session=self.number, run=self.run, epoch=epoch, step=step, stride=stride)
        )

    def take(self, message: Any) -> None:
        """From the inbox."""
        if isinstance(message, ErrorReply):
            raise AssertionError(f"{self}: {message.error}: {message.message}")
        if message.run == self.run:
            self.came.append(message)

    def __str__(self) -> str:
        return f"session {self.number} ({self.name}, seed {self.seed}), epoch {self.epoch}"

    def consume(self) -> list[tuple[int, Batch]]:
        """The oldest message: read, and given back."""
        found = []
        if self.came:
            message = self.came.popleft()
            if isinstance(message, ChunkReady):
                found, group = [(message.step, self._chunk(message))], 0
            else:
                rows = message.rows if isinstance(message, BatchReady) else message
                found, group = self._group(message, rows), rows.group
            for step, batch in found:
                self._check(step, batch)
            self.serving.service.release(
                Release(session=self.number, run=self.run, step=message.step, group=group)
            )
        return found

    def _check(self, step: int, batch: Batch) -> None:
        assert self.steps, f"{self}: step {step} comes after the last one"
        assert self.steps[0] == step, f"{self}: step {step} comes instead of {self.steps[0]}"
        del self.steps[0]
        if self.bench is not None:
            expected = self.bench.batch(self, step)
            differ = [i for i, (a, b) in enumerate(zip(batch, expected, strict=True)) if a != b]
            assert not differ, f"{self}: step {step}: arrays {differ} differ"

    def _group(self, message: BatchReady | RowGroup, rows: RowGroup) -> list[tuple[int, Batch]]:
        if isinstance(message, BatchReady):
            count = sum(message.nodes_per_hop)
            self._batch = message
            self._structure = [(n, a.tobytes()) for n, a in self._arrays(message.structure)]
            self._rows = [np.zeros((count, s.row_bytes), np.uint8) for s in self.attached.rows]
        assert self._batch is not None
        assert self._batch.step == rows.step
        named = dict(self._arrays(rows.blob))
        positions = named.get("positions", slice(None))
        for spec, out in zip(self.attached.rows, self._rows, strict=True):
            out[positions] = self._gather(named[f"address:{spec.name}"], spec.row_bytes)
        if not rows.last:
            return []
        batch = self._batch
        shape = repr((batch.num_seeds, batch.nodes_per_hop, batch.edges_per_hop)).encode()
        return [
            (
                batch.step,
                (shape, *(a for _, a in self._structure), *(r.tobytes() for r in self._rows)),
            )
        ]

    def _gather(self, places: np.ndarray, width: int) -> np.ndarray:
        return self.serving.data[places.astype(np.int64)[:, None] + np.arange(width)]

    def _arrays(self, blob: Blob) -> list[tuple[str, np.ndarray]]:
        data = self.serving.data
        laid = np.concatenate([data[s * SLOT : (s + 1) * SLOT] for s in blob.slots])
        return [
            (
                a.name,
                laid[a.offset : a.offset + a.length * np.dtype(a.dtype).itemsize].view(a.dtype),
            )
            for a in blob.arrays
        ]

    def _chunk(self, message: ChunkReady) -> Batch:
        parts = [repr(message.num_rows).encode()]
        for spec, places in zip(self.attached.rows, message.places, strict=True):
            width = spec.row_bytes
            if message.form == "ranges":
                pairs = zip(places, message.counts, strict=True)
                at = np.concatenate([p + width * np.arange(n) for p, n in pairs])
            else:
                at = places[0] + width * np.arange(message.num_rows)
                if message.form == "index":
                    size = 8 * message.num_rows
                    data = self.serving.data[message.index : message.index + size]
                    at = places[0] + width * data.view(np.int64)
            parts.append(self._gather(at, width).tobytes())
        return tuple(parts)


class Script:
    """What happens to two stores, as a seed decides."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench, self._rng = bench, random.Random(seed)
        rng = self._rng
        names = rng.choice((("graph", "other"), ("graph", "hops"), ("graph", "other"), ("graph",)))
        paths = [path for path in bench.paths[:3] if path.name in names]
        more = rng.choice((0, 4, 10, 20, 40, 60, 80, 120))
        self._serving = Serving([bench.stores[path] for path in paths], more, bench)
        self._trainers: dict[int, Trainer] = {}
        self._attaching = 0
        self._asked: Any = concurrency.SimpleQueue()
        self._attacher = concurrency.Thread(target=self._attach_all, name="attach")
        self._attacher.start()
        few = rng.sample(sorted(KINDS), rng.randrange(1, 5))  # sessions of equal parameters meet
        self._kinds = [k for k in few if KINDS[k].store in names] or ["minibatch"]

    def run(self) -> None:
        """All of it; at the end everything has been given back."""
        rng = self._rng
        for _ in range(rng.randrange(4, 10)):
            self._act()
            for _ in range(rng.randrange(10)):
                self._step(0.02)
        for trainer in self._trainers.values():
            trainer.slow = False
        while self._attaching or self._trainers:
            for trainer in self._trainers.values():
                trainer.slow = False
            self._step(LONG_S)
        self._asked.put(None)
        self._attacher.join()
        self._serving.close()

    def _act(self) -> None:
        """Something that a trainer or an operator does."""
        rng, service = self._rng, self._serving.service
        what = rng.choice(("attach",) * 5 + ("detach", "restart", "slow", "reload", "status"))
        trainers = list(self._trainers.values())
        if what == "reload":
            names = [p for p in self._bench.paths if rng.random() < 0.6] or [self._bench.paths[0]]
            by_name = {path.name: path for path in names}
            self._asked.put(list(by_name.values()))
            self._attaching += 1
        elif what == "status":
            service.status()
        elif what == "attach" or not trainers:
            self._asked.put((rng.choice(self._kinds), rng.choice(SEEDS)))
            self._attaching += 1
        elif what == "detach":
            self._leave(rng.choice(trainers))
        elif what == "slow":
            trainer = rng.choice(trainers)
            trainer.slow = not trainer.slow
        else:
            self._start(rng.choice(trainers))

    def _attach_all(self) -> None:
        """In a thread, one after another, as the daemon's: each takes memory."""
        serving = self._serving
        while (asked := self._asked.get()) is not None:
            answer = None
            try:
                if isinstance(asked, list):
                    serving.paths = asked
                    serving.service.reload()
                else:
                    answer = asked, serving.service.attach(request_of(*asked), None)
            except DaemonError:
                pass
            serving.inbox.put((0, answer))

    def _step(self, wait_s: float) -> None:
        """Take a message, or have a trainer consume one."""
        ready = [t for t in self._trainers.values() if t.came and not t.slow]
        if ready and self._rng.random() < 0.7:
            self._consume(self._rng.choice(ready))
            return
        try:
            number, message = self._serving.inbox.get(timeout=0.02 if ready else wait_s)
        except concurrency.Empty:
            if wait_s == LONG_S and not ready:
                waiting = [f"{t}, step {t.steps[:1]}" for t in self._trainers.values()]
                raise AssertionError(f"nothing comes any more for {waiting}") from None
            return
        if number == 0:
            self._attaching -= 1
            if message is not None:
                asked, attached = message
                trainer = Trainer(self._serving, *asked, attached, self._bench)
                self._trainers[trainer.number] = trainer
                self._start(trainer)
        elif number in self._trainers:
            self._trainers[number].take(message)

    def _start(self, trainer: Trainer) -> None:
        rng, steps = self._rng, trainer.attached.num_steps
        step = rng.choice((0, 0, rng.randrange(steps)))
        trainer.runs += 1
        trainer.start(rng.randrange(EPOCHS), step, rng.choice((1, 1, 1, 2)))

    def _consume(self, trainer: Trainer) -> None:
        trainer.consume()
        if trainer.steps:
            return
        if trainer.runs < 3 and self._rng.random() < 0.4:
            trainer.runs += 1
            trainer.start((trainer.epoch + 1) % EPOCHS, 0, 1)
        else:
            self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        del self._trainers[trainer.number]
        self._serving.service.detach(trainer.number)


class _Errors(logging.Handler):
    """What a thread logs as an error, it survives; a schedule does not."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


def run_script(bench: Bench, seed: int) -> None:
    """One schedule.  Raises AssertionError: a batch differs, or an error was logged."""
    errors = _Errors()
    logging.getLogger("loaderd").addHandler(errors)
    try:
        Script(bench, seed).run()
    finally:
        logging.getLogger("loaderd").removeHandler(errors)
    assert not errors.found, errors.found[0]
