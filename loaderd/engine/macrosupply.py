"""Memory of macro-batches out of the arena: what a job's sessions share, and one run for each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockstore.format import NodeType
from loaderd.engine.attachment import Attachment, Opening
from loaderd.errors import Refused
from loaderd.macro.cut import MacroCut
from loaderd.macro.graph import MacroGraph, MacroShared, carve_macro
from loaderd.macro.job import Job
from loaderd.macro.shelf import Memory, Reader
from loaderd.memory.ledger import ServedRows
from loaderd.memory.slots import WAIT_S
from loaderd.memory.workspace import Carver
from loaderd.plans.macrobatch import MacrobatchPlan, SeedGroups

_SPARE = 8  # slots of the pools that are left to them, when one more memory is taken


class ArenaSupply:
    """Takes memories for macro-batches, and gives them back."""

    def __init__(self, opening: Opening, served: list[ServedRows], cut: MacroCut) -> None:
        """`read` comes before anything is taken."""
        self._opening, self._served, self._cut = opening, served, cut
        self._common: list[int] = []  # slots of what all share
        self._shared: MacroShared

    def places(self) -> NDArray[np.int64]:
        """Memory for the seeds, by partition.  Raises Refused."""
        return self._take_run(self._cut.places).view(np.int64)

    def read(self) -> None:
        """Read hubs and the ids of copies.  Raises Refused, CorruptBlock, OSError."""
        opening, cut = self._opening, self._cut
        transit = [self._take_run(cut.run) for _ in range(cut.transit)]
        self._shared = MacroShared(
            opening.store, opening.macro_files(), self._served, opening.reader, opening.arena.data,
            transit, self._take_run(cut.ids), self._take_run(cut.hubs), cut.choice,
        )  # fmt: skip

    def take(self) -> Memory | None:
        """One more, where there is room right now."""
        if self._opening.broker.available() < self._cut.macro + _SPARE:
            return None
        try:
            return self.wait(0.0)
        except (Refused, MemoryError):  # slots are free, but not side by side
            return None

    def wait(self, wait_s: float = WAIT_S) -> Memory:
        """One more.  Raises Refused: there is no room, even after so long."""
        slots = self._slots(self._cut.macro, wait_s)
        manifest, cut = self._opening.store.manifest, self._cut
        try:
            carver = Carver(self._bytes(slots))
            arrays = carve_macro(carver, manifest, self._served, cut.bounds, cut.choice)
            return Memory(MacroGraph(self._shared, arrays), slots)
        except BaseException:
            self._opening.broker.give(list(slots))
            raise

    def give(self, memories: Sequence[Memory], last: bool) -> None:
        """These are not needed any more; `last`: nor is what all of them shared."""
        slots = [slot for memory in memories for slot in memory.slots]
        if last:
            slots += self._common
            self._common = []
        self._opening.broker.give(slots)

    def num_slots(self, memories: int) -> int:
        """Slots of so many, with what they share."""
        return len(self._common) + memories * self._cut.macro

    def basis(self, memories: int) -> str:
        """The same in words."""
        return self._cut._replace(memories=memories).basis()

    def _slots(self, count: int, wait_s: float) -> range:
        first = self._opening.broker.take_run(count, wait_s)
        return range(first, first + count)

    def _bytes(self, slots: range) -> NDArray[np.uint8]:
        size = self._opening.budget.slot_bytes
        return self._opening.arena.data[slots.start * size : slots.stop * size]

    def _take_run(self, count: int) -> NDArray[np.uint8]:
        slots = self._slots(count, WAIT_S)
        self._common += slots
        return self._bytes(slots)


def open_job(
    opening: Opening, attachment: Attachment, node_type: NodeType, cut: MacroCut, reader: Reader
) -> Job:
    """A job with the memory of `cut`, for the session whose seeds are there, and others like it.

    Raises Refused, CorruptBlock, OSError; what was taken is given back then.
    """
    files, plan, seeds = opening.macro_files(), attachment.plan, attachment.seeds
    assert isinstance(plan, MacrobatchPlan)
    supply, memories = ArenaSupply(opening, attachment.served, cut), list[Memory]()
    try:
        offsets = files.offsets[files.type_of[node_type.name]]
        groups = SeedGroups(seeds, offsets, supply.places()[: seeds.size])
        plan = plan.placed(groups.counts)
        supply.read()
        for _ in range(cut.memories):
            memories.append(supply.wait())
        job = Job(plan, groups, supply, memories)
    except BaseException:
        supply.give(memories, last=True)
        raise
    job.join(reader)  # nobody has left a job that nobody has joined: it has not ended
    return job
