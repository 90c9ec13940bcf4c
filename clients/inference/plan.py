"""How much of a layer is in memory at a time; no file is read."""

from collections.abc import Mapping
from typing import NamedTuple

from blockstore.errors import BudgetTooSmall
from blockstore.format import Manifest
from blockstore.units import format_mem
from clients.inference.edges import Connected
from clients.inference.model import ModelSteps, Relation, Step
from clients.inference.rows import SCAN_BYTES, STEP_ROWS

BUFFER_BYTES = 1 << 20  # of each of two buffers of an array that is written
_TORCH_BYTES = 224 << 20  # the interpreter, torch and other libraries
_READ_COPIES = 8  # of a scan: read, changed, ahead of use
_STEP_COPIES = 3  # of what a step of rows computes
_EDGE_BYTES = 64 << 20  # ids, shares and sums of the edges of a step
_TABLE_SHARE = 1024  # bytes of a store for each byte of its checksums
_ORDER_BYTES = 16  # of a node: where its row of the result goes
_MIN_SHARE = 16 << 20  # to put the result in that order


class Slice(NamedTuple):
    """Parts [first, stop) of what a layer gives."""

    first: int
    stop: int


class LayerPlan(NamedTuple):
    slices: tuple[Slice, ...]  # computed one after another; each reads the graph once
    kept: frozenset[Relation]  # what sources give of slice 0 is in memory from when it is computed

    def spilled(self, relation: Relation) -> tuple[Slice, ...]:
        """What sources give of these passes through a file."""
        return self.slices[relation in self.kept :]


class InferencePlan(NamedTuple):
    layers: tuple[LayerPlan, ...]
    share: int  # bytes to put the result in order


def plan_inference(
    steps: ModelSteps, manifest: Manifest, mem_bytes: int, connected: Connected
) -> InferencePlan:
    """Share out --mem.  Raises BudgetTooSmall with the minimum that would do."""
    fixed = _fixed_bytes(steps, manifest)
    order = _ORDER_BYTES * steps.output_type.num_nodes
    one_part = max(max(_part_bytes(step, steps, connected).values()) for step in steps.steps)
    least = fixed + max(connected.num_bytes + one_part, order + _MIN_SHARE)
    if mem_bytes < least:
        raise BudgetTooSmall(
            f"--mem {format_mem(mem_bytes)}: expected at least --mem {format_mem(least)} for one "
            f"part of a layer, of all {manifest.num_nodes:,} nodes, and buffers",
            least,
        )
    share = mem_bytes - fixed
    layers = tuple(
        _plan_layer(
            step, _part_bytes(step, steps, connected), share - connected.num_bytes, manifest
        )
        for step in steps.steps
    )
    return InferencePlan(layers, share - order)


def _part_bytes(step: Step, steps: ModelSteps, connected: Connected) -> dict[Relation, int]:
    """Of what all sources of a relation give to one part of the result."""
    return {
        relation: connected.gives[relation].num_rows * layer.source_width * steps.dtype.itemsize
        for relation, layer in step.layers.items()
    }


def _plan_layer(
    step: Step, part_bytes: Mapping[Relation, int], share: int, manifest: Manifest
) -> LayerPlan:
    parts = next(iter(step.layers.values())).parts
    if parts * sum(part_bytes.values()) <= share:
        return LayerPlan((Slice(0, parts),), frozenset(step.layers))
    joined_first = next(r for t in manifest.types for r in step.layers if r[2] == t.name)
    part = max(1, *part_bytes.values())
    most = share // part  # parts of a slice
    fewest = -(-parts // most)
    # one slice more is worth it: to keep the first saves its way to the disk and back
    for count in (fewest, fewest + 1):
        buffers = 2 * count * len(step.layers) * _writer_bytes(manifest)
        first = min((share - buffers) // part, parts - count + 1)
        if first > 0 and parts - first <= (count - 1) * most:
            slices = Slice(0, first), *_cut(first, parts, count - 1)
            return LayerPlan(slices, frozenset([joined_first]))
    return LayerPlan(_cut(0, parts, fewest), frozenset())


def _cut(first: int, stop: int, count: int) -> tuple[Slice, ...]:
    """Parts [first, stop) as at most `count` slices of equal size, but for the last."""
    each = -(-(stop - first) // max(1, count))
    return tuple(Slice(at, min(at + each, stop)) for at in range(first, stop, max(1, each)))


def _writer_bytes(manifest: Manifest) -> int:
    return 2 * max(BUFFER_BYTES, manifest.block_bytes)


def _fixed_bytes(steps: ModelSteps, manifest: Manifest) -> int:
    """What is in memory whatever is computed: in the pass over rows, or in that over edges."""
    scan = _READ_COPIES * max(SCAN_BYTES, manifest.block_bytes)
    most = 0
    for step in steps.steps:
        # of arrays that are written while what sources give is in memory; otherwise that is free
        buffers = _writer_bytes(manifest) * (len(step.layers) + 1)
        given = sum(a.parts * (a.source_width + a.target_width) for a in step.layers.values())
        rows = STEP_ROWS * (given + max(steps.widths.values())) * steps.dtype.itemsize
        of_rows = _STEP_COPIES * rows + buffers + 2 * scan  # also those of nodes without edges
        most = max(most, of_rows, _EDGE_BYTES + _writer_bytes(manifest) + 3 * scan)
    graphs = sum(r.num_blocks for r in manifest.relations) * manifest.block_bytes
    widths = sum(t.num_nodes * steps.widths[t.name] for t in manifest.types)
    tables = (graphs + widths * steps.dtype.itemsize) // _TABLE_SHARE
    return _TORCH_BYTES + most + tables
