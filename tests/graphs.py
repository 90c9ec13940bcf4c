"""Random graphs for tests, and graphs as the engine holds them: packed into blocks, in slots."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, MAX_ID_BITS, EdgeLayout, id_bits
from blockstore.kernels.columns import BlockView, view_blocks
from blockstore.pack import GraphPacker

ID_DTYPES = st.sampled_from(["uint32", "uint64"])
KEYS = st.integers(0, 2**64 - 1)
FILL = 0xA5  # what slots hold where no block lies


class Csc(NamedTuple):
    """In-edges by target: column v is indices[indptr[v] : indptr[v + 1]]."""

    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    edge_ids: NDArray[Any]  # (num_edges,): a permutation, as large as the dtype allows

    @property
    def num_nodes(self) -> int:
        """Columns."""
        return self.indptr.size - 1

    @property
    def weights(self) -> NDArray[np.float32]:
        """(num_edges,), each another number."""
        return np.arange(self.indices.size, dtype=np.float32) + np.float32(0.5)

    @property
    def times(self) -> NDArray[np.int64]:
        """(num_edges,), each another number, of more than 32 bits."""
        return -(np.arange(self.indices.size, dtype=np.int64) << 33)


def make_csc(
    degrees: Any, seed: int, id_dtype: str = "uint32", edge_id_dtype: str | None = None
) -> Csc:
    """Columns of these degrees with random sources: self-loops and parallel edges included."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(np.asarray(degrees, np.int64))]).astype(np.int64)
    ids, edge_ids = np.dtype(id_dtype), np.dtype(edge_id_dtype or "uint32")
    num_edges = int(indptr[-1])
    indices = rng.integers(0, max(1, indptr.size - 1), num_edges).astype(ids)
    top = np.iinfo(edge_ids).max - num_edges
    return Csc(indptr, indices, rng.permutation(num_edges).astype(edge_ids) + edge_ids.type(top))


# partitions of `spread_csc`, one of one node and one empty, and nodes that are copied beside each
OFFSETS = (0, 60, 61, 150, 230, 230, 310, 400)
HALOS = ([70, 200, 399], [], [0, 17, 300], [61, 62], [5], [], [1, 2, 3, 200, 201])


def spread_csc(rng: np.random.Generator) -> tuple[Csc, NDArray[np.float32]]:
    """Columns from none to several blocks of 4 KiB; weights of their edges, a fifth of them 0."""
    degrees = rng.integers(0, 30, OFFSETS[-1])
    degrees[[5, 17, 61, 200, 229, 399]] = (3000, 1500, 2000, 900, 2500, 2100)
    csc = make_csc(degrees, 2)
    weights = rng.exponential(1.0, csc.indices.size).astype(np.float32)
    weights[rng.random(weights.size) < 0.2] = 0
    return csc, weights


@st.composite
def csc_graphs(
    draw: Any, max_nodes: int = 60, max_degree: int = 40, max_multi_block: int = 0,
    multi_block_degree: int = 5000, id_dtype: str = "uint32", edge_id_dtype: str | None = None,
) -> Csc:  # fmt: skip
    """Graphs with empty columns, self-loops, parallel edges and `max_multi_block` long columns."""
    degrees = draw(st.lists(st.integers(0, max_degree), min_size=1, max_size=max_nodes))
    for _ in range(draw(st.integers(0, max_multi_block))):
        place = draw(st.integers(0, len(degrees) - 1))
        degrees[place] = draw(st.integers(multi_block_degree // 8, multi_block_degree))
    return make_csc(degrees, draw(st.integers(0, 2**32 - 1)), id_dtype, edge_id_dtype)


class Held(NamedTuple):
    """A graph's blocks in slots of a made-up arena, and the arguments that kernels take for it."""

    graph: Csc
    first: int  # store id of column 0
    blocks: list[NDArray[np.uint8]]
    first_node: NDArray[np.uint64]
    slot_of_block: NDArray[np.int32]  # of every block, all present
    arena: NDArray[np.uint8]
    slot_bytes: int
    edge_id_dtype: str | None
    layout: EdgeLayout
    beside: tuple[bool, bool] = (False, False)  # whether weights and times lie beside the edges

    @property
    def id_dtype(self) -> str:
        return self.layout.id_dtype

    @property
    def capacity(self) -> int:
        return self.layout.capacity(self.blocks[0].size if self.blocks else 4096)

    def view(
        self, arena: NDArray[np.uint8] | None = None, slots: NDArray[np.int32] | None = None
    ) -> BlockView:
        """What kernels take; `arena` and `slots` in place of the graph's own."""
        return view_blocks(
            self.arena if arena is None else arena, self.layout,
            self.slot_of_block if slots is None else slots, self.first_node, self.slot_bytes,
            self.capacity,
        )  # fmt: skip

    def nodes(self, columns: Any) -> NDArray[Any]:
        """Store ids of columns."""
        return (np.asarray(columns, np.int64) + self.first).astype(self.id_dtype)

    def block_of(self, columns: Any) -> NDArray[np.int32]:
        """Block in which each column starts."""
        nodes = self.nodes(columns).astype(np.uint64)
        return (np.searchsorted(self.first_node, nodes, side="right") - 1).astype(np.int32)


def lay_out(
    graph: Csc,
    id_dtype: str,
    edge_id_dtype: str | None = None,
    beside: tuple[bool, bool] = (False, False),
    bits: int = 0,
) -> EdgeLayout:
    """Sources are numbered from the least, rounded down to a multiple of 3.

    bits   of a source; fewer than they need: so many. 0: about as many as ids that are not packed,
           and no whole number of bytes
    """
    held = graph.indices if graph.indices.size else np.zeros(1, np.int64)
    minimum, maximum = int(held.min()), int(held.max())
    base = minimum // 3 * 3
    bits = max(bits or {"uint32": 27, "uint64": 53}[id_dtype], id_bits(maximum - base + 1))
    edge = ITEM_BYTES[edge_id_dtype] if edge_id_dtype else 0
    return EdgeLayout(id_dtype, bits, base, edge, 4 * beside[0], 8 * beside[1])


def pack(
    graph: Csc,
    block_bytes: int,
    id_dtype: str,
    edge_id_dtype: str | None = None,
    first: int = 0,
    beside: tuple[bool, bool] = (False, False),
    bits: int = 0,
) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint64]]:
    """(blocks, first_node) of a whole graph, given to the packer at once."""
    blocks: list[NDArray[np.uint8]] = []
    layout = lay_out(graph, id_dtype, edge_id_dtype, beside, bits)
    packer = GraphPacker(block_bytes, layout, first, lambda block: blocks.append(block.copy()))
    edge_ids = graph.edge_ids if edge_id_dtype else None
    packer.append(np.diff(graph.indptr), graph.indices, edge_ids, graph.weights, graph.times)
    return blocks, packer.close()


def hold(
    graph: Csc,
    block_bytes: int = 4096,
    id_dtype: str = "uint32",
    edge_id_dtype: str | None = None,
    first: int = 0,
    seed: int = 0,
    beside: tuple[bool, bool] = (False, False),
    bits: int = 0,
) -> Held:
    """Pack a graph and put its blocks into random slots; slots are longer than blocks."""
    blocks, first_node = pack(graph, block_bytes, id_dtype, edge_id_dtype, first, beside, bits)
    slot_bytes = 2 * block_bytes
    num_slots = len(blocks) + 3
    slots = np.random.default_rng(seed).permutation(num_slots)[: len(blocks)]
    arena = np.full(num_slots * slot_bytes, FILL, np.uint8)
    for slot, block in zip(slots, blocks, strict=True):
        arena[slot * slot_bytes :][:block_bytes] = block
    return Held(
        graph, first, blocks, first_node, slots.astype(np.int32), arena, slot_bytes,
        edge_id_dtype, lay_out(graph, id_dtype, edge_id_dtype, beside, bits), beside,
    )  # fmt: skip


@st.composite
def held_graphs(draw: Any, with_edge_ids: bool = False, block_sizes: Any = (4096, 65536)) -> Held:
    """Packed graphs of all widths; multi-block columns where blocks are small."""
    # every width of both, but not every pair: each is compiled for itself
    widths = st.sampled_from([("uint32", "uint32"), ("uint32", None), ("uint64", "uint64")])
    id_dtype, edge_id_dtype = draw(widths.filter(lambda w: w[1] or not with_edge_ids))
    block_bytes = draw(st.sampled_from(block_sizes))
    long_degree = 5000 if block_bytes == 4096 else block_bytes // 2
    graph = draw(
        csc_graphs(
            max_multi_block=2,
            multi_block_degree=long_degree,
            id_dtype=id_dtype,
            edge_id_dtype=edge_id_dtype,
        )
    )
    # store ids beyond 32 bits where they are wide: the graph's type comes late in the store
    first = draw(st.sampled_from([0, 7, 2**33 if id_dtype == "uint64" else 2**31]))
    seed, beside = draw(st.integers(0, 2**16)), draw(st.tuples(st.booleans(), st.booleans()))
    bits = draw(st.integers(0, 32 if id_dtype == "uint32" else MAX_ID_BITS))
    return hold(graph, block_bytes, id_dtype, edge_id_dtype, first, seed, beside, bits)
