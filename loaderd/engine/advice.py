"""What an epoch of each plan costs, by what was counted and measured; which to take.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, Manifest, row_geometry
from blockstore.kernels.rowcache import count_new, plan_extents
from blockstore.units import format_bytes, format_mem
from loaderd.devicecost import RUN_BYTES, DeviceCost
from loaderd.hyper.cut import HyperCut
from loaderd.hyper.rowcache import rows_by_type
from loaderd.macro.blocks import cut_blocks, pages_left_out
from loaderd.macro.files import MacroFiles
from loaderd.memory.ledger import Budget, ServedRows
from loaderd.placement import HopAdvice
from loaderd.plans.base import Part
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.macrobatch import MacrobatchPlan
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from loaderd.protocol import Resolved

_WORTH = 0.7  # of the time of equal batches: other batches are advised where they take no more
_ENOUGH = 0.8  # of a training node's neighbors: other batches are advised where so many are kept


class Growth(NamedTuple):
    """Different things that minibatches need together."""

    counts: tuple[int, ...]  # of the first 1, 2, 4, ... minibatches; empty: nothing was seen
    total: int  # there are no more

    def of(self, batches: float) -> float:
        """Of so many minibatches: between those counted a power, beyond them the last one's."""
        counts = self.counts
        if not counts or batches <= 0:
            return 0.0
        if batches < 1 or len(counts) == 1:
            return min(self.total, counts[0] * batches)
        at = min(int(np.log2(batches)), len(counts) - 2)
        low, high = max(1, counts[at]), max(1, counts[at + 1])
        return float(min(self.total, low * (high / low) ** (np.log2(batches) - at)))

    def fresh(self, room: float, batches: int) -> float:
        """What a minibatch needs that is not among the `room` things used last.

        That is what one more minibatch adds to as many as have room together.  Where the room
        holds not even one, what is held is any part of all there is.

        batches   of an epoch: where they have room together, nothing is read twice
        """
        if self.of(batches) <= room:
            return 0.0
        if self.of(1) >= room:
            return self.of(1) * (1 - room / max(1, self.total))
        low, high = 1.0, float(batches)  # of(low) <= room < of(high)
        while high - low > 1e-3 * low:
            middle = (low + high) / 2
            low, high = (middle, high) if self.of(middle) <= room else (low, middle)
        return self.of(low + 1) - self.of(low)


class Look(NamedTuple):
    """What the first minibatches of an epoch need."""

    batches: int
    nodes: float  # of one, mean
    edges: float
    rows: tuple[Growth, ...]  # by type that has rows served: different rows
    needed: tuple[NDArray[np.int64], ...]  # these rows of all, ascending
    cold: tuple[NDArray[np.int64], ...]  # of these, those that only the last quarter needs
    row_blocks: Growth  # of all served arrays
    hop_blocks: tuple[Growth, ...]  # by hop: blocks of all relations


class Sample(NamedTuple):
    """The nodes of one minibatch, by store id, and which of them each hop expands."""

    nodes: NDArray[Any]
    frontiers: tuple[tuple[int, int], ...]  # [first, stop) in `nodes`, by hop
    edges: int


class _Counter:
    """Counts different items as batches come."""

    def __init__(self, total: int) -> None:
        self._bits = np.zeros(total // 64 + 1, np.uint64)
        self._size, self._found, self._counts = total, 0, list[int]()

    def add(self, items: NDArray[Any], number: int) -> None:
        """The items of batch `number`, the first is 1."""
        self._found += int(count_new(items, items.size, 0, self._size, self._bits))
        if number.bit_count() == 1:
            self._counts.append(self._found)

    def growth(self) -> Growth:
        return Growth(tuple(self._counts), self._size)


def look_at(
    manifest: Manifest,
    served: Sequence[ServedRows],
    first_nodes: Sequence[NDArray[np.int64]],
    samples: Sequence[Sample],
) -> Look:
    """Count what some minibatches need.

    first_nodes   of each relation, int64 (num_blocks + 1,): first column of each block
    """
    types = rows_by_type(served)
    geometries = [row_geometry(r.array, manifest.block_bytes) for r in served]
    rows = [_Counter(t.num_nodes) for t in types]
    blocks = _Counter(sum(g.num_blocks for g in geometries))
    num_hops = len(samples[0].frontiers) if samples else 0
    hops = [_Counter(sum(f.size - 1 for f in first_nodes)) for _ in range(num_hops)]
    early: list[list[NDArray[np.int64]]] = [[] for _ in types]
    late: list[list[NDArray[np.int64]]] = [[] for _ in types]
    for number, sample in enumerate(samples, 1):
        last = 4 * number > 3 * len(samples)
        found = []
        for i, t in enumerate(types):
            own = sample.nodes.astype(np.int64) - t.first
            own = own[(own >= 0) & (own < t.num_nodes)]
            rows[i].add(own, number)
            (late if last else early)[i].append(np.unique(own))
            for a in t.served:
                before = sum(g.num_blocks for g in geometries[:a])
                found.append(before + np.unique(own // geometries[a].rows_per_block))
        blocks.add(np.concatenate([*found, np.empty(0, np.int64)]), number)
        for hop, (low, high) in zip(hops, sample.frontiers, strict=True):
            hop.add(_graph_blocks(manifest, first_nodes, sample.nodes[low:high]), number)
    none = [np.empty(0, np.int64)]
    cold = [
        np.setdiff1d(np.concatenate(none + b), np.concatenate(none + a))
        for a, b in zip(early, late, strict=True)
    ]
    needed = [np.unique(np.concatenate(none + a + b)) for a, b in zip(early, late, strict=True)]
    count = max(1, len(samples))
    return Look(
        len(samples), sum(s.nodes.size for s in samples) / count,
        sum(s.edges for s in samples) / count, tuple(c.growth() for c in rows), tuple(needed),
        tuple(cold), blocks.growth(), tuple(c.growth() for c in hops),
    )  # fmt: skip


def _graph_blocks(
    manifest: Manifest, first_nodes: Sequence[NDArray[np.int64]], nodes: NDArray[Any]
) -> NDArray[np.int64]:
    """Blocks in which the columns of these nodes begin; relations are numbered on."""
    found, before = [np.empty(0, np.int64)], 0
    wide = nodes.astype(np.int64)
    for relation, first_node in zip(manifest.relations, first_nodes, strict=True):
        t = next(t for t in manifest.types if t.name == relation.dst)
        own = wide[(wide >= t.first) & (wide < t.first + t.num_nodes)]
        if first_node.size > 1:
            found.append(before + np.unique(np.searchsorted(first_node[:-1], own, "right") - 1))
        before += first_node.size - 1
    return np.concatenate(found)


class Reads(NamedTuple):
    """What is read of a disk."""

    num_bytes: float = 0.0
    runs: float = 0.0  # of adjacent pages

    def __add__(self, other: "Reads") -> "Reads":  # type: ignore[override]
        return Reads(self.num_bytes + other.num_bytes, self.runs + other.runs)

    def times(self, count: float) -> "Reads":
        """The same so many times."""
        return Reads(self.num_bytes * count, self.runs * count)

    def seconds(self, cost: DeviceCost) -> float:
        """With all reader threads at work."""
        return self.runs * cost.run_s + self.num_bytes / PAGE_BYTES * cost.page_s


def block_reads(blocks: float, total: int, block_bytes: int) -> Reads:
    """Some blocks of `total`: the more of all, the more are adjacent."""
    share = min(1.0, blocks / max(1, total))
    return Reads(blocks * block_bytes, blocks * (1 - share))


class Rooms(NamedTuple):
    """What stays in memory, in blocks."""

    graph: int  # blocks of all relations
    rows: int  # blocks of all served arrays, where batches are built one by one


def minibatch_reads(
    look: Look, rooms: Rooms, block_bytes: int, slot_bytes: int, steps: int
) -> Reads:
    """Of a step of plan `minibatch`, once its pools are full: each batch reads whole blocks."""
    rows = look.row_blocks.fresh(rooms.rows, steps)
    reads = block_reads(rows, look.row_blocks.total, slot_bytes)
    for growth in look.hop_blocks:
        absent = max(0.0, 1 - rooms.graph / max(1, growth.total))
        reads += block_reads(growth.of(1) * absent, growth.total, block_bytes)
    return reads


def hyperbatch_reads(
    look: Look,
    served: Sequence[ServedRows],
    cut: HyperCut,
    rooms: Rooms,
    cost: DeviceCost,
    manifest: Manifest,
    slot_bytes: int,
    steps: int,
) -> Reads:
    """Of a step of plan `hyperbatch`, once its cache is full.

    A block of the graph is read once a hop for the batches sampled together, a row once for those
    that have room together, in runs of pages.
    """
    size = max(1, min(cut.size, steps))
    graph = Reads()
    for growth in look.hop_blocks:
        absent = max(0, growth.of(size) - rooms.graph) if rooms.graph < growth.total else 0
        graph += block_reads(absent, growth.total, manifest.block_bytes).times(1 / size)
    if not cut.entries:
        rows = look.row_blocks.fresh(rooms.rows, steps)
        return graph + block_reads(rows, look.row_blocks.total, slot_bytes)
    for i, t in enumerate(rows_by_type(served)):
        fresh = look.rows[i].fresh(cut.entries[i], steps)
        if fresh == 0 or not look.needed[i].size:
            continue
        wanted = fresh * size
        seen = look.cold[i] if wanted <= look.cold[i].size else look.needed[i]
        for a in t.served:
            graph += run_reads(seen, wanted, served[a], manifest, cost).times(1 / size)
    return graph


def run_reads(
    seen: NDArray[np.int64], wanted: float, rows: ServedRows, manifest: Manifest, cost: DeviceCost
) -> Reads:
    """`wanted` rows of an array, by runs of pages, where they lie as the rows that were seen do."""
    if wanted <= seen.size:
        return _plan(seen, max(1, int(wanted)), rows, manifest, cost)
    whole = _plan(seen, seen.size, rows, manifest, cost)
    half = _plan(seen, max(1, seen.size // 2), rows, manifest, cost)
    geometry = row_geometry(rows.array, manifest.block_bytes)
    most = geometry.num_blocks * geometry.slot_bytes
    more = np.log2(max(1.0, wanted / seen.size))
    num_bytes = whole.num_bytes * (whole.num_bytes / max(1.0, half.num_bytes)) ** more
    runs = whole.runs * (whole.runs / max(1.0, half.runs)) ** more
    return Reads(min(float(num_bytes), float(most)), max(1.0, float(runs)))


def _plan(
    seen: NDArray[np.int64], count: int, rows: ServedRows, manifest: Manifest, cost: DeviceCost
) -> Reads:
    """`count` of the rows that were seen."""
    chosen = seen
    if count < seen.size:
        chosen = np.sort(np.random.default_rng(0).choice(seen, count, replace=False))
    geometry = row_geometry(rows.array, manifest.block_bytes)
    out = np.empty((chosen.size, 5), np.int64)
    runs = plan_extents(
        chosen, 0, chosen.size, geometry.rows_per_block, rows.array.row_bytes, geometry.slot_bytes,
        geometry.blocks_per_shard, cost.gap_pages, RUN_BYTES // PAGE_BYTES, out,
    )  # fmt: skip
    return Reads(float(out[:runs, 2].sum()) * PAGE_BYTES, float(runs))


class MacroReads(NamedTuple):
    """Bytes that macro-batches read."""

    epoch: int  # all macro-batches
    first: int  # the first of them
    hubs: int  # once a session


def macro_reads(
    manifest: Manifest, served: Sequence[ServedRows], files: MacroFiles, resolved: Resolved
) -> MacroReads:
    """Bytes of an epoch of plan `macrobatch`: each partition once, and its halo; the hubs once."""
    bounds = GraphBounds(manifest.num_nodes, tuple(r.num_edges for r in manifest.relations))
    macro, k = resolved.macro, files.num_partitions
    assert macro is not None
    # any seeds will do: the deal of partitions does not depend on them
    plan = MacrobatchPlan(resolved, Part(), bounds, np.ones(k, np.int64))
    each = [
        _macro_bytes(manifest, served, files, members, macro.halos)
        for members in plan.epoch_layout(0).members
    ]
    hubs = _part_bytes(manifest, served, files, [2 * k]) if macro.hubs else 0
    return MacroReads(sum(each), each[0], hubs)


def _macro_bytes(
    manifest: Manifest,
    served: Sequence[ServedRows],
    files: MacroFiles,
    members: NDArray[np.int64],
    halos: bool,
) -> int:
    own = _part_bytes(manifest, served, files, members.tolist())
    extra = [files.num_partitions + int(p) for p in members] if halos else []
    return own + _part_bytes(manifest, served, files, extra)


def _part_bytes(
    manifest: Manifest, served: Sequence[ServedRows], files: MacroFiles, parts: Sequence[int]
) -> int:
    """Parts of one kind, read together: a block that several share is read once.

    Of blocks that are read in part, edges are taken to be spread evenly over columns.
    """
    k, pages, per_block = files.num_partitions, 0, manifest.block_bytes // PAGE_BYTES
    copied = bool(parts) and parts[0] >= k
    for r, columns in enumerate(files.copied_columns if copied else files.columns):
        if columns is not None and parts:
            t = files.type_of[manifest.relations[r].dst]
            wanted = [(*files.nodes_of(t, p), p - k if copied else p) for p in parts]
            blocks = [np.arange(columns.low[row], columns.high[row]) for *_, row in wanted]
            pages += np.unique(np.concatenate(blocks)).size * per_block
            if parts[0] < 2 * k:  # hubs are read whole
                cuts = cut_blocks(columns, wanted, per_block)
                width = manifest.relations[r].item_bytes(manifest.id_dtype)[0]
                pages -= pages_left_out(columns, cuts, per_block, width)
    for a, rows_of in enumerate(served):
        if not copied or files.copied_rows[a] is not None:
            t = files.type_of[rows_of.node_type.name]
            pages += sum(files.pages(a, rows_of.node_type.first, t, p).total for p in parts)
    return pages * PAGE_BYTES


# -- which plan ---------------------------------------------------------------------------------


def fits_in_memory(budget: Budget, rows: int) -> bool:
    """Whether the graph and all rows stay in memory, where `rows` blocks of these do."""
    return budget.graph_blocks <= budget.graph_slots and rows >= budget.row_blocks


def choose_equal(minibatch_s: float, hyperbatch_s: float | None) -> str:
    """The plan, of those that give equal batches, whose reading takes less; ties go to the plain.

    hyperbatch_s   None: there is no room for it, or it need not be
    """
    if hyperbatch_s is None or minibatch_s <= hyperbatch_s:
        return MinibatchPlan.name
    return HyperbatchPlan.name


@dataclass(frozen=True, slots=True)
class Line:
    """What is said of one plan."""

    plan: str
    options: str  # of macro-batches: what they have; empty: none
    equal: bool  # whether its batches are those of `minibatch`
    least_bytes: int  # --mem without which it cannot run
    runs: bool  # whether it can within the --mem given
    held: str = ""  # what is in memory
    reads: str = ""  # of what kind
    epoch_bytes: float = 0.0  # read, once what is held is there
    fill_bytes: float = 0.0  # read once more, before that
    io_s: float = 0.0
    cpu_s: float = 0.0
    fill_s: float = 0.0
    note: str = ""
    kept: float = -1.0  # share of a training node's neighbors; -1: not known
    sampled: bool = True  # neighbors are; else rows of hops worked out before, for other models

    @property
    def epoch_s(self) -> float:
        """Of any epoch but the first: reading and building go on at the same time."""
        return max(self.io_s, self.cpu_s)

    @property
    def first_epoch_s(self) -> float:
        """Of the first."""
        return self.epoch_s + self.fill_s

    @property
    def limit(self) -> str:
        """What takes the time."""
        return "disk" if self.io_s > self.cpu_s else "cores"


class Work(NamedTuple):
    """CPU seconds, of all threads together."""

    batch_s: float  # of a batch, reading not counted
    byte_s: float  # of a byte that is read: verified, and what else is done as it passes


def cpu_seconds(work: Work, steps: float, num_bytes: float, granted: float, cores: int) -> float:
    """Time of an epoch's building, by workers that get so many cores, beside readers."""
    build = steps * work.batch_s
    return max(build / granted, (build + num_bytes * work.byte_s) / cores)


@dataclass(frozen=True, slots=True)
class Advice:
    """Every plan, and the one to take."""

    lines: tuple[Line, ...]
    auto: str  # the plan that a session of plan `auto` gets; empty: none has room
    plan: str  # the plan advised; empty: none has room
    options: str
    reason: str
    hops: HopAdvice | None = None  # None: there are none


def advise(lines: Sequence[Line], auto: str) -> Advice:
    """The fastest of the plans with equal batches, or another that is faster by much.

    Of the others the one that keeps most neighbors, where it is known to keep enough of them.
    """
    lines = tuple(lines)
    sampled = [line for line in lines if line.sampled]
    able = [line for line in sampled if line.runs]
    if not able:
        least = min(sampled, key=lambda line: line.least_bytes)
        reason = f"no plan can run: {least.plan} needs least, --mem {least_text(least)}"
        return Advice(lines, "", "", "", reason)
    equal = sorted((p for p in able if p.equal), key=lambda p: (p.epoch_s, p.plan != auto))
    other = sorted((p for p in able if not p.equal), key=lambda p: (-p.kept, p.epoch_s))
    if not other or not equal:
        best = (equal or other)[0]
        return Advice(lines, auto, best.plan, best.options, _why(best))
    plain, macro = equal[0], other[0]
    if macro.epoch_s > _WORTH * plain.epoch_s:
        reason = f"{_why(plain)}; {macro.plan}, {macro.epoch_s:.3g} s, is not worth other batches"
        return Advice(lines, auto, plain.plan, plain.options, reason)
    if macro.kept < _ENOUGH:
        reason = (
            f"{_why(plain)}; {macro.plan}, {macro.options}, takes {macro.epoch_s:.3g} s, but is "
            f"known to keep {max(0.0, macro.kept):.0%} of a training node's neighbors only: "
            f"advised from {_ENOUGH:.0%} on"
        )
        return Advice(lines, auto, plain.plan, plain.options, reason)
    reason = f"{_why(macro)}, against {plain.epoch_s:.3g} s of {plain.plan}; other batches"
    return Advice(lines, auto, macro.plan, macro.options, reason)


def _why(line: Line) -> str:
    if line.epoch_bytes == 0:
        return f"{line.epoch_s:.3g} s an epoch: everything stays in memory, nothing is read"
    size = format_bytes(int(line.epoch_bytes))
    return f"{line.epoch_s:.3g} s an epoch, {size} read ({line.reads}); limited by {line.limit}"


def least_text(line: Line) -> str:
    """The least memory of a plan as `--mem` takes it."""
    return format_mem(line.least_bytes)


def kept_neighbors(manifest: Manifest, loaded: int, hubs: bool, halos: bool) -> tuple[float, str]:
    """Share of training nodes' neighbors that macro-batches of `loaded` partitions keep.

    -1 where the store does not say; then the same in words.
    """
    influence, partitioning = manifest.influence, manifest.partitioning
    if influence is not None and influence.kept:
        kept = min(influence.kept, key=lambda k: abs(k.num_partitions - loaded))
        share = kept.nodes[2 if halos else 1 if hubs else 0]
        words = f"with {kept.num_partitions} partitions loaded"
    elif partitioning is not None:
        count = partitioning.num_partitions
        near = abs(count / 8 - loaded) <= abs(count / 16 - loaded)
        share = partitioning.kept_8 if near else partitioning.kept_16
        words = f"with {'an 8th' if near else 'a 16th'} of the partitions loaded, without hubs"
    else:
        return -1.0, "the store does not say what share of neighbors is kept"
    return share, f"{share:.1%} of training nodes' neighbors are kept {words}"


def fill_reads(look: Look, rooms: Rooms, block_bytes: int) -> Reads:
    """Blocks of the graph that stay."""
    total = max((growth.total for growth in look.hop_blocks), default=0)
    return Reads(float(min(rooms.graph, total) * block_bytes), 0.0)
