"""Division of a daemon's memory by the engine's own rules, from expected sizes."""

from typing import Any, NamedTuple, cast

import numpy as np

from blockstore.format import ITEM_BYTES, Manifest
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import (
    Budget,
    EngineSettings,
    ServedRows,
    SessionNeed,
    chosen_rows,
    make_budget,
    make_sizes,
    structure_bytes,
)
from loaderd.memory.workspace import TableKind, workspace_bytes
from loaderd.plans.base import Part, Shape
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.hyperbatch.regions import rows_by_type
from loaderd.sampling.hyperbatch.single import usual_shape
from loaderd.sampling.hyperbatch.sizing import (
    Estimate,
    HyperSizing,
    PassEstimate,
    size_hyperbatches,
)
from loaderd.sampling.hyperbatch.unfinished import begun_bytes, scratch_bytes
from loaderd.sampling.rows import ServedFiles
from loaderd.sampling.structure import Structure
from loaderd.sessions.resolve import make_plan, resolve
from loaderd.sessions.sizing import (
    SessionSizing,
    choose_table,
    session_needs,
    size_minibatches,
    size_workspaces,
)
from loaderd.sessions.tables import table_slots
from tools.model.occupancy import Occupancy

LOOKED_AT = 16  # batches that a hyperbatch session samples when it attaches


class DaemonMemory(NamedTuple):
    """Memory of one session, alone at its daemon."""

    budget: Budget
    steps: int  # minibatches of an epoch
    plan: MinibatchPlan
    served: list[ServedRows]
    sizing: SessionSizing  # of plain minibatches
    row_slots: int  # for blocks of rows, with plain minibatches
    hyper: HyperSizing | None  # None: all is in memory, or hyperbatches have no room

    @property
    def graph_stays(self) -> bool:
        return self.budget.graph_slots >= self.budget.graph_blocks

    @property
    def rows_stay(self) -> bool:
        return self.row_slots >= self.budget.row_blocks


def share_memory(
    manifest: Manifest, settings: EngineSettings, request: Attach, occupancy: Occupancy
) -> DaemonMemory:
    """The memory that a session of minibatches or hyperbatches gets for this request.

    Raises BudgetTooSmall, Refused.
    """
    budget = make_budget(manifest, settings)
    num_seeds = manifest.types[0].splits[request.split].num_rows
    resolved = resolve(manifest, request, request.split, num_seeds)
    plan, slot = make_plan(manifest, resolved, Part(), "minibatch"), budget.slot_bytes
    needs = session_needs(manifest, plan, num_seeds, 0, num_seeds, slot, 0)
    available = budget.num_slots - budget.graph_min
    tables = settings.workers * table_slots(manifest.num_nodes, slot)
    kind = choose_table(needs, tables, available)
    available -= tables * (kind is TableKind.SHARED)
    need, window = needs[kind], max(2 * settings.workers, request.window)
    spare = max(0, budget.graph_slots - budget.graph_min)
    pooled = available - spare
    sizing = size_minibatches(need, available, pooled, budget.row_blocks, settings, window)
    row_slots = max(0, pooled - sizing.slots(need))
    memory = DaemonMemory(
        budget, plan.num_steps, plan, chosen_rows(manifest, resolved), sizing, row_slots, None
    )
    if request.plan == "minibatch" or (memory.graph_stays and memory.rows_stay):
        return memory
    hyper = _size_hyperbatches(manifest, settings, memory, need, kind, occupancy)
    return memory._replace(hyper=hyper)


def _size_hyperbatches(
    manifest: Manifest, settings: EngineSettings, memory: DaemonMemory, need: SessionNeed,
    kind: TableKind, occupancy: Occupancy,
) -> HyperSizing | None:  # fmt: skip
    """The result of `LookAhead` if the batches that it samples are as expected."""
    budget, plan, slot = memory.budget, memory.plan, memory.budget.slot_bytes
    sizes = make_sizes(manifest, plan.resolved, kind)
    own = size_workspaces(need, budget.num_slots - budget.graph_min, memory.sizing.window)
    usual, worst = _structure(occupancy), plan.shape()
    absent = budget.graph_blocks - budget.graph_slots
    shape = usual_shape([usual], worst, None if absent > 0 else plan.resolved.fanouts)
    rows = budget.num_slots - budget.graph_slots
    small, large = (workspace_bytes(s, sizes) for s in (shape, worst))
    rows -= need.seeds + need.workspace + own.transit
    each = small if small < large * 3 // 4 else large
    count = min(max(0, settings.workers - 2), max(1, rows // 4 * slot // each))
    rows -= count * (-(-each // slot) + own.transit)
    if kind is TableKind.SHARED:
        rows -= (1 + count) * table_slots(manifest.num_nodes, slot)
    item, blocks = ITEM_BYTES[manifest.id_dtype], manifest.relations[0].num_blocks
    scratch = scratch_bytes(usual, blocks, item, 0)
    passes = PassEstimate(
        sum(scratch), max(scratch),
        max(scratch_bytes(_worst(worst), blocks, item, 0)), begun_bytes(usual, item, 0),
        len(worst.frontier) - 1, absent * slot,
    )  # fmt: skip
    estimate = Estimate(
        plan.num_steps,
        item * usual.num_nodes + 8 * usual.num_seeds + 4 * (usual.num_edges + usual.num_counts),
        compact_bytes(usual, item), usual.num_nodes,
        structure_bytes(worst, sizes),
        tuple(
            np.rint(occupancy.graph.nodes @ occupancy.wanted(batches)).astype(np.int64)
            for batches in (1, 2, 4, 8, LOOKED_AT)
            if batches <= plan.num_steps
        ),
        None if memory.graph_stays else passes,
    )  # fmt: skip
    files = ServedFiles(
        memory.served, cast(Any, None), 0, np.empty(0, np.uint8), slot, manifest.block_bytes,
        manifest.id_dtype,
    )  # fmt: skip
    room = int(rows * settings.session_share)
    return size_hyperbatches(room, files, need, estimate, settings.readers, memory.sizing.window, 0)


def _structure(occupancy: Occupancy) -> Structure:
    nodes = tuple(round(n) for n in occupancy.nodes)
    edges = tuple((round(e),) for e in occupancy.edges)
    total = sum(round(e) for e in occupancy.edges)
    return Structure(nodes, edges, sum(nodes), total, nodes[:-1], nodes[0])


def _worst(shape: Shape) -> Structure:
    return Structure(
        (*shape.frontier, 0), shape.edges, shape.nodes, shape.total_edges, shape.frontier,
        shape.seeds,
    )  # fmt: skip


def compact_bytes(structure: Structure, id_bytes: int) -> int:
    """Bytes of a batch that waits for its turn, see `loaderd.sampling.hyperbatch.compact`."""
    again = structure.num_edges - (structure.num_nodes - structure.num_seeds)
    places = structure.num_edges // 8 + 3 * again + 8 * structure.num_seeds
    return id_bytes * structure.num_nodes + structure.num_counts + places


def served_widths(memory: DaemonMemory) -> tuple[int, ...]:
    """Bytes per row of each array that batches have."""
    return rows_by_type(memory.served)[0].row_bytes
