"""Products over graph blocks, and derived rows, against plain Python, for all widths of ids and
rows.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.format import EdgeLayout
from blockstore.kernels.columns import view_sources
from blockstore.pack import unpack_block
from preprocess.kernels import hops as kernels
from preprocess.kernels.edges import count_ids
from preprocess.kernels.hops import HEAVY, add_rows, add_shares
from preprocess.kernels.rowsum import RowTable
from tests.graphs import Csc, csc_graphs, lay_out, pack

DTYPES = st.sampled_from(["uint32", "uint64"])


def naive(graph: Csc, x: np.ndarray, weighted: bool, loops: bool) -> np.ndarray:
    """Sums of the rows of sources, float64."""
    out = x.astype(np.float64) if loops else np.zeros(x.shape)
    for v in range(graph.num_nodes):
        for e in range(graph.indptr[v], graph.indptr[v + 1]):
            out[v] += x[graph.indices[e]] * (float(graph.weights[e]) if weighted else 1.0)
    return out


def product(
    blocks: list[Any],
    layout: EdgeLayout,
    first: int,
    x: np.ndarray,
    edge_id_bytes: int | None,
    loops: bool,
    parts: int = 1,
) -> np.ndarray:
    """2 * factor * (A x) - 0.5 * x, where factor is 1 / (1 + node)."""
    raw, num_nodes, width = np.concatenate(blocks), x.shape[0], x.shape[1]
    headers = [unpack_block(block, "here").header for block in blocks]
    slots, columns = np.full(len(blocks), -1, np.int64), []
    for number, header in enumerate(headers):
        if header.num_carried:
            slots[number] = len(columns)
            columns.append(header.first_node - 1 - first)
    carry = np.full(len(columns) * width, np.nan, np.float32)
    out = np.full(num_nodes * width, np.nan, np.float32)
    factor = (1 / (1 + np.arange(num_nodes))).astype(np.float32)
    rows = x.reshape(-1)
    table = RowTable(rows, width, first)
    step = kernels.Product(factor, np.float32(2), np.float32(-0.5), rows, loops)
    weights = None if edge_id_bytes is None else raw.view(np.float32)
    held = kernels.RawBlocks(
        raw.view(np.uint32), view_sources(raw, layout), weights, blocks[0].size, edge_id_bytes or 0
    )
    for part in range(parts):
        kernels.multiply_blocks(held, table, step, out, slots, carry, part, parts)
    kernels.finish_carried(np.array(columns, np.int64), carry, width, step, out)
    return out.reshape(num_nodes, width)


@given(data=st.data(), width=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 24, 32, 48, 100, 128, 192]),
       id_dtype=DTYPES, edge_id=st.sampled_from([None, "uint32", "uint64"]), times=st.booleans(),
       weighted=st.booleans(), loops=st.booleans(), parts=st.integers(1, 5))  # fmt: skip
def test_products_are_those_of_the_definition(
    data, width: int, id_dtype: str, edge_id: Any, times: bool, weighted: bool, loops: bool,
    parts: int,
):  # fmt: skip
    graph = data.draw(csc_graphs(max_multi_block=2, multi_block_degree=3000, id_dtype=id_dtype))
    first = data.draw(st.sampled_from([0, 9]))
    moved = graph._replace(indices=(graph.indices + first).astype(id_dtype))
    blocks, _ = pack(moved, 4096, id_dtype, edge_id, first, (weighted, times))
    x = np.random.default_rng(width).standard_normal((graph.num_nodes, width)).astype(np.float32)
    place = {None: 0, "uint32": 4, "uint64": 8}[edge_id] if weighted else None
    layout = lay_out(moved, id_dtype, edge_id, (weighted, times))
    found = product(blocks, layout, first, x, place, loops, parts)
    sums = naive(graph, x, weighted, loops)
    expected = 2 * sums / (1 + np.arange(graph.num_nodes))[:, None] - 0.5 * x
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(sums).max())
    again = product(blocks, layout, first, x, place, loops)
    assert np.array_equal(found, again)  # parts do not show


def test_widths_do_not_show():
    """A column of a wide row has the very sums that it has alone."""
    graph = Csc(np.array([0, 700]), np.zeros(700, np.uint32), np.empty(0))
    blocks, _ = pack(graph, 4096, "uint32")
    x = np.random.default_rng(0).random((1, 112)).astype(np.float32)
    layout = lay_out(graph, "uint32")
    wide = product(blocks, layout, 0, x, None, True)
    for column in range(112):
        alone = product(blocks, layout, 0, x[:, column : column + 1].copy(), None, True)
        assert alone[0, 0] == wide[0, column]


def test_long_sums_stay_close():
    """A million terms of 0.1: one after the other they would be off by 1e-2 in float32."""
    graph = Csc(np.array([0, 1_000_000]), np.zeros(1_000_000, np.uint32), np.empty(0))
    blocks, _ = pack(graph, 1 << 16, "uint32")
    x = np.full((1, 1), 0.1, np.float32)
    found = product(blocks, lay_out(graph, "uint32"), 0, x, None, False)[0, 0]
    assert abs(found - (2e6 * np.float64(np.float32(0.1)) - 0.05)) < 1e-4 * 2e5


@given(st.integers(1, 40), st.integers(1, 30), st.booleans(), DTYPES)
def test_rows_are_taken_without_their_scale(count: int, columns: int, scaled: bool, dtype: Any):
    rng = np.random.default_rng(count)
    rows = rng.standard_normal((20, 32)).astype(np.float32)
    scale = (rng.random(20) + 0.5).astype(np.float32) if scaled else np.empty(0, np.float32)
    places = rng.integers(0, 20, count).astype(dtype)
    out = np.empty((count, columns), np.float32)
    kernels.take_rows(rows.reshape(-1), 32, scale, places, out)
    expected = rows / scale[:, None] if scaled else rows
    assert np.array_equal(out, expected[places, :columns])


IDS = st.sampled_from([np.uint32, np.uint64])


@given(
    edges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), max_size=40),
    width=st.integers(1, 40),
    first=st.integers(0, 2**31),
    ids=IDS,
    data=st.data(),
)
def test_rows_are_added_edge_by_edge(edges, width: int, first: int, ids: Any, data):
    edges = sorted(edges)
    low = data.draw(st.integers(0, width))
    high = data.draw(st.integers(low, width))
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((7, width)).astype(np.float32)
    before = rng.standard_normal((9, width)).astype(np.float32)
    origins = np.array([o + first for o, _ in edges], ids)
    targets = np.array([t for _, t in edges], ids)
    summed, greatest = before.copy(), before.copy()
    add_rows(False, rows, first, origins, targets, low, high, summed)
    add_rows(True, rows, first, origins, targets, low, high, greatest)
    expected, maximum = before.copy(), before.copy()
    for origin, target in edges:
        expected[target, low:high] += rows[origin, low:high]
        maximum[target, low:high] = np.maximum(maximum[target, low:high], rows[origin, low:high])
    assert np.array_equal(summed, expected)
    assert np.array_equal(greatest, maximum)
    counts = np.zeros(9, np.uint32)
    count_ids(targets, 0, counts)
    assert counts.tolist() == np.bincount(targets.astype(np.int64), minlength=9).tolist()


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.long)])
def test_shares_are_added_edge_by_edge(dtype: Any):
    """Naive: one after another, or, of heavy rows, in numbers that are twice as wide."""
    rng = np.random.default_rng(2)
    degrees = np.array([3, HEAVY + 1, 0, HEAVY, 100_000])
    targets = np.repeat(np.arange(5, dtype=np.uint64), degrees)
    targets = targets[rng.permutation(targets.size)]
    rows = (rng.standard_normal((7, 5)) + 3).astype(dtype)
    origins = rng.integers(0, 7, targets.size).astype(np.uint32)
    shares, heavy = (1 / np.maximum(degrees, 1)).astype(dtype), np.array([1, 4])
    before = rng.standard_normal((5, 5)).astype(dtype)
    sums, lost = before.copy(), np.zeros((2, 5), dtype)
    add_shares(rows, origins, targets, shares, heavy, lost, sums)
    sums[heavy] -= lost
    one_by_one, wide = before.copy(), before.astype(np.longdouble)
    for origin, target in zip(origins, targets, strict=True):
        one_by_one[target] += shares[target] * rows[origin]
        wide[target] += (shares[target] * rows[origin]).astype(np.longdouble)
    assert np.array_equal(sums[[0, 2, 3]], one_by_one[[0, 2, 3]])
    eps = np.finfo(dtype).eps
    assert np.abs(sums - wide)[heavy].max() < 4 * eps * np.abs(wide).max()
    assert np.abs(one_by_one - wide)[4].max() > 40 * eps


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_nan_is_the_greatest_of_all(order: list[int]):
    rows = np.array([[np.nan], [3]], np.float32)
    sums = np.full((1, 1), -np.inf, np.float32)
    add_rows(True, rows, 0, np.array(order, np.uint32), np.zeros(2, np.uint32), 0, 1, sums)
    assert np.isnan(sums[0, 0])
