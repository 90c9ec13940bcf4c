"""Bytes and read calls of an epoch, by plan."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np

from blockstore.format import PAGE_BYTES, Manifest, edge_layout, row_geometry
from loaderd.monitoring.devicecost import RUN_BYTES, DeviceCost
from loaderd.plans.hyperbatch import region_pages
from loaderd.sampling.hyperbatch.sizing import HyperSizing
from tools.model.graph import Counts, Graph
from tools.model.memory import LOOKED_AT, DaemonMemory, served_widths
from tools.model.occupancy import Occupancy

_GAPS = (*range(9), 16, 32, 64, 128, 256)  # candidate gaps in pages that are read over


class Load(NamedTuple):
    """Amount of data that is read, or sent over a network."""

    bytes: float = 0.0
    calls: float = 0.0

    def plus(self, num_bytes: float, calls: float) -> "Load":
        return Load(self.bytes + num_bytes, self.calls + calls)


class Reads(NamedTuple):
    """Reads of an epoch."""

    first: Load  # before the first batch of the first epoch
    epoch: Load
    graph: Load = Load()  # part of `epoch`, for the graph
    first_rows: float = 0.0  # bytes of rows in `first`, each counted as often as it is loaded
    rows: float = 0.0  # the same in `epoch`
    groups: Sequence[int] = ()  # minibatches of each hyperbatch; (): no hyperbatches

    @property
    def size(self) -> int:
        """Minibatches that are built together."""
        return max(self.groups, default=1)


def graph_pass(
    manifest: Manifest, occupancy: Occupancy, batches: float, hops: Sequence[int], slots: int
) -> float:
    """Blocks of the graph that are read to draw some hops of `batches` batches together.

    slots   blocks that stay from one pass to the next, as passes alternate their direction
    """
    graph, blocks = occupancy.graph, manifest.relations[0].num_blocks
    weight = graph.nodes @ _column_bytes(manifest, graph)  # bytes of the graph by region
    idle = np.prod([1 - occupancy.expanded(hop, batches) for hop in hops], axis=0)
    expanded = graph.nodes @ ((1 - idle) * (graph.into > 0))
    in_block = expanded / np.maximum(weight, 1) * weight.sum() / blocks
    needed = float(weight @ (1 - np.exp(-in_block))) / float(weight.sum()) * blocks
    return max(0.0, needed - slots)


def graph_passes(
    manifest: Manifest, occupancy: Occupancy, groups: Sequence[int], slots: int, begun: bool
) -> float:
    """Blocks read for hyperbatches with `groups` batches each.

    One pass draws the last hop of one hyperbatch, the last but one of the next, and so on.  The
    first hyperbatch takes a pass for each of its other hops before that, unless it is `begun`.
    """
    hops = range(len(occupancy.edges))
    own = hops[-1:] if begun else hops
    read = sum(graph_pass(manifest, occupancy, groups[0], hops[: hop + 1], slots) for hop in own)
    for size, count in Counter(groups[1:]).items():
        read += count * graph_pass(manifest, occupancy, size, hops, slots)
    return read


def _column_bytes(manifest: Manifest, graph: Graph) -> Counts:
    """(classes,) bytes of a column in the graph blocks."""
    bits = sum(edge_layout(manifest, manifest.relations[0]).bits)
    found: Counts = 4 + graph.into * bits / 8
    return found


def hyperbatch_reads(
    manifest: Manifest,
    occupancy: Occupancy,
    memory: DaemonMemory,
    sizing: HyperSizing,
    disk: DeviceCost,
) -> Reads:
    """Reads of an epoch of hyperbatches."""
    steps, block, slots = memory.steps, manifest.block_bytes, memory.budget.graph_slots
    if memory.graph_stays:
        looked, blocks = float(memory.budget.graph_blocks), 0.0
    else:
        # The batches sampled at the attach take a pass for each hop.  After the first one, blocks
        # are where memory is free: a half of the row pool.
        seen, hops = min(LOOKED_AT, steps), range(len(occupancy.edges))
        held = slots + (memory.budget.num_slots - slots) // 2
        looked = sum(
            graph_pass(manifest, occupancy, seen, [hop], held if hop else slots) for hop in hops
        )
        begun = held >= memory.budget.graph_blocks
        blocks = graph_passes(manifest, occupancy, _groups(steps, sizing), slots, begun)
    first, graph = Load(looked * block, looked), Load(blocks * block, blocks)
    epoch, groups = graph, _groups(steps, sizing)
    if not sizing.shares:
        rows = minibatch_rows(manifest, occupancy, memory._replace(row_slots=0), disk)
        return Reads(first, epoch.plus(*rows), graph, rows=rows.bytes, groups=groups)
    share, widths = sizing.shares[0], served_widths(memory)
    fill = share.stay_rows * sum(widths)
    passes = np.ones(len(occupancy.graph.nodes), bool)
    passes[share.stay] = False
    nodes, brought = occupancy.graph.nodes[passes], 0.0
    # areas hold the group handed out, the group being loaded, and known later groups
    rows, known = nodes.sum(1), max(0.0, sizing.areas * sizing.chunk / sizing.size - 2)

    def missing(before: int, batches: int) -> tuple[float, Load]:
        """Bytes of rows that a group lacks, and the reads for them."""
        # rows of the previous group are present, and some rows of earlier groups
        kept = rows_still_there(occupancy.wanted(before), nodes.sum(0), share.entries, known)
        absent = nodes @ (occupancy.wanted(batches) * (1 - kept)) / np.maximum(rows, 1)
        found = Load()
        for width in widths:
            found = found.plus(*_pages_of(rows, width, absent, disk))
        return float(rows @ absent) * sum(widths), found

    # rows at the end of an epoch are still present when the next one begins
    for (before, batches), count in Counter(pairwise([groups[-1], *groups])).items():
        lacks, load = missing(before, batches)
        brought += count * lacks
        epoch = epoch.plus(count * load.bytes, count * load.calls)
    (_, cold), (_, warm) = missing(0, groups[0]), missing(groups[-1], groups[0])
    first = first.plus(fill + cold.bytes - warm.bytes, fill / RUN_BYTES + cold.calls - warm.calls)
    return Reads(first, epoch, graph, fill, brought, groups)


def _pages_of(rows: Counts, width: int, wanted: Counts, disk: DeviceCost) -> Load:
    """Reads for a share `wanted` of the rows of each region."""
    ways = [region_pages(rows, width, wanted, gap) for gap in _GAPS]
    pages, runs = np.array(ways).sum(2).T
    best = disk.best_of(pages, runs)
    num_bytes = float(pages[best]) * PAGE_BYTES
    return Load(num_bytes, float(runs[best]) + num_bytes / RUN_BYTES)


def _groups(steps: int, sizing: HyperSizing) -> list[int]:
    """Numbers of batches whose rows are loaded together; the first has those sampled first."""
    sizes = [min(steps, sizing.chunk, sizing.size)]
    while (left := steps - sum(sizes)) > 0:
        sizes.append(min(left, sizing.size))
    return sizes


def rows_still_there(wanted: Counts, nodes: Counts, entries: int, known: float) -> Counts:
    """Probability that a row which does not stay is in the cache when a group needs it.

    It is if one of the last t groups needed it, with t such that all entries are full: as in
    Che's approximation, except that a row which none of the next `known` groups needs is evicted
    that many groups earlier.
    """
    low, high = 0.0, 1e6
    for _ in range(60):
        t = (low + high) / 2
        gone = (1 - wanted) ** t * (1 + max(0.0, min(t - 1, known)) * wanted)
        full = float(nodes @ (1 - gone)) > entries
        low, high = (low, t) if full else (t, high)
    found: Counts = 1 - (1 - wanted) ** low
    return found


def minibatch_rows(
    manifest: Manifest, occupancy: Occupancy, memory: DaemonMemory, disk: DeviceCost
) -> Load:  # fmt: skip
    """Reads of pages of rows in an epoch of minibatches, without blocks that stay in memory."""
    rows = occupancy.graph.nodes.sum(1)
    wanted = occupancy.graph.nodes @ occupancy.wanted(1) / np.maximum(rows, 1)
    # A block in use is not evicted for another, so those that came first stay: the first batch
    # requests its blocks array by array, those with most of its rows first.
    found, room = Load(), float(memory.row_slots)
    for served in memory.served:
        per_block = row_geometry(served.array, manifest.block_bytes).rows_per_block
        used = -np.expm1(-wanted * per_block * 2 * memory.sizing.window)  # before it may leave
        blocks, order = used * rows / per_block, np.argsort(-wanted, kind="stable")
        before = np.empty(blocks.size)
        before[order] = np.cumsum(blocks[order]) - blocks[order]
        there = used * np.clip((room - before) / np.maximum(blocks, 1e-9), 0, 1)
        room = max(0.0, room - float(blocks.sum()))
        load = _pages_of(rows * (1 - there), served.array.row_bytes, wanted, disk)
        found = found.plus(memory.steps * load.bytes, memory.steps * load.calls)
    return found


def _row_blocks(
    manifest: Manifest, occupancy: Occupancy, memory: DaemonMemory, batches: float
) -> float:  # fmt: skip
    """Distinct blocks of rows that `batches` batches need."""
    rows = occupancy.graph.nodes.sum(1)
    wanted, found = occupancy.graph.nodes @ occupancy.wanted(batches) / np.maximum(rows, 1), 0.0
    for served in memory.served:
        per_block = row_geometry(served.array, manifest.block_bytes).rows_per_block
        found += float(rows @ (1 - np.exp(-wanted * per_block))) / per_block
    return found


def minibatch_reads(
    manifest: Manifest, occupancy: Occupancy, memory: DaemonMemory, disk: DeviceCost
) -> Reads:  # fmt: skip
    """Reads of an epoch of minibatches."""
    steps, block, first, epoch = memory.steps, manifest.block_bytes, Load(), Load()
    if memory.graph_stays:
        first = first.plus(memory.budget.graph_blocks * block, memory.budget.graph_blocks)
    else:
        hops = range(len(occupancy.edges))
        slots = memory.budget.graph_slots
        blocks = steps * sum(graph_pass(manifest, occupancy, 1, [hop], slots) for hop in hops)
        epoch = epoch.plus(blocks * block, blocks)
    if memory.rows_stay:
        blocks = _row_blocks(manifest, occupancy, memory, steps)
        return Reads(first.plus(blocks * block, blocks), epoch, epoch, blocks * block)
    rows = minibatch_rows(manifest, occupancy, memory, disk)
    stay = min(memory.row_slots, _row_blocks(manifest, occupancy, memory, steps))
    return Reads(first.plus(stay * block, stay), epoch.plus(*rows), epoch, rows=rows.bytes)


def macrobatch_reads(manifest: Manifest) -> Reads:
    """Each partition once per epoch: rows by pages, columns by blocks; hubs once in all."""
    node, relation, block = manifest.types[0], manifest.relations[0], manifest.block_bytes
    arrays = [a for a in (*node.features.values(), node.label) if a is not None]
    width, parts = sum(a.row_bytes for a in arrays), node.num_partitions
    rows, blocks = float(node.num_nodes * width), float(relation.num_blocks + parts - 1)
    first, halo = Load(), node.halo
    if halo is not None and relation.halo is not None:
        hubs = node.hubs.num_rows if node.hubs is not None else 0
        own = hubs / max(1, halo.nodes.num_rows)  # hubs' share of the copies; the rest are halos
        rows += (halo.nodes.num_rows - hubs) * width
        blocks += relation.halo.num_blocks * (1 - own)
        first = first.plus(hubs * width + own * relation.halo.num_blocks * block, parts)
    # a page at the border of two partitions is read with both
    num_bytes = rows + parts * len(arrays) * PAGE_BYTES + blocks * block
    return Reads(first, Load(num_bytes, num_bytes / (128 * PAGE_BYTES)), rows=rows)


def chunk_reads(rows: int, widths: Sequence[int], chunk: int, room: float) -> Reads:
    """Reads of propagated features, `widths` bytes per row; only once if they fit in memory."""
    total = float(rows * sum(widths))
    if total <= room:
        return Reads(Load(total, total / RUN_BYTES), Load(), first_rows=total)
    ranges, num_bytes, calls = -(-rows // chunk), 0.0, 0.0
    for width in widths:  # a range begins and ends within pages, unless it has whole ones
        inside = PAGE_BYTES - gcd(PAGE_BYTES, chunk * width)
        num_bytes += rows * width + ranges * inside
        calls += ranges * -(-chunk * width // RUN_BYTES)
    return Reads(Load(), Load(num_bytes, calls), rows=total)
