"""Tables of halos and hubs, kept in memory: the node of each slot, and the rows of its edges.

Rows of edges are stored once, in the order of the relation's blocks.  A copied column has its edges
in the same order, so one number leads from them to their rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest
from blockstore.io.reader import BlockReader, Parts, Transit
from blockstore.io.reading import Reading
from blockstore.kernels.columns import HEADER_BYTES
from blockstore.kernels.members import add_first_edges
from blockstore.store import Store, scan_rows
from loaderd.memory.workspace import Carver
from loaderd.sampling.macrobatch.blocks import block_runs, head_pages
from loaderd.sampling.macrobatch.files import MacroFiles, RelationBlocks


class SlotTables(NamedTuple):
    """Tables of each type's slots, and of each relation's columns that are copied there."""

    nodes: list[NDArray[Any]]  # id_dtype (slots,) store ids
    shifts: list[NDArray[np.int64]]  # (slots,) of a slot's first edge: its place in the relation,
    #   less that among the copies; (0,) without items


def carve_slots(carver: Carver, manifest: Manifest, items: bool) -> SlotTables:
    """Cut the tables out of a run of arena slots.

    items   whether edges are numbered because they have rows
    """
    slots = {t.name: t.halo.nodes.num_rows if t.halo else 0 for t in manifest.types}
    dtype = np.dtype(manifest.id_dtype)
    return SlotTables(
        [carver.array(dtype, count) for count in slots.values()],
        [carver.array(np.int64, slots[r.dst] * items) for r in manifest.relations],
    )


def read_slots(
    store: Store,
    files: MacroFiles,
    reader: BlockReader,
    transit: Transit,
    memory: NDArray[np.uint8],
    items: bool,
) -> SlotTables:
    """The tables in `memory`, as `carve_slots` cuts it.  Raises CorruptBlock, OSError."""
    manifest = store.manifest
    tables = carve_slots(Carver(memory), manifest, items)
    for t, out in zip(manifest.types, tables.nodes, strict=True):
        if t.halo is not None:
            for first, nodes in scan_rows(store, t.halo.nodes, manifest.block_bytes):
                out[first : first + nodes.size] = nodes
    for r, copied in enumerate(files.copied_columns):
        if copied is not None and items:
            dst = files.type_of[manifest.relations[r].dst]
            find_shifts(
                reader, transit, (files.columns[r], copied), tables.nodes[dst], files.copies[dst],
                tables.shifts[r],
            )  # fmt: skip
    return tables


def find_shifts(
    reader: BlockReader,
    transit: Transit,
    columns: tuple[RelationBlocks, RelationBlocks],
    nodes: NDArray[Any],
    groups: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """`SlotTables.shifts` of one relation.

    columns  of the relation, and the copied ones
    nodes    id_dtype (slots,) store id of each
    groups   int64 (groups + 1,) first slot of each group, in which nodes ascend, then all

    Reads the first pages of each block, where its offsets are.  Raises CorruptBlock, OSError.
    """
    own, copied = columns
    out[:] = 0

    def of_copies(block: int, offsets: NDArray[np.uint32]) -> None:
        first = int(copied.first_node[block])
        out[first : first + offsets.size - 1] -= copied.first_edge[block] + offsets[:-1]

    def of_relation(block: int, offsets: NDArray[np.uint32]) -> None:
        first, edge = int(own.first_node[block]), int(own.first_edge[block])
        add_first_edges(offsets, first, edge, nodes, groups, out)

    # one after the other: both write every slot
    _each_head(reader, transit, copied, of_copies).wait()
    _each_head(reader, transit, own, of_relation).wait()


def _each_head(
    reader: BlockReader,
    transit: Transit,
    columns: RelationBlocks,
    use: Callable[[int, NDArray[np.uint32]], None],
) -> Reading:
    """Give each block's number and offsets, uint32 (columns + 1,), to `use`, in a reader thread."""
    geometry = reader.files[columns.file].geometry
    blocks = np.arange(columns.first_node.size - 1)
    runs = block_runs(blocks, geometry, 1)
    heads = np.array([head_pages(columns, b) for b in blocks.tolist()], np.int64)

    def consume(low: int, high: int, data: NDArray[np.uint8]) -> None:
        for i, block in enumerate(range(low, high)):
            count = int(columns.first_node[block + 1] - columns.first_node[block])
            begin = i * geometry.slot_bytes + HEADER_BYTES
            use(block, data[begin : begin + 4 * (count + 1)].view(np.uint32))

    parts = Parts(heads, lambda _run, _head: [])
    return reader.stream(columns.file, runs, transit, consume, parts)
