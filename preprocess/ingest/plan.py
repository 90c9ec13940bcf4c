"""Plan the memory and the disk space of an ingest before it starts.  Pure."""

from dataclasses import dataclass

from blockstore.errors import BudgetTooSmall
from blockstore.format import PAGE_BYTES, RowArray, align
from blockstore.units import format_bytes, format_mem
from preprocess.files.buckets import passing_bytes
from preprocess.ingest.contents import (
    SPLITS,
    ArrayContent,
    Contents,
    TypeContents,
    as_path,
    graph_bytes,
    row_disk_bytes,
    split_sizes,
)
from preprocess.ingest.options import IngestOptions
from preprocess.partition.influence_plan import influence_bytes, influence_node_bytes
from preprocess.pipeline.result import MemoryLine
from preprocess.sources.source import Source

CHECK, COUNT = "check labels and splits", "count edges"  # names of stages
COLUMNS_STAGE, ORDER = "columns by source id", "order nodes"
PARTITION_STAGE = "partition nodes"

# bytes a node, of the tables that are in memory at the same time
BFS_NODE_BYTES = 21  # degree, root, place, order, level: 4 each, and one start for 64 columns
RENAMED_NODE_BYTES = 16  # place, order, count and count by place: 4 each
SOURCE_NODE_BYTES = 6  # count 4, number of its split 1
_FIXED_BYTES = 4 << 20  # Zarr metadata, small buffers
_INTERPRETER_BYTES = 96 << 20  # Python, numpy and compiled kernels: a quarter of --mem at most
_MIN_SHARE = 4 << 20
_MIN_ROWS = 8  # rows of the widest array that must fit in a share
_MAX_BUFFER = 8 << 20
_PACKER_BLOCKS = 6  # degrees 2, the sections of edges 1, the block 1, room
_CRC_BYTES = 16  # for each page: kept while the array is written, then copied to its side array


@dataclass(frozen=True, slots=True)
class IngestJob:
    """Everything that an ingest depends on, known before it starts."""

    source: Source
    contents: Contents
    options: IngestOptions
    buffer: int  # bytes of each of the two buffers of the array being written
    share: int  # bytes for chunks, buckets and dense rows of the stage that runs
    columns_fit: bool = False  # whether columns that decide the node order stay in memory
    spread: bool = False  # whether an executor runs tasks for the stages that support it

    def sort_bytes(self, num_edges: int, key_bytes: int, share: int) -> int:
        """Temporary bytes of edges being sorted, with `share` bytes of memory."""
        if self.spread:  # unsorted edges, and at most as many bytes of sorted ones beside them
            return 2 * num_edges * key_bytes
        return passing_bytes(num_edges, key_bytes, share)

    @property
    def num_edges(self) -> int:
        return sum(r.max_edges for r in self.contents.relations)

    @property
    def source_bytes(self) -> int:
        """Bytes of one read of all edges."""
        return sum(r.source_bytes for r in self.contents.relations)


def plan_memory(contents: Contents, options: IngestOptions) -> tuple[int, int]:
    """(buffer, share) of a job.  Raises BudgetTooSmall with the minimum --mem."""
    minimum = _min_mem(contents, options, max(_MIN_SHARE, _MIN_ROWS * _widest(contents)))
    if options.mem_bytes < minimum:
        raise too_little_memory(
            options.mem_bytes, minimum,
            f"{contents.num_nodes:,} nodes of {node_bytes(options)} bytes each, blocks of "
            f"{format_bytes(options.block_bytes)} and buffers",
        )  # fmt: skip
    taken = sum(line.bytes for line in _taken_first(contents, options))
    spare = options.mem_bytes - taken - interpreter_bytes(options.mem_bytes)
    buffer = buffer_bytes(align(_widest(contents), options.block_bytes), spare)
    return buffer, spare - 2 * buffer


def check_longest(job: IngestJob, column_bytes: int) -> None:
    """Raises BudgetTooSmall if the `column_bytes` that sorting the longest column takes do not fit.

    Buckets get three quarters of the memory for sorting, which itself is three quarters of the
    share if the relation has edge arrays.
    """
    need = 16 * (column_bytes // 9 + 1)
    if need > job.share:
        raise too_little_memory(
            job.options.mem_bytes, _min_mem(job.contents, job.options, need),
            f"sorting the in-edges of one node, {format_bytes(column_bytes)}",
        )  # fmt: skip


def too_little_memory(found: int, minimum: int, why: str) -> BudgetTooSmall:
    """Build the error that names the minimum --mem."""
    return BudgetTooSmall(
        f"--mem {format_bytes(found)}: expected at least --mem {format_mem(minimum)} for {why}",
        minimum,
    )


def node_bytes(options: IngestOptions) -> int:
    """Bytes of tables for each node, as documented."""
    minimum = influence_node_bytes(options)
    if options.partition is not None:
        minimum = max(minimum, options.partition.node_bytes)
    if options.is_breadth_first:
        return max(BFS_NODE_BYTES, minimum)
    return max(RENAMED_NODE_BYTES if options.renames else SOURCE_NODE_BYTES, minimum)


def memory_lines(job: IngestJob) -> tuple[MemoryLine, ...]:
    return (
        *_taken_first(job.contents, job.options),
        MemoryLine("two buffers of the array being written", 2 * job.buffer),
        MemoryLine("edges and rows of the stage that runs", job.share),
        MemoryLine("Python and libraries", interpreter_bytes(job.options.mem_bytes)),
    )


def _taken_first(contents: Contents, options: IngestOptions) -> list[MemoryLine]:
    """Memory that is needed whatever the budget."""
    each, block = node_bytes(options), options.block_bytes
    rows = [row_disk_bytes(a, block) for a in contents.row_arrays()]
    graphs = [graph_bytes(r, options) for r in contents.relations]
    crcs = _CRC_BYTES * (max([*rows, *graphs], default=0) // PAGE_BYTES)
    return [
        MemoryLine(f"tables, {each} bytes a node", each * contents.num_nodes),
        MemoryLine("blocks being packed", _PACKER_BLOCKS * block),
        MemoryLine("checksums of the array being written", crcs),
        MemoryLine("small things", _FIXED_BYTES),
    ]


def _min_mem(contents: Contents, options: IngestOptions, share: int) -> int:
    taken = sum(line.bytes for line in _taken_first(contents, options))
    return minimum_bytes(taken, share, align(_widest(contents), options.block_bytes))


def minimum_bytes(taken: int, share: int, slot: int) -> int:
    """The minimum --mem that leaves `share` bytes; `slot`: bytes of a slot of the written array."""
    buffers = max(2 * slot, min(2 * _MAX_BUFFER, share // 7 + 2))  # as `buffer_bytes`: 2/16
    return with_interpreter(taken + share + buffers)


def buffer_bytes(slot: int, spare: int) -> int:
    """Bytes of each of the two buffers of the array being written."""
    return max(slot, min(_MAX_BUFFER, spare // 16))


def interpreter_bytes(mem_bytes: int, maximum: int = _INTERPRETER_BYTES) -> int:
    """Bytes set aside for Python and libraries; a small budget does not cover all of theirs."""
    return min(maximum, mem_bytes // 4)


def with_interpreter(minimum: int, maximum: int = _INTERPRETER_BYTES) -> int:
    """The minimum --mem that leaves `minimum` bytes beside Python and libraries."""
    return min(-(-minimum * 4 // 3), minimum + maximum)


def _widest(contents: Contents) -> int:
    """Bytes of the widest row in the source or the store."""
    stored = [a.row_bytes for a in contents.row_arrays()]
    return max([1, *stored, *(r.source.row_bytes for r in contents.rows())])


def seeded_splits(t: TypeContents, labelled: int, options: IngestOptions) -> list[RowArray]:
    """The seeded splits that are made for a type, if it has labels and no splits."""
    if not (options.split and t.label and not t.splits):
        return []
    return [
        RowArray(f"nodes/{as_path(t.name)}/splits/{name}", "int64", stop - first)
        for name, (first, stop) in zip(SPLITS, split_sizes(options.split, labelled), strict=True)
    ]


def store_bytes(contents: Contents, options: IngestOptions) -> int:
    arrays = contents.row_arrays()
    for t in contents.types:
        arrays += seeded_splits(t, t.num_nodes, options)
    rows = sum(row_disk_bytes(a, options.block_bytes) for a in arrays)
    graphs = sum(graph_bytes(r, options) for r in contents.relations)
    return rows + graphs + influence_bytes(contents, options)


def looks_at_label(label: ArrayContent, options: IngestOptions) -> bool:
    """Whether labels are read before they are written: for their dtype, or to split them."""
    return label.source.dtype.kind == "f" or bool(options.split)
