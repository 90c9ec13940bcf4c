"""How much of a layer is in memory at a time; no file is read."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from blockstore.errors import BudgetTooSmall
from blockstore.format import Manifest
from blockstore.units import format_mem
from clients.inference.model import ModelSteps, Relation, Step
from clients.inference.rows import SCAN_BYTES, STEP_ROWS
from clients.inference.senders import PLACE_BYTES

BUFFER_BYTES = 1 << 20  # of each of two buffers of an array that is written
_TORCH_BYTES = 224 << 20  # the interpreter, torch and other libraries
_READ_COPIES = 8  # of a scan: read, changed, ahead of use
_STEP_COPIES = 3  # of what a step of rows computes
_EDGE_BYTES = 64 << 20  # ids, shares and sums of the edges of a step
_TABLE_SHARE = 1024  # bytes of a store for each byte of its checksums
_MIN_SHARE = 16 << 20  # to put the result in the order of the ids


class Slice(NamedTuple):
    """Parts [first, stop) of what a layer gives."""

    first: int
    stop: int


class LayerPlan(NamedTuple):
    resident: bool  # what sources give is in memory from when it is computed, of all relations
    slices: tuple[Slice, ...]  # computed one after another; each reads the graph once
    first_kept: bool = False  # of slice 0 and the first relation, too, beside buffers for the rest


class InferencePlan(NamedTuple):
    layers: tuple[LayerPlan, ...]
    share: int  # bytes for what sources give, and later for the order of the result

    @property
    def num_slices(self) -> int:
        """Of all layers: so often the graph is read."""
        return sum(len(layer.slices) for layer in self.layers)


def item_bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def plan_inference(
    steps: ModelSteps,
    manifest: Manifest,
    mem_bytes: int,
    senders: Mapping[Relation, int] = MappingProxyType({}),
) -> InferencePlan:
    """Share out --mem.  Raises BudgetTooSmall with the minimum that would do.

    senders   of a relation: how many of its sources have edges, where that is known
    """
    nodes = {t.name: t.num_nodes for t in manifest.types}
    rows = {
        (r.src, r.name, r.dst): senders.get((r.src, r.name, r.dst), nodes[r.src])
        for r in manifest.relations
    }
    fixed = _fixed_bytes(steps, manifest)
    fixed += sum(PLACE_BYTES * (nodes[relation[0]] + 1) for relation in senders)
    ids = 16 * steps.output_type.num_nodes  # where rows of the result go
    least = max(max(_one_part(step, rows, steps) for step in steps.steps), ids + _MIN_SHARE)
    if mem_bytes < fixed + least:
        raise BudgetTooSmall(
            f"--mem {format_mem(mem_bytes)}: expected at least --mem {format_mem(fixed + least)} "
            f"for one part of a layer, of all {manifest.num_nodes:,} nodes, and buffers",
            fixed + least,
        )
    share = mem_bytes - fixed
    block_bytes = manifest.block_bytes
    layers = tuple(_plan_layer(s, rows, steps, share, block_bytes) for s in steps.steps)
    return InferencePlan(layers, share)


def _plan_layer(
    step: Step, rows: Mapping[Relation, int], steps: ModelSteps, share: int, block_bytes: int
) -> LayerPlan:
    """`rows`: of what the sources of a relation give."""
    parts, item = next(iter(step.layers.values())).parts, item_bytes(steps.dtype)
    whole = sum(
        rows[relation] * layer.parts * layer.source_width * item
        for relation, layer in step.layers.items()
    )
    if whole <= share:
        return LayerPlan(True, (Slice(0, parts),))
    part = max(1, _one_part(step, rows, steps))
    most = share // part  # parts of a slice
    fewest = -(-parts // most)
    # one slice more is worth it: to keep the first saves its way to the disk and back
    for count in (fewest, fewest + 1):
        buffers = 2 * count * len(step.layers) * _writer_bytes(block_bytes)
        first = min((share - buffers) // part, parts - count + 1)
        if first > 0 and parts - first <= (count - 1) * most:
            return LayerPlan(False, (Slice(0, first), *_cut(first, parts, count - 1)), True)
    return LayerPlan(False, _cut(0, parts, fewest))


def _cut(first: int, stop: int, count: int) -> tuple[Slice, ...]:
    """Parts [first, stop) as at most `count` slices of equal size, but for the last."""
    each = -(-(stop - first) // count)
    return tuple(Slice(at, min(at + each, stop)) for at in range(first, stop, each))


def _writer_bytes(block_bytes: int) -> int:
    return 2 * max(BUFFER_BYTES, block_bytes)


def _one_part(step: Step, rows: Mapping[Relation, int], steps: ModelSteps) -> int:
    """Bytes of what all sources of a relation give to one part."""
    widths = [rows[relation] * layer.source_width for relation, layer in step.layers.items()]
    return max(widths) * item_bytes(steps.dtype)


def _fixed_bytes(steps: ModelSteps, manifest: Manifest) -> int:
    """What is in memory whatever is computed."""
    item, most = item_bytes(steps.dtype), 0
    for step in steps.steps:
        # of arrays that are written while what sources give is in memory; otherwise that is free
        buffers = _writer_bytes(manifest.block_bytes) * (len(step.layers) + 1)
        given = sum(a.parts * (a.source_width + a.target_width) for a in step.layers.values())
        rows = STEP_ROWS * (given + max(steps.widths.values())) * item
        most = max(most, _STEP_COPIES * rows + buffers)
    tables = sum(r.num_blocks for r in manifest.relations) * manifest.block_bytes // _TABLE_SHARE
    rows = sum(t.num_nodes * steps.widths[t.name] for t in manifest.types) * item // _TABLE_SHARE
    scans = _READ_COPIES * max(SCAN_BYTES, manifest.block_bytes)
    return _TORCH_BYTES + _EDGE_BYTES + most + tables + rows + 3 * scans
