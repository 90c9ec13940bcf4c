"""Members, filtered columns and draws from them, against plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.format import EdgeLayout
from blockstore.kernels import members as kernels
from blockstore.kernels.columns import view_blocks
from blockstore.kernels.picks import BY_SOURCE, BY_WEIGHT, Column, Draws, Rule
from blockstore.kernels.records import EdgeRecord
from blockstore.kernels.rows import NO_ROW, RowLayout
from blockstore.pack import GraphPacker, unpack_block
from tests.blockstore.kernels.sampling import NO_ITEMS, NO_TREES, uniform
from tests.graphs import Csc, make_csc
from tests.reference import pick_positions, rank_sources, weigh_edges

COUNT = 300
LAYOUT = EdgeLayout("uint32", 27, 0, 4, 4, 8)
OWN, IDS = EdgeRecord(1, 1, 2), EdgeRecord(ids=1)
KEY = 12345


def words_of(nodes: set[int], count: int = COUNT) -> np.ndarray:
    """The bitmap of some members, with ranks."""
    words = np.zeros(kernels.words_size(count), np.uint64)
    take = np.empty(len(nodes), np.uint8)
    kernels.take_new(words, np.array(sorted(nodes), np.uint32), take)
    assert take.all()
    assert kernels.count_members(words) == len(nodes)
    return words


@given(st.sets(st.integers(0, COUNT - 1)), st.integers(0, COUNT), st.integers(0, COUNT))
@settings(max_examples=30, deadline=None)
def test_ranks_count_the_members_before(nodes: set[int], a: int, b: int):
    words = words_of(nodes)
    kernels.add_range(words, min(a, b), max(a, b))
    nodes |= set(range(min(a, b), max(a, b)))
    assert kernels.count_members(words) == len(nodes)
    for node in (0, 1, 63, 64, 65, a, b, COUNT):
        assert kernels.rank_of(words, node) == sum(n < node for n in nodes)


def test_a_copy_counts_only_where_its_node_is_no_member():
    words = words_of({3, 200})
    take = np.empty(5, np.uint8)
    kernels.take_new(words, np.array([3, 4, 64, 4, 200], np.uint32), take)
    assert take.tolist() == [0, 1, 1, 0, 0]


def packed(graph: Csc, weights: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Blocks of 4 KiB with edge ids and weights, and the first column of each."""
    blocks: list[np.ndarray] = []
    packer = GraphPacker(4096, LAYOUT, 0, lambda block: blocks.append(block.copy()))
    ids = np.arange(graph.indices.size, dtype=np.uint32)
    packer.append(np.diff(graph.indptr), graph.indices, ids, weights, graph.times)
    return blocks, packer.close()


@st.composite
def subgraphs(draw):
    """A graph with columns over several blocks, its members, and a range of columns."""
    seed = draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 12, COUNT)
    degrees[rng.integers(0, COUNT, 3)] = rng.integers(300, 2500, 3)
    graph = make_csc(degrees, seed)
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    members = {int(n) for n in np.flatnonzero(rng.random(COUNT) < share)}
    low, high = sorted(draw(st.tuples(st.integers(0, COUNT), st.integers(0, COUNT))))
    return graph, members | set(range(low, high)), low, high


def filtered(graph: Csc, members: set[int], low: int, high: int, weights: np.ndarray):
    """Columns [low, high) by the kernels, and who is a member."""
    inside = kernels.Members(words_of(members), 0, COUNT, 0)
    count, size = len(members), graph.indices.size
    blocks, first_node = packed(graph, weights)
    beside = np.empty(OWN.size * size, np.uint32)
    columns = kernels.MemberColumns(
        np.zeros(count, np.int64), np.zeros(count, np.uint32),
        np.empty(size, np.uint32), beside, beside.view(np.float32), OWN, size,
        np.full((len(blocks), 3), -1, np.int64),
    )  # fmt: skip
    wanted = kernels.WantedMembers(
        low, high, np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int64)
    )
    slot, table, to = np.zeros(1, np.int32), np.empty(0, np.uint64), 0
    for i, block in enumerate(blocks):
        view = view_blocks(block, LAYOUT, slot, table, block.size, 0)
        end = kernels.filter_block(view, int(first_node[i]), 0, wanted, inside, columns, to, i)
        assert end <= to + unpack_block(block, "block").header.num_edges
        to += unpack_block(block, "block").header.num_edges
    kernels.join_fragments(columns)
    return columns, inside


def expected(graph: Csc, members: set[int], node: int) -> list[int]:
    """Edges of a column whose sources are members."""
    edges = range(graph.indptr[node], graph.indptr[node + 1])
    return [e for e in edges if int(graph.indices[e]) in members]


@given(subgraphs())
@settings(max_examples=40, deadline=None)
def test_filtered_columns_keep_members_in_order(found):
    graph, members, low, high = found
    weights = np.random.default_rng(0).random(graph.indices.size).astype(np.float32)
    columns, _ = filtered(graph, members, low, high, weights)
    size = graph.indices.size
    times = 2 * size  # where that section begins
    for rank, node in enumerate(sorted(members)):
        if low <= node < high:
            edges = expected(graph, members, node)
            start = int(columns.starts[rank])
            here = slice(start, start + int(columns.degrees[rank]))
            assert columns.beside[:size][here].tolist() == edges
            assert columns.sources[here].tolist() == graph.indices[edges].tolist()
            assert columns.weights[size:times][here].tolist() == weights[edges].tolist()
            found = columns.beside[times:].view(np.int64)[here]
            assert found.tolist() == graph.times[edges].tolist()


@given(subgraphs(), st.integers(-1, 80), st.booleans())
@settings(max_examples=40, deadline=None)
def test_draws_are_those_of_the_reference_in_the_induced_graph(found, fanout, replace):
    graph, members, low, high = found
    replace = replace and fanout >= 0
    weights = np.random.default_rng(1).random(graph.indices.size).astype(np.float32)
    kept, inside = filtered(graph, members, low, high, weights)
    nodes = np.arange(low, high, dtype=np.uint32)
    columns = [expected(graph, members, int(v)) for v in nodes]
    room = [len(c) if fanout < 0 else fanout for c in columns]
    at = np.concatenate([[0], np.cumsum(room)]).astype(np.int64)
    draws, edges = np.empty(at[-1], np.uint32), np.empty((at[-1], 1), np.uint32)
    counts = np.empty(nodes.size, np.uint32)
    frontier = Column(nodes, 0, counts, uniform(fanout, KEY, replace))
    out = Draws(at, draws, at, edges, IDS, NO_ITEMS)
    kernels.draw_members(inside, kept, frontier, out)
    for i, column in enumerate(columns):
        picks = pick_positions(len(column), fanout, replace, KEY, int(nodes[i]))
        here = slice(int(at[i]), int(at[i]) + int(counts[i]))
        assert edges[here, 0].tolist() == [column[p] for p in picks]
        assert draws[here].tolist() == [int(graph.indices[column[p]]) for p in picks]


@given(subgraphs(), st.integers(1, 20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ranked_draws_are_those_of_the_reference(found, fanout, weighted):
    """By weight, or by source."""
    graph, members, low, high = found
    rng = np.random.default_rng(2)
    weights = rng.exponential(1.0, graph.indices.size).astype(np.float32)
    weights[rng.random(weights.size) < 0.3] = 0
    kept, inside = filtered(graph, members, low, high, weights)
    nodes = np.arange(low, high, dtype=np.uint32)
    at = np.arange(nodes.size, dtype=np.int64) * fanout
    draws = np.empty(nodes.size * fanout, np.uint32)
    edges = np.empty((draws.size, 1), np.uint32)
    counts = np.empty(nodes.size, np.uint32)
    kind = BY_WEIGHT if weighted else BY_SOURCE
    rule = Rule(fanout, False, kind, np.uint64(KEY), *NO_TREES)
    frontier = Column(nodes, 0, counts, rule)
    out = Draws(at, draws, at, edges, IDS, NO_ITEMS)
    kernels.draw_members(inside, kept, frontier, out)
    for i, node in enumerate(nodes.tolist()):
        column = expected(graph, members, node)
        indptr = np.zeros(COUNT + 1, np.int64)
        indptr[node + 1 :] = len(column)
        if weighted:
            wanted = weigh_edges(indptr, weights[column], node, fanout, KEY)
        else:
            wanted = rank_sources(indptr, graph.indices[column], node, fanout, KEY)
        here = slice(int(at[i]), int(at[i]) + int(counts[i]))
        assert edges[here, 0].tolist() == [column[p] for p in wanted]


@pytest.mark.parametrize(("first", "count"), [(0, COUNT), (100, 50)])
def test_addresses_are_by_rank_and_only_of_the_type(first, count):
    members = {1, 70, 120, 130, 149, 150, 299}
    words = words_of(members)
    mine = [n for n in sorted(members) if first <= n < first + count]
    addresses = np.arange(1000, 1000 + len(mine), dtype=np.uint64)
    nodes = np.array(sorted(members), np.uint32)[::-1].copy()
    out = np.empty(nodes.size, np.uint64)
    base = kernels.rank_of(words, first)
    inside = kernels.Members(words, first, count, base)
    kernels.address_members(inside, nodes, addresses, out)
    assert [int(a) for a in out] == [
        1000 + mine.index(int(n)) if int(n) in mine else int(NO_ROW) for n in nodes
    ]


def test_rows_of_a_group_are_addressed_across_blocks_and_shards():
    members = set(range(40, 60))
    words = words_of(members)
    out = np.zeros(20, np.uint64)
    nodes = np.array([40], np.uint32)
    places = np.array([10_000, 50_000], np.int64)
    # blocks of 3 rows of 100 bytes in slots of 512, two a shard; rows 4 to 11 are nodes 40 to 47
    wanted = kernels.WantedMembers(4, 12, nodes, np.empty(0, np.uint8), np.empty(0, np.int64))
    layout = RowLayout(3, 100, 512, 2)
    inside = kernels.Members(words, 0, COUNT, 0)
    kernels.address_group(wanted, True, inside, layout, 0, places, out)
    row = {
        r: (10_000 if r // 3 < 2 else 50_000) + (r // 3 % 2) * 512 + r % 3 * 100
        for r in range(4, 12)
    }
    assert out[:8].tolist() == list(row.values())
    assert not out[8:].any()
