"""Parts of messages that describe a store, and the rows that come with batches."""

import msgspec


class RowArraySpec(msgspec.Struct, frozen=True):
    """One array of the nodes, or of the edges, that comes with each batch."""

    name: str  # "x" for features, "y" for labels; other features by their name
    dtype: str  # store dtype, bfloat16 included
    row_shape: tuple[int, ...]
    row_bytes: int
    node_type: str = ""  # whose rows; "" for hop-wise batches and edges
    relation: str = ""  # of edges: whose rows, "src__name__dst"


class PartitionSeeds(msgspec.Struct, frozen=True):
    """The partitions of a store, and the session's seeds in each."""

    first: tuple[int, ...]  # store id of the first node of each, then the number of nodes
    seeds: tuple[int, ...]


class TypeInfo(msgspec.Struct, frozen=True):
    """A node type of the store."""

    num_nodes: int
    arrays: dict[str, tuple[int, ...]]  # shapes of rows by name: "x", "y" for labels, ...
    splits: dict[str, int]  # nodes of each
    num_classes: int | None = None  # of labels, or columns of these; None: not asked for


class RelationInfo(msgspec.Struct, frozen=True):
    """A relation of the store."""

    num_edges: int
    arrays: dict[str, tuple[int, ...]]  # shapes of rows of edges by name
    splits: dict[str, int]  # edges of each
    edge_ids: bool
    weights: bool
    times: bool
