"""Opening of hyperbatches: what a session of them gets, and who samples for it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from loaderd.batch.structure import Structure
from loaderd.batch.topology import Topology
from loaderd.devicecost import DeviceCost, DeviceGauge
from loaderd.engine.attachment import Attachment, Opening
from loaderd.engine.build import Builder
from loaderd.engine.lookahead import LookAhead, Prospect
from loaderd.engine.production import Production
from loaderd.errors import Refused
from loaderd.hyper.cut import HyperCut
from loaderd.hyper.session import Hyper, Sampled, Sampler, StructureArea
from loaderd.hyper.single import BatchSampler, Crew
from loaderd.hyper.together import BlockSampler
from loaderd.memory.ledger import served_rows
from loaderd.memory.residency import Residency
from loaderd.memory.workspace import Workspace
from loaderd.plans.base import Unit
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.protocol import Attach
from loaderd.trace import Trace


class HyperDesk:
    """Opens hyperbatches for sessions of one store."""

    def __init__(
        self,
        opening: Opening,
        builder: Builder,
        topology: Topology,
        graph: Residency,
        gauge: DeviceGauge,
        production: Production,
        trace: Trace | None,
    ) -> None:
        self._opening, self._builder, self._topology = opening, builder, topology
        self._graph, self._gauge, self._production, self._trace = graph, gauge, production, trace
        self._turn = concurrency.Lock()  # of sampling block by block
        first = opening.first_rows
        self._row_files = range(first, first + len(served_rows(opening.store.manifest)))
        self._ahead = LookAhead(
            opening.store, opening.settings, opening.budget, opening.broker, opening.arena,
            builder, self._block_sampler, self._cost,
        )  # fmt: skip

    def open(self, session: int, attachment: Attachment, request: Attach) -> None:
        """Take the memory of a session of hyperbatches and start its threads.

        Where there is no room for them, or no use, it serves plain minibatches: they are the same.
        Raises Refused.
        """
        opening, production = self._opening, self._production
        if attachment.edge_rows:  # batches are built one by one
            self._fall_back(attachment)
            return
        seen = self.prospect(attachment, request.hyperbatch)
        cut = seen.cut
        if request.plan == "auto" and seen.choice() != HyperbatchPlan.name:
            cut = None
        if cut is None or not self._take(attachment, cut):
            self._fall_back(attachment)
            return
        attachment.take_quota(opening.broker, cut.quota)
        crew = Crew(
            attachment.workspaces,
            production.later,
            lambda: production.pump_open(session, attachment),
        )
        attachment.hyper = Hyper(
            attachment.plan, self._sampler(attachment, crew), attachment.row_cache,
            attachment.areas, cut.size, cut.chunk, _Hand(production, session, attachment),
            self._trace,
        )  # fmt: skip

    def _fall_back(self, attachment: Attachment) -> None:
        """Plain minibatches."""
        opening = self._opening
        attachment.fall_back(
            opening.store.manifest, opening.broker, opening.arena, opening.budget.row_blocks,
            opening.settings,
        )  # fmt: skip

    def prospect(self, attachment: Attachment, asked: int) -> Prospect:
        """What a session would get, by either plan; `asked`: minibatches of a hyperbatch."""
        # in this thread: workers may have other sessions' batches to build all the time, and an
        # attach that waits for them keeps all others waiting
        crew = Crew(attachment.workspaces, lambda step: step(), lambda: None)
        return self._ahead.prospect(attachment, crew, asked)

    def _take(self, attachment: Attachment, cut: HyperCut) -> bool:
        """Take areas and cache; False where the arena's free slots lie too far apart."""
        try:
            attachment.take_hyper(self._opening, cut, self._cost)
        except Refused:
            return False
        return True

    def _cost(self, buffers: Sequence[NDArray[np.uint8]]) -> DeviceCost:
        """What reading rows costs."""
        return self._gauge.cost(self._row_files, buffers)

    def _sampler(self, attachment: Attachment, crew: Crew) -> Sampler:
        """Batches one by one where the graph is in memory, else together."""
        if attachment.scratch is None:
            return BatchSampler(
                lambda unit, work: self._timed_structure(attachment, unit, work), crew
            )
        return self._block_sampler(attachment, crew, attachment.scratch)

    def _block_sampler(
        self, attachment: Attachment, crew: Crew, scratch: StructureArea
    ) -> BlockSampler:
        manifest = self._opening.store.manifest
        edge_ids = max((r.edge_id_dtype or "uint32" for r in manifest.relations), default="uint32")
        return BlockSampler(
            attachment.plan,
            lambda units, held: self._builder.roots(attachment, units, held),
            self._topology, self._graph, crew, scratch, self._turn, manifest.id_dtype,
            edge_ids, self._trace,
        )  # fmt: skip

    def _timed_structure(self, attachment: Attachment, unit: Unit, work: Workspace) -> Structure:
        begun = concurrency.perf_counter_ns()
        structure = self._builder.structure(attachment, unit, work)
        self._production.sampled(concurrency.perf_counter_ns() - begun)
        return structure


class _Hand:
    """What a session's hyperbatches are handed to."""

    def __init__(self, production: Production, session: int, attachment: Attachment) -> None:
        self._production, self._session, self._attachment = production, session, attachment

    def admit(self, run: int, batches: Sequence[Sampled], cached: bool) -> bool:
        """Take batches in order; False where their run has ended."""
        return self._production.admit(self._session, self._attachment, run, batches, cached)

    def failed(self, run: int, unit: Unit, error: BaseException) -> None:
        """The run ends here."""
        self._production.hyper_failed(self._session, self._attachment, run, unit, error)
