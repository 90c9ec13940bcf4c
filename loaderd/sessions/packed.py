"""Packed epochs: a session whose batches, and the rows that they want, were written beforehand.

`blockstore pack` has written, for each batch of some epochs, its structure, and for each group of
batches the rows that few of them share.  A session of these parameters reads both in order.  It is
a session of hyperbatches, but for where structure and rows come from.  Sessions of other
parameters, and epochs that are not packed, are served as if there were no pack.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np

from blockstore.errors import StoreError
from blockstore.format import PAGE_BYTES
from blockstore.owners import OwnerMap
from blockstore.units import format_bytes
from loaderd.api.errors import Refused
from loaderd.memory.blob import ALIGN, Written, made
from loaderd.memory.ledger import edge_record
from loaderd.monitoring.logs import log_event
from loaderd.plans.base import EVERY_RANK
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.failures import error_text
from loaderd.sampling.hyperbatch.areas import Sampled, StructureArea
from loaderd.sampling.hyperbatch.regions import rows_by_type
from loaderd.sampling.hyperbatch.session import HyperMemory, StructureSampler
from loaderd.sampling.hyperbatch.single import Workspaces
from loaderd.sampling.hyperbatch.sizing import HyperSizing, SamplingSlots
from loaderd.sampling.packed.files import PackFiles
from loaderd.sampling.packed.format import Pack, PackIndex, pack_path, place_pages, read_pack
from loaderd.sampling.packed.rows import PackedRows, PackGeometry
from loaderd.sampling.packed.sampler import PackedSampler
from loaderd.sessions.base import Allocation, SessionRequest, StoreResources
from loaderd.sessions.build import BatchSpec
from loaderd.sessions.hyperbatch import HyperbatchSession, size_session
from loaderd.sessions.owners import read_map
from loaderd.sessions.sizing import BatchMemory, ResolvedRequest, ask

_PLANS = ("auto", MinibatchPlan.name, HyperbatchPlan.name)  # plans whose batches a pack may hold
_STRUCTURES = 3  # areas: one that is read, one that waits, one that is handed over
_TOGETHER = 8  # batches whose structure is read at a time, at most
_MAX_AREAS = 6
_log = logging.getLogger("loaderd")


class PackedMemory(NamedTuple):
    """Slots of a session of packed epochs."""

    structures: int  # areas for the structure of some batches each
    together: int  # batches in each of these
    structure: int  # bytes of one batch's structure
    hot: int
    areas: int  # for rows, one group in each
    area: int  # slots of each
    window: int
    batch: int  # slots of a batch that is handed over
    slot_bytes: int

    @property
    def run(self) -> int:
        """Contiguous slots of an area for structure."""
        return -(-self.together * self.structure // self.slot_bytes)

    @property
    def slots(self) -> int:
        rows = self.hot + self.areas * self.area
        return self.structures * self.run + rows + self.window * self.batch


class PackedSession(HyperbatchSession):
    """Batches of packed epochs."""

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        asked: ResolvedRequest,
        memory: BatchMemory,
        hyper: HyperMemory,
        parts: "_Parts",
    ) -> None:
        self._parts = parts
        seeds = np.empty(0, resources.store.manifest.id_dtype)  # its batches name their own
        times = np.empty(0, np.int64)
        record = edge_record(resources.store.manifest, asked.plan.resolved)
        spec = BatchSpec(asked.plan, seeds, times, None, record, parts.owners)
        super().__init__(resources, number, spec, asked.served, memory, hyper)

    def serves(self, epoch: int) -> bool:
        pack = self._parts.batches.pack
        return super().serves(epoch) and pack.serves(self._plan.resolved, epoch)

    def _make_sampler(self, hyper: HyperMemory) -> StructureSampler:
        del hyper
        return self._parts.sampler

    def _addresses(self, sampled: Sampled, served: int) -> Written:
        places = self._parts.sampler.places(sampled)
        address = partial(self._parts.rows.address, served, sampled.unit)
        return made((places,), np.uint64, address)

    def _end_threads(self) -> None:
        try:
            super()._end_threads()
        finally:
            self._parts.rows.close()
            self._parts.files.close()

    def _own_counters(self) -> dict[str, int]:
        return super()._own_counters() | self._parts.files.reader.counters()

    def _own_basis(self) -> str:
        sizing = self._parts.memory
        return (
            f"; packed epochs: {sizing.structures} x {sizing.run} slots of structure, "
            f"{sizing.hot} of rows that stay, {sizing.areas} x {sizing.area} of rows of groups"
        )


class _Parts(NamedTuple):
    """What a session reads its pack with."""

    batches: PackIndex
    files: PackFiles
    sampler: PackedSampler
    rows: PackedRows
    memory: PackedMemory
    owners: OwnerMap | None


# -- opening --------------------------------------------------------------------------------------


def open_packed(
    resources: StoreResources, opening: SessionRequest, epoch: int
) -> PackedSession | None:
    """Open a session that reads this epoch from a pack; None: it must be served otherwise.

    Raises Refused: nobody serves this request.  The log says why an existing pack is not used.
    """
    request = opening.request
    alone = request.world_size > 1 and request.rank != EVERY_RANK  # positions are not its steps
    other = request.edge_features or request.edge_weights or request.edge_times or request.rows
    if request.plan not in _PLANS or alone or other or request.home:
        return None
    asked = ask(resources, opening, HyperbatchPlan.name)
    resolved = asked.plan.resolved
    folder = pack_path(resources.store.path, resolved, request.world_size)
    if not folder.exists():
        return None
    try:
        index = PackIndex(read_pack(folder), resolved)
        if not index.pack.serves(resolved, epoch) or _fits(resources, asked):
            return None
        with ExitStack() as stack:
            files = stack.enter_context(PackFiles(folder, index.pack, resources.reader))
            session = _open(resources, opening.number, asked, index, files)
            stack.pop_all()
            return session
    except (StoreError, OSError, Refused) as error:
        log_event(
            _log, logging.WARNING, "pack not used", pack=str(folder), reason=error_text(error)
        )
        return None


def _fits(resources: StoreResources, asked: ResolvedRequest) -> bool:
    """Whether plan `auto` has all in memory without the pack: nothing is read then."""
    if asked.request.plan != "auto":
        return False
    try:
        return size_session(resources, asked).fits
    except Refused:
        return False


def _open(
    resources: StoreResources,
    number: int,
    asked: ResolvedRequest,
    index: PackIndex,
    files: PackFiles,
) -> PackedSession:
    """Raises Refused: there is no room."""
    geometry = PackGeometry(index.pack, rows_by_type(asked.served))
    slot_bytes, owners = resources.budget.slot_bytes, asked.owner_bytes
    map_slots = -(-owners * resources.store.manifest.num_nodes // slot_bytes)
    room = int(resources.broker.available() * resources.settings.session_share) - map_slots
    window = asked.window(resources.settings)
    memory = size_packed(geometry, index.pack, slot_bytes, room, window, owners)
    if memory.slots > room:
        raise Refused(
            f"needs {format_bytes(memory.slots * slot_bytes)} of the arena, "
            f"{format_bytes(room * slot_bytes)} can be had: serve with more --mem, or pack with "
            "less --hot and --group"
        )
    with resources.allocation() as allocation:
        owner_map = read_map(resources.store, asked.request, allocation.run(map_slots))
        hyper, parts = _take(resources, allocation, memory, geometry, index, files, owner_map)
        quota = allocation.slots(memory.window * memory.batch)
        batches = BatchMemory(allocation, Workspaces(), quota, memory.window, 0)
        return PackedSession(resources, number, asked, batches, hyper, parts)


def _take(
    resources: StoreResources,
    allocation: Allocation,
    memory: PackedMemory,
    geometry: PackGeometry,
    index: PackIndex,
    files: PackFiles,
    owners: OwnerMap | None,
) -> tuple[HyperMemory, _Parts]:
    """Take areas for structure and rows.  Raises Refused."""
    areas = [StructureArea(allocation.run(memory.run)) for _ in range(memory.structures)]
    hot = allocation.slots(memory.hot)
    groups = [allocation.slots(memory.area) for _ in range(memory.areas)]
    rows = PackedRows(index, files, geometry, resources.budget.slot_bytes, hot, groups)
    sampler = PackedSampler(index, files, resources.arena.data)
    sizing = HyperSizing(
        1, memory.together, memory.structures, memory.run, SamplingSlots(), 0, (), memory.hot, 0, 0,
        memory.window * memory.batch,
    )  # fmt: skip
    parts = _Parts(index, files, sampler, rows, memory, owners)
    return HyperMemory(sizing, areas, None, rows), parts


def size_packed(
    geometry: PackGeometry, pack: Pack, slot_bytes: int, room: int, window: int, owners: int = 0
) -> PackedMemory:
    """Divide `room` slots for a session; a result with more `slots` is the least possible.

    owners   bytes of a node's owner, if the session has an owner map

    A group is read while the one before it is served, and batches of it are in flight.  Without
    room for two, a group is read when all batches of the one before it have been released.
    """
    nodes = max(n for epoch in pack.epochs for n in epoch.nodes)
    pages = max(
        own + place_pages(n)
        for epoch in pack.epochs
        for own, n in zip(epoch.pages, epoch.nodes, strict=True)
    )
    records = max(own for epoch in pack.epochs for own in epoch.pages)
    # arrays that lie as one in a record are aligned one by one when they are handed over
    arrays = 9 + sum(map(len, pack.resolved.fanouts))
    structure = -(-(records * PAGE_BYTES + nodes * owners + ALIGN * arrays) // slot_bytes)
    addresses = -(-(8 * nodes + ALIGN) * len(geometry.per_block) // slot_bytes)
    batches = sum(len(epoch.pages) for epoch in pack.epochs)
    each = max(1, batches // sum(len(epoch.groups) for epoch in pack.epochs))
    area = sum(geometry.max_blocks)
    ample = PackedMemory(
        _STRUCTURES, min(_TOGETHER, batches), pages * PAGE_BYTES, geometry.hot_slots,
        min(_MAX_AREAS, 2 + -(-(window + _TOGETHER) // each)), area, window,
        structure + addresses, slot_bytes,
    )  # fmt: skip
    smaller: list[Callable[[PackedMemory], PackedMemory]] = [
        lambda m: m._replace(areas=max(3, m.areas - 1) if m.areas > 3 else m.areas),
        lambda m: m._replace(together=max(4, m.together - 1) if m.together > 4 else m.together),
        lambda m: m._replace(window=max(2, m.window - 1) if m.window > 2 else m.window),
        lambda m: m._replace(structures=2),
        lambda m: m._replace(areas=min(2, m.areas)),
        lambda m: m._replace(together=max(1, m.together - 1)),
        lambda m: m._replace(window=1),
    ]
    for found in (ample, ample._replace(areas=1)):
        for make in smaller:
            while found.slots > room and make(found) != found:
                found = make(found)
        if found.slots <= room:
            break
    return found
