"""Graph blocks that partitions share: of each only the pages of one's own columns are read."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockstore.format import PAGE_BYTES, BlockGeometry, BlockHeader, edge_layout
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader, make_transit
from blockstore.kernels.columns import view_sources
from blockstore.kernels.packed import unpack_ids
from blockstore.store import open_store
from loaderd.memory.ledger import served_rows
from loaderd.sampling.macrobatch.blocks import block_runs, cut_blocks, cut_parts, head_pages
from loaderd.sampling.macrobatch.files import MacroFiles
from tests.graphs import make_csc
from tests.stores import write_store

NODES, BLOCK_BYTES = 900, 8 * PAGE_BYTES


@pytest.fixture(scope="module", params=["plain", "all sections"])
def made(request, tmp_path_factory):
    """Columns from none to several blocks, and their store in partitions that share blocks."""
    rng = np.random.default_rng(7)
    degrees = rng.integers(0, 60, NODES)
    degrees[[0, 31, 400, 401]] = (9000, 30_000, 2500, 20_000)
    graph = make_csc(degrees, 2)
    rich = request.param != "plain"
    weights = rng.random(graph.indices.size).astype(np.float32) if rich else None
    bounds = [0, 1, 1, 31, 33, 150, 151, 152, 400, 402, 600, NODES]
    path = tmp_path_factory.mktemp("shared") / "store"
    write_store(path, graph, [0], BLOCK_BYTES, weights, rich, bounds)
    store = open_store(path)
    files = MacroFiles(store, served_rows(store.manifest), 9)
    with BlockReader(
        [store.graph(store.manifest.relations[0])], aligned_buffer(BLOCK_BYTES), BLOCK_BYTES, 2
    ) as reader:
        yield graph, weights, store, files, reader


def read(made, members, last):
    """(pieces of each member column, in order of blocks; pages read; pages there may be more).

    last   number of the last section that is read
    """
    _, _, store, files, reader = made
    columns, relation = files.columns[0], store.manifest.relations[0]
    geometry = reader.files[0].geometry
    wanted = [(*files.nodes_of(0, p), p) for p in members]
    blocks = np.unique(
        np.concatenate([np.arange(columns.low[p], columns.high[p]) for p in members])
    )
    cuts = cut_blocks(columns, wanted, geometry.pages_per_block)
    runs = block_runs(blocks, geometry, 3, cuts)
    assert sorted(b for first, n in zip(runs[:, 3], runs[:, 2] // 8, strict=True)
                  for b in range(first, first + n)) == blocks.tolist()  # fmt: skip
    transit = make_transit([aligned_buffer(7 * BLOCK_BYTES) for _ in range(2)])
    found: dict[int, dict[int, list[np.ndarray]]] = {}
    layout = edge_layout(store.manifest, relation)

    def consume(low, high, data):
        numbers = [b for _, _, n, first in runs[low:high] for b in range(first, first + n // 8)]
        assert len(numbers) == data.size // BLOCK_BYTES
        for j, block in enumerate(numbers):
            raw = data[j * BLOCK_BYTES : (j + 1) * BLOCK_BYTES]
            header = BlockHeader.unpack(raw[:64].tobytes(), "")
            ends = raw[64 : 64 + 4 * (header.num_nodes + 1)].view(np.uint32).astype(int)
            ends = np.array([0, *ends])
            places = layout.sections(header.num_nodes, header.num_edges)
            for n, (start, stop) in enumerate(pairwise(ends)):
                column = int(columns.first_node[block]) - 1 + n
                if any(low <= column < high for low, high, _ in wanted):
                    sources = np.empty(stop - start, np.uint32)
                    packed = view_sources(raw, layout)
                    unpack_ids(packed, 8 * places[0] + start * layout.source_bits, sources)
                    pieces = [sources] + [
                        raw[at + start * bits // 8 : at + stop * bits // 8].copy()
                        for at, bits in zip(places[1 : last + 1], layout.bits[1:], strict=False)
                    ]
                    found.setdefault(column, {})[block] = pieces

    before = reader.bytes_read
    parts = cut_parts(runs, columns, cuts, layout, last)
    reader.stream(0, runs, transit, consume, parts).wait()
    own = {c: [p[1] for p in sorted(by_block.items())] for c, by_block in found.items()}
    spare = sum(head_pages(columns, b) + last + 1 for b in cuts)
    return own, (reader.bytes_read - before) // PAGE_BYTES, spare


def last_section(store) -> int:
    """Number of the weights, if the blocks hold them."""
    bits = edge_layout(store.manifest, store.manifest.relations[0]).bits
    return max(i for i in range(3) if bits[i])


def expect_columns(made, members, found) -> None:
    """Every column of the members is whole, in all sections that were asked for."""
    graph, weights, _, files, _ = made
    for p in members:
        for v in range(*files.nodes_of(0, p)):
            low, high = graph.indptr[v], graph.indptr[v + 1]
            pieces = found.get(v, [])
            sources = np.concatenate([np.empty(0, np.uint32), *(p[0] for p in pieces)])
            assert sources.tolist() == graph.indices[low:high].tolist()
            if weights is not None and pieces and len(pieces[0]) == 3:
                own = np.concatenate([p[2] for p in pieces]).view(np.float32)
                assert own.tolist() == weights[low:high].tolist()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_members_have_their_columns_whole(made, data):
    *_, store, files, _ = made
    members = sorted(data.draw(st.sets(st.integers(0, files.num_partitions - 1), min_size=1)))
    found, *_ = read(made, members, data.draw(st.integers(0, last_section(store))))
    expect_columns(made, members, found)


def test_an_epoch_reads_each_page_once_but_for_heads_and_ends_of_shared_blocks(made):
    *_, store, files, reader = made
    columns, geometry = files.columns[0], reader.files[0].geometry
    pages = spare = whole = 0
    for p in range(files.num_partitions):
        if columns.low[p] < columns.high[p]:
            _, more, allowed = read(made, [p], last_section(store))
            pages, spare = pages + more, spare + allowed
            whole += int(columns.high[p] - columns.low[p]) * geometry.pages_per_block
    once = geometry.num_pages
    assert pages <= once + spare
    assert pages < whole


def test_runs_end_with_their_shard():
    geometry = BlockGeometry(2 * PAGE_BYTES, 2 * PAGE_BYTES, 9, 3, 1)
    runs = block_runs(np.array([0, 1, 2, 3, 4, 6, 7, 8]), geometry, 10)
    assert runs.tolist() == [[0, 0, 6, 0], [1, 0, 4, 3], [2, 0, 6, 6]]
    halves = block_runs(np.array([1, 2, 3, 4, 5]), geometry, 2, alone=[4])
    assert halves.tolist() == [[0, 2, 4, 1], [1, 0, 2, 3], [1, 2, 2, 4], [1, 4, 2, 5]]
