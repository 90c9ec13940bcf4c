"""The arrays that one worker needs to build one batch, carved from a run of arena slots."""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.renumber import NodeTable
from loaderd.memory.tables import RenumberingTables
from loaderd.plans.base import Shape

ALIGN = 64


class RowName(NamedTuple):
    """A row array that is served to a session."""

    number: int  # index among all row arrays of the store
    name: str  # in the session's batches
    in_macro: bool = False  # its rows are in macro-batches: its blocks are not used


class TableKind(enum.Enum):
    """The table in which nodes of a batch are numbered."""

    HASHED = enum.auto()  # a hash table in each workspace
    OF_ALL = enum.auto()  # in each workspace one with an entry for every node: small graphs
    SHARED = enum.auto()  # one with an entry for every node, which sessions share in turn


class Sizes(NamedTuple):
    """What the store and the session add to a plan's shape."""

    num_nodes: int
    id_dtype: str
    record: EdgeRecord  # what comes with each edge
    rows: tuple[RowName, ...]  # row arrays that come with a batch
    max_blocks: int  # of any file
    row_keys: int  # store ids divided by the finest rows_per_block
    table: TableKind
    trees: bool = False  # nodes are not shared between seeds
    owner_bytes: int = 0  # bytes of a node's owner, if the session has an owner map

    @property
    def edge_rows(self) -> bool:
        """Whether edges have rows as nodes do: then their records hold their items."""
        return self.record.items > 0


class WorkspaceFull(Exception):
    """A batch needs a larger workspace than the one it has."""


class Carver:
    """Cuts arrays from a piece of memory, or only adds up what they take."""

    def __init__(self, memory: NDArray[np.uint8] | None) -> None:
        self._memory = memory
        self.used = 0

    def array(self, dtype: DTypeLike, count: int) -> NDArray[Any]:
        """The next `count` items; an empty array while only adding up."""
        item = np.dtype(dtype)
        start = self.used
        self.used = start + -(-count * item.itemsize // ALIGN) * ALIGN
        if self._memory is None:
            return np.empty(0, item)
        return self._memory[start : start + count * item.itemsize].view(item)


class StoreTables:
    """Keeps the tables of a store: in a piece of memory, or where they are if there is none."""

    def __init__(self, memory: NDArray[np.uint8] | None) -> None:
        """`memory`: uint8, of at least `ledger.table_bytes`."""
        self._carver = None if memory is None else Carver(memory)

    def array(self, dtype: DTypeLike, count: int) -> NDArray[Any]:
        """A table of `count` items, to be filled."""
        return np.empty(count, dtype) if self._carver is None else self._carver.array(dtype, count)

    def keep(self, table: NDArray[Any]) -> NDArray[Any]:
        """A table as it is, or its copy in the memory."""
        if self._carver is None:
            return table
        kept = self.array(table.dtype, table.size)
        kept[:] = table
        return kept


@dataclass(slots=True)
class Workspace:
    """Named arrays of one worker.  Sizes are bounds; a batch says how far they are filled."""

    n_id: NDArray[Any]  # id_dtype: store ids of the batch's nodes
    index: NDArray[np.int64]  # places of the seeds among the session's seeds
    ends: NDArray[np.uint32]  # local ends of seed edges and negatives
    counts: NDArray[np.uint32]  # per hop and relation, one after the other
    local: NDArray[np.uint32]  # local source of each edge
    records: NDArray[np.uint32]  # (edges, words) what comes with each edge
    items: NDArray[Any]  # id_dtype: what has rows: the nodes, then the edges if they do
    # until `addresses` are written, in the same memory:
    draws: NDArray[Any]  # id_dtype: one hop's sources, each column at its start
    record_draws: NDArray[np.uint32]  # (edges, words) records of `draws`
    starts: NDArray[np.int64]  # of each column in draws
    multi_block: NDArray[np.uint32]
    multi_block_degrees: NDArray[np.int64]
    blocks: NDArray[np.int32]  # of each frontier node, or sort key of each row
    order: NDArray[np.uint32]  # places in `blocks`, sorted by block
    block_starts: NDArray[np.int64]
    marks: NDArray[np.uint8]  # one per block, all 0 between uses
    tables: RenumberingTables  # in which nodes are numbered
    addresses: list[NDArray[np.uint64]]  # per row array
    trees: NDArray[np.uint32]  # of each node, if nodes are not shared between seeds
    times: NDArray[np.int64]  # of the seeds, likewise
    record: EdgeRecord  # the words of `records`
    rows: tuple[RowName, ...]  # row arrays of `addresses`
    small: bool = False  # sized for usual batches, not for the worst case
    # arena slots through which pages pass while rows are copied
    transit_slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def carve_workspace(
    carver: Carver, shape: Shape, sizes: Sizes, tables: RenumberingTables | None = None
) -> Workspace:
    """`tables`: those that are shared, if `sizes` says so."""
    relations = len(shape.edges[0])
    widest = max(shape.frontier)
    maximum = max(max(hop) for hop in shape.edges)
    ids = np.dtype(sizes.id_dtype)
    num_items = shape.nodes + shape.total_edges * sizes.edge_rows
    words = sizes.record.size
    nodes = max(num_items, widest)
    array = carver.array
    n_id = array(ids, shape.nodes)
    start = carver.used
    draws = array(ids, maximum)
    record_draws = array(np.uint32, maximum * words).reshape(-1, max(1, words))
    starts = array(np.int64, widest + 1)
    multi_block = array(np.uint32, widest)
    multi_block_degrees = array(np.int64, widest)
    # only sampling needs the arrays from `start` on; rows are addressed after it, in their place
    end, carver.used = carver.used, start
    addresses = [array(np.uint64, num_items) for _ in sizes.rows]
    carver.used = max(carver.used, end)
    return Workspace(
        n_id=n_id,
        items=array(ids, num_items) if sizes.edge_rows else n_id,
        index=array(np.int64, shape.seeds),
        ends=array(np.uint32, shape.ends),
        counts=array(np.uint32, sum(shape.frontier) * relations),
        local=array(np.uint32, shape.total_edges),
        records=array(np.uint32, shape.total_edges * words).reshape(-1, max(1, words)),
        draws=draws,
        record_draws=record_draws,
        starts=starts,
        blocks=array(np.int32, nodes),
        order=array(np.uint32, nodes),
        block_starts=array(np.int64, max(sizes.max_blocks, sizes.row_keys) + 1),
        multi_block=multi_block,
        multi_block_degrees=multi_block_degrees,
        marks=array(np.uint8, sizes.max_blocks),
        tables=tables or _carve_table(carver, shape, sizes),
        addresses=addresses,
        trees=array(np.uint32, shape.nodes if sizes.trees else 0),
        times=array(np.int64, shape.seeds if sizes.trees else 0),
        record=sizes.record,
        rows=sizes.rows,
    )


def _carve_table(carver: Carver, shape: Shape, sizes: Sizes) -> RenumberingTables:
    tables = RenumberingTables()
    if sizes.table is TableKind.OF_ALL:
        tables.add(NodeTable(None, carver.array(np.int32, sizes.num_nodes)))
    elif sizes.table is TableKind.HASHED:
        slots = 1 << max(4, (3 * shape.nodes // 2).bit_length())
        keys = carver.array(np.uint64 if sizes.trees else sizes.id_dtype, slots)
        tables.add(NodeTable(keys, carver.array(np.uint32, slots)))
    return tables


def workspace_bytes(shape: Shape, sizes: Sizes) -> int:
    """Bytes that `carve_workspace` cuts."""
    carver = Carver(None)
    carve_workspace(carver, shape, sizes)
    return carver.used


def clear_workspace(workspace: Workspace) -> None:
    """Reset the marks to the state in which every batch leaves them."""
    workspace.marks[:] = 0
