"""A stage as a plan sees it, and the bytes of what stages write.  Pure."""

from typing import NamedTuple

from blockstore.format import RowArray, row_geometry
from preprocess.contents import RelationContents
from preprocess.options import IngestOptions


class Step(NamedTuple):
    """A stage: the bytes that it moves, and those that it keeps."""

    name: str
    read: int
    written: int
    made: int = 0  # temporary bytes that later stages need
    spent: int = 0  # temporary bytes that no stage needs after it
    passing: int = 0  # temporary bytes that are gone when it is over


def row_disk_bytes(array: RowArray, block_bytes: int) -> int:
    """Bytes of the shards of a row array, and of its checksums."""
    geometry = row_geometry(array, block_bytes)
    return geometry.num_blocks * geometry.slot_bytes * 1025 // 1024


def graph_bytes(relation: RelationContents, options: IngestOptions) -> int:
    """Blocks of a relation, with their headers and what is left of them."""
    size = relation.most_edges * relation.item_bytes + 4 * relation.dst.num_nodes
    return size + size // 64 + options.block_bytes


def scatter_bytes(num_rows: int, row_bytes: int, place: int, share: int) -> int:
    """Temporary bytes of rows that are put into another order."""
    return num_rows * (row_bytes + place) if num_rows * row_bytes > share // 2 else 0
