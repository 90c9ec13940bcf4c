"""Byte layout of a store, format version 3: the only code that knows FORMAT.md."""

import struct
from collections.abc import Iterable
from math import gcd, prod
from typing import Annotated, NamedTuple, Self

import msgspec

from blockstore.errors import CorruptBlock, UnsupportedVersion

FORMAT_VERSION = 3
PAGE_BYTES = 4096  # one crc32c each
DEFAULT_BLOCK_BYTES = 1 << 20
SHARD_BYTES = 1 << 30  # a shard holds at most this many bytes of slots
MANIFEST_KEY = "blockstore"  # in the attributes of the root group
FINGERPRINT_KEY = "blockstore_fingerprint"  # beside it: of the bytes of the manifest
ROOT = "zarr.json"  # of the root group
EXTEND_FOLDER = ".extend"  # in a store, while arrays are added to it
STRIPE_FOLDER = ".stripe"  # in a store, while its blocks are dealt over disks
OWNERS_FOLDER = "owners"  # in a store, of owner maps

ITEM_BYTES = {  # store dtype -> bytes; bfloat16 is a uint16 array as far as Zarr is concerned
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip

BLOCK_MAGIC = b"GBLK"
BLOCK_VERSION = 2  # of the layout of a graph block, in its header
BLOCK_HEADER = struct.Struct("<4sHHQQIIIIQ16x")  # FORMAT.md, "Graph block header"
assert BLOCK_HEADER.size == 64

HAS_EDGE_IDS = 1  # flag bits of a graph block
WIDE_NODE_IDS = 2
WIDE_EDGE_IDS = 4
HAS_WEIGHTS = 8
HAS_TIMES = 16
KNOWN_FLAGS = HAS_EDGE_IDS | WIDE_NODE_IDS | WIDE_EDGE_IDS | HAS_WEIGHTS | HAS_TIMES
WEIGHT_DTYPE, TIME_DTYPE = "float32", "int64"  # beside each edge, in its block
MAX_ID_BITS = 56  # of a source: a store has at most 2^56 nodes
# what a manifest may say; kernels count bytes of rows, nodes and edges in int64
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << MAX_ID_BITS)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[^\0]+$")]

FIELD_OFFSETS = {  # bytes inside the header, for kernels
    "first_node": 8, "last_degree": 16, "num_nodes": 24, "num_edges": 28, "num_carried": 32,
    "source_bits": 36, "source_base": 40,
}  # fmt: skip


class BlockHeader(NamedTuple):
    """The fields of a graph block after magic and version, in file order."""

    flags: int
    first_node: int  # store id of the first column that starts in this block
    last_degree: int  # total degree of the last column that starts here, wherever its edges lie
    num_nodes: int  # columns that start here; 0 in the middle of a multi-block column
    num_edges: int  # edges that lie here, carried ones included
    num_carried: int  # of these, the first ones continue the column before `first_node`
    source_bits: int  # of each source, in a stream of bits
    source_base: int  # added to each of them: store id of the first node of their type

    def pack(self) -> bytes:
        """The 64 header bytes."""
        return BLOCK_HEADER.pack(BLOCK_MAGIC, BLOCK_VERSION, *self)

    @classmethod
    def unpack(cls, raw: bytes | memoryview, where: str) -> Self:
        """Parse a header; `where` (path and byte offset) opens every error message."""
        magic, version, *fields = BLOCK_HEADER.unpack_from(raw)
        if magic != BLOCK_MAGIC:
            raise CorruptBlock(f"{where}: magic is {magic!r}, not {BLOCK_MAGIC!r}")
        if version != BLOCK_VERSION:
            raise UnsupportedVersion(
                f"{where}: block format {version}, this code reads {BLOCK_VERSION}"
            )
        header = cls(*fields)
        if header.flags & ~KNOWN_FLAGS:
            raise UnsupportedVersion(f"{where}: unknown flag bits {header.flags & ~KNOWN_FLAGS:#x}")
        return header


def align(count: int, to: int) -> int:
    """`count` rounded up to a multiple of `to`."""
    return -(-count // to) * to


def edges_start_bytes(num_nodes: int) -> int:
    """Byte offset of the first edge in a block in which `num_nodes` columns start."""
    return align(BLOCK_HEADER.size + 4 * (num_nodes + 1), 8)


def id_bits(num_nodes: int) -> int:
    """Bits of a node's number in a type that has so many nodes."""
    return max(1, (num_nodes - 1).bit_length())


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a stream of numbers of so many bits: any of them is in 8 bytes that begin in it."""
    return align(align(count * bits, 8) // 8, 8) + 8 if count else 0


class EdgeLayout(NamedTuple):
    """What the graph blocks of a relation hold for each edge; the same in all of them."""

    id_dtype: str  # uint32 or uint64: of store ids
    source_bits: int  # of a source, in a stream of bits: its store id minus the base
    source_base: int
    edge_id_bytes: int  # of an edge id; 0: there are none
    weight_bytes: int  # likewise
    time_bytes: int

    @property
    def flags(self) -> int:
        """Flag bits of the blocks."""
        return (
            HAS_EDGE_IDS * bool(self.edge_id_bytes)
            | WIDE_NODE_IDS * (self.id_dtype == "uint64")
            | WIDE_EDGE_IDS * (self.edge_id_bytes == 8)
            | HAS_WEIGHTS * bool(self.weight_bytes)
            | HAS_TIMES * bool(self.time_bytes)
        )

    @property
    def bits(self) -> tuple[int, int, int, int]:
        """Bits of an edge in each section; 0: there is no such section."""
        edge_id, weight, time = self.edge_id_bytes, self.weight_bytes, self.time_bytes
        return self.source_bits, 8 * edge_id, 8 * weight, 8 * time

    def sections(self, num_nodes: int, num_edges: int) -> list[int]:
        """Byte offsets of a block's sections (sources, edge ids, weights, times) and their end."""
        at = edges_start_bytes(num_nodes)
        offsets = [at]
        at += packed_bytes(num_edges, self.source_bits)
        for size in (self.edge_id_bytes, self.weight_bytes, self.time_bytes):
            at = align(at, 8) if size else at
            offsets.append(at)
            at += num_edges * size
        return [*offsets, at]

    def capacity(self, block_bytes: int) -> int:
        """Edges of one column that fill a block alone; a longer column goes on in further ones."""
        capacity = 8 * (block_bytes - edges_start_bytes(1)) // sum(self.bits)
        while capacity and self.sections(1, capacity)[-1] > block_bytes:
            capacity -= 1
        return capacity


class RowArray(msgspec.Struct, frozen=True, omit_defaults=True):
    """An array of equal rows (features, labels, ids, splits), stored as blocks of whole rows."""

    path: str  # of the Zarr array, inside the store
    dtype: str  # a key of ITEM_BYTES
    num_rows: Count
    row_shape: tuple[int, ...] = ()  # () if a row is one number
    source: str = ""  # how the source held it, for export: "dense", "csr" or ""
    scale_path: str = ""  # of the side array float32 (columns,): int8 times scale is the value
    rows_per_block: int = 0  # 0: as many as fill a block; else gapless: `gapless_rows`

    @property
    def row_items(self) -> int:
        return prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        return self.row_items * ITEM_BYTES[self.dtype]


class BlockGeometry(NamedTuple):
    """Where the blocks of one array lie: block i is slot i % blocks_per_shard of shard i // ..."""

    slot_bytes: int  # distance between blocks; a multiple of PAGE_BYTES
    chunk_bytes: int  # true bytes of a block; the rest of the slot is a gap of zeros
    num_blocks: int
    blocks_per_shard: int
    rows_per_block: int  # 1 for graph blocks: a block is a row of the Zarr array

    @property
    def pages_per_block(self) -> int:
        """Entries of the crc array that belong to one block."""
        return self.slot_bytes // PAGE_BYTES

    @property
    def num_pages(self) -> int:
        """Entries of the whole crc array."""
        return self.num_blocks * self.pages_per_block

    @property
    def num_shards(self) -> int:
        return -(-self.num_blocks // self.blocks_per_shard)

    @property
    def pages_per_shard(self) -> int:
        """Pages of every shard but the last."""
        return self.blocks_per_shard * self.pages_per_block

    def blocks_in(self, shard: int) -> int:
        return min(self.blocks_per_shard, self.num_blocks - shard * self.blocks_per_shard)

    def locate(self, block: int) -> tuple[int, int]:
        shard, slot = divmod(block, self.blocks_per_shard)
        return shard, slot * self.slot_bytes


def _geometry(slot: int, chunk: int, num_blocks: int, rows_per_block: int) -> BlockGeometry:
    per_shard = max(1, min(num_blocks, SHARD_BYTES // slot))
    return BlockGeometry(slot, chunk, num_blocks, per_shard, rows_per_block)


def row_geometry(array: RowArray, block_bytes: int) -> BlockGeometry:
    """Blocks of a row array: whole rows each; a row longer than a block takes whole slots.

    If the array says how many rows a block has, there are no gaps: a row and the next one are
    adjacent bytes of a shard.  Raises CorruptBlock: these rows do not fill whole pages.
    """
    if array.rows_per_block:
        chunk = array.rows_per_block * array.row_bytes
        if array.rows_per_block < 0 or chunk % PAGE_BYTES:
            raise CorruptBlock(
                f"{array.path}: {array.rows_per_block} rows of {array.row_bytes} bytes a block, "
                f"expected whole pages of {PAGE_BYTES}; ingest again"
            )
        num_blocks = -(-array.num_rows // array.rows_per_block)
        return _geometry(chunk, chunk, num_blocks, array.rows_per_block)
    per_block = max(1, block_bytes // array.row_bytes)
    chunk = per_block * array.row_bytes
    num_blocks = -(-array.num_rows // per_block)
    return _geometry(align(chunk, block_bytes), chunk, num_blocks, per_block)


def gapless_rows(row_bytes: int, block_bytes: int, num_rows: int) -> int:
    """`rows_per_block` of an array without gaps: the smallest number of rows that fills whole
    pages, times what comes closest to a block, no more than hold all rows."""
    unit = PAGE_BYTES // gcd(PAGE_BYTES, row_bytes)
    times = max(1, (2 * block_bytes + unit * row_bytes) // (2 * unit * row_bytes))
    return unit * min(times, max(1, -(-num_rows // unit)))


def graph_geometry(num_blocks: int, block_bytes: int) -> BlockGeometry:
    return _geometry(block_bytes, block_bytes, num_blocks, 1)


class Halo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Copies of a type's nodes in slots, group by group: one for each partition, one for the hubs.

    Group p has the nodes that partition p needs most from outside of it; the last group has the
    type's hubs.  Any may be empty.  Inside a group, slots are in the order of their store ids.
    Each array has a row for each slot.
    """

    nodes: RowArray  # id_dtype: store id of each slot
    offsets_path: str  # side array uint64 (num_partitions + 2,): first slot of each group, then all
    label: RowArray | None = None
    features: dict[str, RowArray] = {}


class HaloColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """In-edges of the halo slots of a relation's `dst`: graph blocks whose columns are slots."""

    num_edges: Count
    num_blocks: Count
    path: str  # of the Zarr array of blocks; their sections are those of the relation
    first_node_path: str  # side array uint64 (num_blocks + 1,): first slot of each block
    first_edge_path: str  # side array uint64 (num_blocks + 1,): edges before each block


class HopSet(msgspec.Struct, frozen=True, omit_defaults=True):
    """Features of the nodes of a split and what operators make of them, hop by hop.

    All arrays have a row per node, in one seeded random order, and none has gaps: chunks of
    consecutive rows are consecutive bytes of a shard.
    """

    split: str  # "train", "valid", "test", ..., or "all": every node of the type
    nodes: RowArray  # int64: original id of the node of each row
    label: RowArray | None  # None: the type has no labels
    operators: dict[Name, tuple[RowArray, ...]]  # hops 0 to R; hop 0 is one array for all of them
    feature: str = ""  # name of the features that hop 0 is
    seed: int = 0  # of the order of rows

    def arrays(self) -> list[RowArray]:
        chains = {array.path: array for chain in self.operators.values() for array in chain}
        return [self.nodes, *([self.label] if self.label else []), *chains.values()]


class NodeType(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node type: a range of store ids and its per-node arrays, rows in store order."""

    name: Name
    first: int  # store id of its first node
    num_nodes: Count
    original_id: RowArray  # store order -> id in the source
    store_id: RowArray  # source order -> store id
    label: RowArray | None = None
    features: dict[Name, RowArray] = {}
    splits: dict[Name, RowArray] = {}  # source ids, in the order of the source
    num_partitions: Count = 0
    partition_offsets_path: str = ""  # side array uint64 (num_partitions + 1,): store ids
    hubs: RowArray | None = None  # id_dtype: store ids of hubs, the most influential first
    halo: Halo | None = None
    hops: dict[Name, HopSet] = {}  # by split


class Relation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One relation: in-edges of the nodes of `dst`, as graph blocks."""

    src: str
    name: Name
    dst: str
    num_edges: Count
    num_blocks: Count
    path: str  # of the Zarr array of blocks
    first_node_path: str  # of the object index: uint64 (num_blocks + 1,)
    edge_id_dtype: str | None = None  # uint32 or uint64 where edge ids were kept
    num_source_edges: Count = 0  # edges the source listed; added reverses have ids from here on
    has_weights: bool = False  # float32 beside each edge, in its block
    has_times: bool = False  # int64 beside each edge, in its block
    first_edge_path: str = ""  # side array uint64 (num_blocks + 1,): edges before each block
    features: dict[Name, RowArray] = {}  # a row per edge, in the order of the blocks
    splits: dict[Name, RowArray] = {}  # edge ids (), or original ids (source, target) (2,)
    reverse_of: str = ""  # name of the relation (dst, name, src) that this one was made from
    halo: HaloColumns | None = None

    @property
    def title(self) -> str:
        """Its name among those of all types."""
        return f"{self.src}-{self.name}-{self.dst}"

    def item_bytes(self, id_dtype: str) -> tuple[int, int, int, int]:
        """Bytes of an edge in arrays of its own: source, id, weight, time; 0: there is none."""
        return (
            ITEM_BYTES[id_dtype],
            ITEM_BYTES[self.edge_id_dtype] if self.edge_id_dtype else 0,
            ITEM_BYTES[WEIGHT_DTYPE] * self.has_weights,
            ITEM_BYTES[TIME_DTYPE] * self.has_times,
        )


class Partitioning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How nodes were partitioned, and how well: a function of the graph and the settings."""

    method: str  # "gap", "fennel", "ldg", "random" or "metis"
    num_partitions: int
    slack: float
    gamma: float
    passes: int  # over all edges; 0 if they were not streamed
    num_train: int  # training nodes
    num_classes: int  # of training nodes
    cut: float  # share of edges between partitions
    inside: float  # share of the in-edges of training nodes that come from their partition
    kept_8: float  # share of these whose source is loaded with one partition of 8, expected
    kept_16: float  # the same of 16
    node_balance: float  # nodes of the largest partition, over the mean
    train_balance: float  # training nodes of the partition with most of them, over the mean
    kl_mean: float  # of partitions: divergence of their training labels from those of all, nats
    kl_max: float
    kl_random: float  # expected mean of a random partition
    evaluations: int  # scores that were worked out, in all passes


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is loaded with some of the partitions, drawn at random: expected shares.

    Three numbers: by partitions alone, with hubs, with hubs and halos.
    """

    num_partitions: int  # so many are loaded
    nodes: tuple[float, float, float]  # of a training node's in-neighbors; mean over these nodes
    edges: tuple[float, float, float]  # of all in-edges of training nodes
    loaded: tuple[float, float, float]  # of all nodes, each counted once
    rows: float  # nodes of partitions, slots of their halos and hubs, over all nodes


class Influence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How hubs and halos were chosen, and what they are good for."""

    hub_score: str  # "walk", "degree", or empty: there are none
    steps: int  # of the lazy reverse walks
    num_hubs: int
    halo: float  # nodes of a halo at most, as a share of those of its partition
    num_slots: int  # of all halos, hubs not counted
    kept: tuple[Kept, ...]  # with an 8th and a 16th of the partitions


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a store holds: the attributes of its root group, under MANIFEST_KEY."""

    format: int
    fingerprint: str = ""  # of all else; it does not stand in the manifest but beside it
    block_bytes: int
    id_dtype: str  # uint32 or uint64: of node ids in id arrays and in memory
    types: tuple[NodeType, ...]
    relations: tuple[Relation, ...]
    order: str = "source"  # how store ids were given: "source", "degree", ...
    undirected: bool = False  # reverses were added and duplicates removed at ingest
    duplicates: str = "keep"
    self_loops: str = "keep"
    partitioning: Partitioning | None = None  # None: nodes were not partitioned
    influence: Influence | None = None  # None: there are no hubs and no halos
    files: dict[str, str] = {}  # digests of `bound_files`, by path in the store

    @property
    def num_nodes(self) -> int:
        """Nodes of all types: store ids lie in [0, num_nodes)."""
        return sum(t.num_nodes for t in self.types)

    def graphs(self) -> list[Relation | HaloColumns]:
        """Everything that has graph blocks: each relation, then its copies."""
        return [columns for relation in self.relations for columns in columns_of(relation)]

    def hop_arrays(self) -> list[RowArray]:
        return [a for t in self.types for hops in t.hops.values() for a in hops.arrays()]

    def row_arrays(self) -> list[RowArray]:
        found: list[RowArray | None] = []
        for t in self.types:
            found += [t.original_id, t.store_id, t.label]
            found += [*t.features.values(), *t.splits.values(), t.hubs]
            if t.halo:
                found += [t.halo.nodes, t.halo.label, *t.halo.features.values()]
            for hops in t.hops.values():
                found += hops.arrays()
        for r in self.relations:
            found += [*r.features.values(), *r.splits.values()]
        return [array for array in found if array is not None]


def edge_layout(manifest: Manifest, relation: Relation) -> EdgeLayout:
    """The layout of the graph blocks of a relation and of its copies."""
    src = next(t for t in manifest.types if t.name == relation.src)
    held = relation.item_bytes(manifest.id_dtype)[1:]
    return EdgeLayout(manifest.id_dtype, id_bits(src.num_nodes), src.first, *held)


def columns_of(relation: Relation) -> list[Relation | HaloColumns]:
    """All that has graph blocks of a relation: itself, and its copies."""
    return [relation, *([relation.halo] if relation.halo is not None else [])]


def blocked_arrays(manifest: Manifest) -> list[tuple[str, BlockGeometry, int]]:
    """(path, geometry, dimensions) of every array of blocks of a store.  Raises CorruptBlock."""
    size = manifest.block_bytes
    graphs = [(c.path, graph_geometry(c.num_blocks, size), 2) for c in manifest.graphs()]
    rows = [(a.path, row_geometry(a, size), 1 + len(a.row_shape)) for a in manifest.row_arrays()]
    return [*graphs, *rows]


def side_arrays(manifest: Manifest) -> list[tuple[str, str, int]]:
    """(path, dtype, items) of every side array of a store.  Raises CorruptBlock."""
    sides = [(crc_path(path), "uint32", g.num_pages) for path, g, _ in blocked_arrays(manifest)]
    for columns in manifest.graphs():
        sides.append((columns.first_node_path, "uint64", columns.num_blocks + 1))
        sides.append((columns.first_edge_path, "uint64", columns.num_blocks + 1))
    for node_type in manifest.types:
        if node_type.partition_offsets_path:
            path, count = node_type.partition_offsets_path, node_type.num_partitions
            sides.append((path, "uint64", count + 1))
        if node_type.halo:
            sides.append((node_type.halo.offsets_path, "uint64", node_type.num_partitions + 2))
    scaled = [array for array in manifest.row_arrays() if array.scale_path]
    return [*sides, *((array.scale_path, "float32", array.row_items) for array in scaled)]


def array_paths(manifest: Manifest) -> set[str]:
    """Paths of all arrays of a store.  Raises CorruptBlock."""
    return {path for path, _, _ in (*blocked_arrays(manifest), *side_arrays(manifest))}


def arrays_of(files: Iterable[str]) -> set[str]:
    """Paths of the arrays that bound files belong to; each group among them holds one of these."""
    nodes = {name.removesuffix(f"/{ROOT}") for name in files if name.endswith(f"/{ROOT}")}
    return nodes - {group for node in nodes for group in parents(node)}


def bound_files(manifest: Manifest) -> list[str]:
    """Every file of a store but its root and the shards of blocks, each once, sorted.

    Metadata of arrays and groups, and the chunk of each side array that is not empty.
    """
    nodes = {node for path in array_paths(manifest) for node in (path, *parents(path))}
    chunks = {f"{path}/c/0" for path, _, items in side_arrays(manifest) if items}
    return sorted({f"{node}/{ROOT}" for node in nodes} | chunks)


def parents(path: str) -> list[str]:
    """Groups of the store that an array lies in, the root not counted, inmost last."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def crc_path(array_path: str) -> str:
    """Path of the side array with the crc32c of every page of `array_path`: uint32, shard order."""
    return f"{array_path}.crc"


def shard_path(array_path: str, shard: int, ndim: int) -> str:
    """Path inside the store of one shard file of a Zarr array with `ndim` dimensions."""
    return "/".join([array_path, "c", str(shard), *["0"] * (ndim - 1)])
