"""Plan how much of a layer is in memory at a time; reads no files."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from blockstore.errors import BudgetTooSmall
from blockstore.format import ITEM_BYTES, Manifest, NodeType
from blockstore.units import format_mem
from clients.inference.edges import Connected
from clients.inference.model import ModelSteps, Relation, Step
from clients.inference.rows import SCAN_BYTES, STEP_ROWS

BUFFER_BYTES = 1 << 20  # each of two buffers per array being written
MAX_TILES = 16  # per relation whose edges are sorted by source
_TORCH_BYTES = 224 << 20  # the interpreter, torch and other libraries
_READ_COPIES = 8  # copies of a scan: read, converted, ahead of use
_STEP_COPIES = 3  # copies of the results of a step of rows
_EDGE_BYTES = 64 << 20  # ids, shares and sums of the edges of a step
_PUSHED_BYTES = 32 << 20  # ids of the edges of a step
_SORT_PIECE_BYTES = 16 << 20  # edges that are being added to a tile
_SORT_NODE_BYTES = 8  # per source, while a tile is sorted
_TABLE_SHARE = 1024  # bytes of a store for each byte of its checksums
_ORDER_BYTES = 16  # per node: the place of its row in the result
_MIN_SHARE = 16 << 20  # least memory to put the result in that order


class Slice(NamedTuple):
    """Parts [first, stop) of a layer's result."""

    first: int
    stop: int


class Later(Enum):
    """Source of the contributions of a type's nodes to later slices of a pushed layer."""

    GIVEN = "files of what they give: to themselves, and by each relation"
    ENTERED = "a file of their rows once these have entered"
    AGAIN = "their rows, which are read again"


class LayerPlan(NamedTuple):
    slices: tuple[Slice, ...]  # computed one after another; each reads the graph once
    # relations whose contributions to slice 0 stay in memory; those to other slices pass files
    kept: frozenset[Relation] = frozenset()
    later: Mapping[str, Later] = {}  # by type; of a layer that is pushed in more than one slice
    tile_edges: int = 0  # edges per tile, if a layer is pushed by edges sorted by source

    def spilled(self, relation: Relation) -> tuple[Slice, ...]:
        """The slices for which contributions of sources pass through files."""
        return self.slices[relation in self.kept :]


class InferencePlan(NamedTuple):
    layers: tuple[LayerPlan, ...]
    share: int  # bytes of memory to put the result in order
    tile_edges: int = 0  # edges sorted by source at a time; 0: none need sorting


def plan_inference(
    steps: ModelSteps, manifest: Manifest, mem_bytes: int, connected: Connected
) -> InferencePlan:
    """Divide --mem.  Raises BudgetTooSmall with the minimum that would do."""
    fixed = _fixed_bytes(steps, manifest, connected)
    order = _ORDER_BYTES * steps.output_type.num_nodes
    one_part = max(max(_part_bytes(step, steps, connected)) for step in steps.steps)
    sorts = bool(connected.shares) and not connected.reverses
    edge, longest = _edge_bytes(manifest), max((r.num_edges for r in manifest.relations), default=0)
    # memory of a layer that is free while edges are sorted, less what only sorting needs
    spare = _PUSHED_BYTES + _scan_bytes(manifest) - _SORT_PIECE_BYTES
    spare -= _SORT_NODE_BYTES * max(t.num_nodes for t in manifest.types)
    one_tile = edge * -(-longest // MAX_TILES) - spare if sorts else 0
    minimum = fixed + max(connected.num_bytes + max(one_part, one_tile), order + _MIN_SHARE)
    if mem_bytes < minimum:
        raise BudgetTooSmall(
            f"--mem {format_mem(mem_bytes)}: expected at least --mem {format_mem(minimum)} for one "
            f"part of a layer, of all {manifest.num_nodes:,} nodes, and buffers",
            minimum,
        )
    share = mem_bytes - fixed
    room = share - connected.num_bytes
    tile_edges = max(1, (room + spare) // edge) if sorts else 0
    layers = [
        _plan_layer(number, steps, manifest, room, connected)._replace(tile_edges=tile_edges)
        for number in range(len(steps.steps))
    ]
    return InferencePlan(tuple(layers), share - order, tile_edges)


def _part_bytes(step: Step, steps: ModelSteps, connected: Connected) -> list[int]:
    """Bytes per part of the result that are in memory, by array of which one or more are there.

    Contributions of all sources, by relation; or all sums, which are in memory together.
    """
    size = steps.dtype.itemsize
    if connected.shares:
        into = {r[2] for r in step.layers}
        sums = sum(connected.receives[name].num_rows for name in into)
        return [(sums + sum(connected.heavy[r].size for r in step.layers)) * size]
    return [connected.gives[r].num_rows * a.source_width * size for r, a in step.layers.items()]


def _plan_layer(
    number: int, steps: ModelSteps, manifest: Manifest, share: int, connected: Connected
) -> LayerPlan:
    step = steps.steps[number]
    part_bytes = _part_bytes(step, steps, connected)
    parts = next(iter(step.layers.values())).parts
    if parts * sum(part_bytes) <= share:
        return LayerPlan((Slice(0, parts),), frozenset(step.layers))
    part, writer = max(1, *part_bytes), _writer_bytes(manifest)
    fewest = _cut(0, parts, -(-parts // (share // part)))
    if not connected.shares:
        joined_first = next(r for t in manifest.types for r in step.layers if r[2] == t.name)
        slices = _cut_kept(parts, part, share, lambda count: 2 * count * len(step.layers) * writer)
        return LayerPlan(slices or fewest, frozenset([joined_first] if slices else []))
    into = {r[2] for r in step.layers}
    arrays = len(into) + len(step.layers)  # per later slice
    kept = _cut_kept(parts, part, share, lambda count: (count - 1) * arrays * writer)
    # candidates: without file buffers, or with them
    plans = [_pushed(number, steps, manifest, connected, fewest, ())]
    if kept:
        plans.insert(0, _pushed(number, steps, manifest, connected, kept, tuple(Later)))
    return min(plans, key=lambda found: found[0])[1]


def _pushed(
    number: int,
    steps: ModelSteps,
    manifest: Manifest,
    connected: Connected,
    slices: tuple[Slice, ...],
    ways: tuple[Later, ...],
) -> tuple[int, LayerPlan]:
    """(bytes read besides rows and graph once each, the plan), with the cheapest way per type.

    ways   for types with rows; types without rows are computed again without reading any
    """
    step, size = steps.steps[number], steps.dtype.itemsize
    more, columns = len(slices) - 1, slices[-1].stop - slices[0].stop
    later, read = {}, more * _graph_bytes(manifest)
    for t in manifest.types:
        receives = any(r[2] == t.name for r in step.layers)
        sent = sum(connected.gives[r].num_rows for r in step.layers if r[0] == t.name)
        given = sent + connected.receives[t.name].num_rows * receives
        costs = {Later.AGAIN: more * _rows_bytes(number, steps, t)}
        if Later.GIVEN in ways:
            costs[Later.GIVEN] = given * columns * size
        enters = t.name in steps.entered and (number == 0 or not receives)
        if Later.ENTERED in ways and enters:
            costs[Later.ENTERED] = more * t.num_nodes * steps.entered[t.name] * size
        later[t.name] = min(costs, key=lambda way: costs[way])
        read += costs[later[t.name]]
    return read, LayerPlan(slices, later=later)


def _cut_kept(
    parts: int, part_bytes: int, share: int, buffers: Callable[[int], int]
) -> tuple[Slice, ...]:
    """Slices, the first of which stays in memory while others are written; (): no room.

    buffers   number of slices -> bytes of the buffers to write them through

    One slice more than the fewest is worth it: the first need not be written and read back.
    """
    maximum = share // part_bytes
    fewest = -(-parts // maximum)
    for count in (fewest, fewest + 1):
        first = min((share - buffers(count)) // part_bytes, parts - count + 1)
        if first > 0 and parts - first <= (count - 1) * maximum:
            return Slice(0, first), *_cut(first, parts, count - 1)
    return ()


def _cut(first: int, stop: int, count: int) -> tuple[Slice, ...]:
    """Parts [first, stop) as at most `count` slices of equal size, except for the last."""
    each = -(-(stop - first) // max(1, count))
    return tuple(Slice(at, min(at + each, stop)) for at in range(first, stop, max(1, each)))


def _rows_bytes(number: int, steps: ModelSteps, t: NodeType) -> int:
    """Bytes of the input rows of a type at a layer."""
    receives = any(r[2] == t.name for r in steps.steps[0].layers)
    if number == 0 or not receives:
        array = t.features.get("x")
        return array.num_rows * array.row_bytes if array is not None else 0
    width = next(iter(steps.steps[number - 1].layers.values())).num_out
    return t.num_nodes * width * steps.dtype.itemsize


def _edge_bytes(manifest: Manifest) -> int:
    """Bytes of an edge while it is sorted: a word with both ends, and an entry of a column."""
    return 8 + ITEM_BYTES[manifest.id_dtype]


def _scan_bytes(manifest: Manifest) -> int:
    """Bytes of memory to read an array ahead."""
    return _READ_COPIES * max(SCAN_BYTES, manifest.block_bytes)


def _graph_bytes(manifest: Manifest) -> int:
    return sum(r.num_blocks for r in manifest.relations) * manifest.block_bytes


def _writer_bytes(manifest: Manifest) -> int:
    return 2 * max(BUFFER_BYTES, manifest.block_bytes)


def _fixed_bytes(steps: ModelSteps, manifest: Manifest, connected: Connected) -> int:
    """Bytes in memory for any plan: the larger of the passes over rows and over edges."""
    scan, writer = _scan_bytes(manifest), _writer_bytes(manifest)
    maximum = 0
    for step in steps.steps:
        given = sum(a.parts * (a.source_width + a.target_width) for a in step.layers.values())
        rows = STEP_ROWS * (given + max(steps.widths.values())) * steps.dtype.itemsize
        of_rows = _STEP_COPIES * rows + 2 * scan  # also those of lone nodes
        if connected.shares:  # edges out of a type together with rows or contributions
            out = max(sum(r[0] == t.name for r in step.layers) for t in manifest.types)
            maximum = max(maximum, of_rows + writer + _PUSHED_BYTES + (out - 1) * scan)
        else:
            # of arrays written while contributions are in memory; otherwise there is room
            buffers = writer * (len(step.layers) + 1)
            maximum = max(maximum, of_rows + buffers, _EDGE_BYTES + writer + 3 * scan)
    widths = sum(t.num_nodes * steps.widths[t.name] for t in manifest.types)
    tables = (_graph_bytes(manifest) + widths * steps.dtype.itemsize) // _TABLE_SHARE
    return _TORCH_BYTES + maximum + tables
