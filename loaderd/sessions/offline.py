"""Sample the structure of a session's batches in order, to pack them: no client, no rows."""

from collections.abc import Iterator, Sequence

from msgspec import structs

from blockstore.closing import Closing
from blockstore.format import Manifest
from blockstore.store import Store
from loaderd.api.errors import BatchFailed
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import EngineSettings
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.hyperbatch.areas import Sampled, StructureArea
from loaderd.sampling.hyperbatch.session import StructureSampler
from loaderd.sampling.hyperbatch.single import BatchSampler, SessionWorkers
from loaderd.sessions.base import Allocation, SessionRequest
from loaderd.sessions.engine import Engine
from loaderd.sessions.hyperbatch import draft_session, size_session, take_sampling
from loaderd.sessions.lookahead import LookAhead, SessionDraft, block_sampler
from loaderd.sessions.sizing import ask, explained_shortage

_MAX = 64  # batches sampled at a time if the graph is in memory
_AREA_BYTES = 64 << 20  # for their structures, at most


def bare_store(store: Store) -> Store:
    """A store without rows: its sessions need memory for the graph alone."""
    manifest = store.manifest
    types = tuple(
        structs.replace(t, features={}, label=None, halo=None, hops={}) for t in manifest.types
    )
    relations = tuple(structs.replace(r, features={}, halo=None) for r in manifest.relations)
    bare: Manifest = structs.replace(manifest, types=types, relations=relations)
    return Store(store.path, bare)


class OfflineSampler(Closing):
    """Samples batches as a session of the same request would, at all positions of its ranks."""

    def __init__(self, store: Store, request: Attach, settings: EngineSettings) -> None:
        """`request`: of rank `EVERY_RANK`, if there are several.

        Raises BudgetTooSmall, Refused, StoreError.
        """
        self._engine = Engine(bare_store(store), settings)
        try:
            resources = self._engine.resources
            asked = ask(resources, SessionRequest(0, request, None), HyperbatchPlan.name)
            sized = size_session(resources, asked)
            with (
                explained_shortage(resources, sized.need.minimum),
                resources.allocation() as allocation,
            ):
                draft = draft_session(resources, asked, sized, allocation)
                self.plan: MinibatchPlan = draft.spec.plan
                self._open(draft, allocation)
                self._allocation = allocation
        except BaseException:
            self._engine.close()
            raise

    def _open(self, draft: SessionDraft, allocation: Allocation) -> None:
        resources, spec = self._engine.resources, draft.spec
        workers = SessionWorkers(draft.workspaces, resources.workers.later, lambda: None)
        with LookAhead(resources, draft) as ahead:
            sizing = ahead.sizing(0)
            ahead.forget()  # every epoch is sampled alike
        self._sampler: StructureSampler
        if sizing is None:  # the graph is in memory, or there is room for one batch at a time only
            slot_bytes = resources.budget.slot_bytes
            room = min(_AREA_BYTES // slot_bytes, resources.broker.row_slots() // 2)
            self._area = StructureArea(allocation.run(max(draft.need.structure, room)))
            self._maximum = _MAX
            self._sampler = BatchSampler(
                lambda unit, work: resources.builder.structure(spec, unit, work), workers
            )
        else:
            self._area = StructureArea(allocation.run(sizing.area, SHORT_WAIT_S))
            self._maximum = sizing.size
            memory = take_sampling(allocation, sizing.sampling, resources.budget.slot_bytes)
            self._sampler = block_sampler(resources, spec, workers, memory)

    def close(self) -> None:
        self._allocation.free()
        self._engine.close()

    def batches(self, epoch: int, positions: Sequence[int]) -> Iterator[Sampled]:
        """Batches in order; each is valid until the next.  Raises BatchFailed, StoreError."""
        at = 0
        while at < len(positions):
            units = [self.plan.unit(epoch, step) for step in positions[at : at + self._maximum]]
            found = self._sampler.sample(units, at, self._area, lambda: False)
            if not found:
                raise BatchFailed("a batch's structure takes more than there is room for")
            yield from found
            self._area.rewind()
            at += len(found)
