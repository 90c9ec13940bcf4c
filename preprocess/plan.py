"""How the memory and the disk of an ingest are shared out, decided before it starts.  Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from blockstore.errors import BudgetTooSmall
from blockstore.format import RowArray, align, row_geometry
from blockstore.units import format_bytes
from preprocess.options import IngestOptions

BFS_NODE_BYTES = 21  # degree, root, place, order, level: 4 each, and one start for 64 columns
SOURCE_NODE_BYTES = 6  # count 4, owner of a split 1
_FIXED_BYTES = 4 << 20  # interpreter objects, Zarr metadata, small buffers
_LEAST_SHARE = 4 << 20
_LEAST_ROWS = 8  # of the widest row array, that a share must hold
_MOST_BUFFER = 8 << 20
_PACKER_BLOCKS = 6  # degrees 2, sources 1, edge ids 2, the block


class Facts(NamedTuple):
    """Sizes of a source, as far as they decide what an ingest takes."""

    num_nodes: int
    num_edges: int
    rows: tuple[RowArray, ...]  # all row arrays of the store-to-be
    widest_source_row: int  # bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is left of --mem after tables with an entry a node, the packer and small things."""

    buffer: int  # bytes of each of two buffers of an array being written
    share: int  # bytes for chunks, buckets and dense rows, one stage at a time


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes on disk."""

    store: int
    temporary: int  # at most, at any time, beside the store


def plan_memory(facts: Facts, options: IngestOptions) -> MemoryPlan:
    """Share out --mem.  Raises BudgetTooSmall with the least that would do."""
    least = _least_bytes(facts, options, max(_LEAST_SHARE, _LEAST_ROWS * _widest(facts)))
    if options.mem_bytes < least:
        raise too_little_memory(
            options.mem_bytes, least,
            f"{facts.num_nodes:,} nodes of {_node_bytes(options)} bytes each, blocks of "
            f"{format_bytes(options.block_bytes)} and buffers",
        )  # fmt: skip
    spare = options.mem_bytes - _taken_first(facts, options)
    buffer = _buffer_bytes(facts, options, spare)
    return MemoryPlan(buffer, spare - 2 * buffer)


def check_longest(
    facts: Facts, options: IngestOptions, memory: MemoryPlan, column_bytes: int
) -> None:
    """Raises BudgetTooSmall: the longest column takes `column_bytes` to sort, which is too much."""
    need = 4 * (column_bytes // 3 + 1)
    if need > memory.share:
        raise too_little_memory(
            options.mem_bytes, _least_bytes(facts, options, need),
            f"sorting the in-edges of one node, {format_bytes(column_bytes)}",
        )  # fmt: skip


def too_little_memory(found: int, least: int, why: str) -> BudgetTooSmall:
    """The error that says the least that would do."""
    return BudgetTooSmall(
        f"--mem {format_bytes(found)}: expected at least --mem {-(-least // (1 << 20))}M for {why}"
    )


def _node_bytes(options: IngestOptions) -> int:
    return BFS_NODE_BYTES if options.order == "bfs" else SOURCE_NODE_BYTES


def _taken_first(facts: Facts, options: IngestOptions) -> int:
    """Tables with an entry a node, the blocks of the packer, and what is always there."""
    nodes = _node_bytes(options) * facts.num_nodes
    return nodes + _PACKER_BLOCKS * options.block_bytes + _FIXED_BYTES


def _least_bytes(facts: Facts, options: IngestOptions, share: int) -> int:
    """The least --mem that leaves so much to share."""
    slot = align(_widest(facts), options.block_bytes)
    buffers = max(2 * slot, min(2 * _MOST_BUFFER, share // 7 + 2))  # two of a 16th of what is left
    return _taken_first(facts, options) + share + buffers


def _buffer_bytes(facts: Facts, options: IngestOptions, spare: int) -> int:
    return max(align(_widest(facts), options.block_bytes), min(_MOST_BUFFER, spare // 16))


def _widest(facts: Facts) -> int:
    return max([a.row_bytes for a in facts.rows] + [facts.widest_source_row])


def plan_disk(facts: Facts, options: IngestOptions, memory: MemoryPlan) -> DiskPlan:
    """What the store will take, and what its making takes beside it at most."""
    edges = facts.num_edges * (2 if options.undirected else 1)
    node = 8 if options.ids == "uint64" or facts.num_nodes >= 2**32 - 1 else 4
    ids = 0 if not options.edge_ids else 4 if 2 * facts.num_edges < 2**32 else 8
    rows = sum(row_disk_bytes(a, options.block_bytes) for a in facts.rows)
    graph = edges * (node + ids) + 4 * facts.num_nodes
    graph += graph // 64 + options.block_bytes  # headers, and what is left of blocks
    held = 4 * edges if options.order == "bfs" and 4 * edges > memory.share // 3 else 0
    buckets = edges * (8 + ids) if edges * (8 + ids) > memory.share // 2 else 0
    passing = 0
    if options.order == "bfs":
        sizes = [a.num_rows * (a.row_bytes + 8) for a in facts.rows]
        passing = max([s for s in sizes if s > memory.share // 2], default=0)
    counts = 4 * facts.num_nodes
    return DiskPlan(graph + rows, max(held + buckets + counts, passing))


def row_disk_bytes(array: RowArray, block_bytes: int) -> int:
    """Bytes of the shards of a row array, and of its checksums."""
    geometry = row_geometry(array, block_bytes)
    return geometry.num_blocks * geometry.slot_bytes * 1025 // 1024


def edge_id_dtype(num_edges: int, options: IngestOptions) -> str | None:
    """Width of edge ids in the store; added reverses have ids up to twice the edges."""
    if not options.edge_ids:
        return None
    return "uint32" if 2 * num_edges < 2**32 else "uint64"
