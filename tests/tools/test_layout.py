"""What minibatches touch, against plain Python."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.store import open_store, read_rows
from loaderd.memory.ledger import served_rows
from preprocess.__main__ import app
from tests.graphs import make_csc
from tests.stores import write_store
from tools.layout import Options, extents_of, main, sample_batches, table, touched

NODES = 4000
GIVEN = Options((), (3, 2), batch_size=20, batches=3, together=2, seed=5, mem="64M")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Rows of 8 bytes, 512 a page; a column over several blocks."""
    degrees = np.random.default_rng(0).integers(0, 12, NODES)
    degrees[7] = 3000
    path = tmp_path_factory.mktemp("layout") / "store"
    write_store(path, make_csc(degrees, 0), range(0, NODES, 2), block_bytes=8192)
    return open_store(path)


@given(st.sets(st.integers(0, NODES - 1), max_size=60))
@settings(max_examples=30, deadline=None)
def test_extents_are_those_of_the_bytes(store, nodes):
    (served,) = served_rows(store.manifest)
    geometry = row_geometry(served.array, store.manifest.block_bytes)
    rows = np.array(sorted(nodes), np.uint32)
    found = extents_of(store, served, rows)
    blocks = {row // geometry.rows_per_block for row in nodes}
    pages = set()
    for row in nodes:
        block, place = divmod(row, geometry.rows_per_block)
        pages.add((block * geometry.slot_bytes + place * served.array.row_bytes) // PAGE_BYTES)
    assert (found.blocks, found.pages) == (len(blocks), len(pages))
    assert found.runs <= len(pages) <= found.read_bytes // PAGE_BYTES
    assert found == touched(store, rows)


def test_blocks_are_those_in_which_the_columns_of_the_frontiers_begin(store):
    (relation,), (node_type,) = store.manifest.relations, store.manifest.types
    first_node = store.first_node(relation)
    batches = list(sample_batches(store, GIVEN))
    assert len(batches) == GIVEN.batches
    for nodes, hops in batches:
        assert np.unique(nodes).size == nodes.size >= GIVEN.batch_size
        heads = {int(np.searchsorted(first_node, node, "right")) - 1 for node in nodes}
        seeds = nodes[: GIVEN.batch_size]
        assert hops[0].tolist() == sorted(
            {int(np.searchsorted(first_node, node, "right")) - 1 for node in seeds}
        )
        assert len(hops) == 2
        assert set(hops[1].tolist()) <= heads
    split = read_rows(store, node_type.splits["train"])
    stored = read_rows(store, node_type.store_id)
    assert set(batches[0][0][:20].tolist()) <= set(stored[split].tolist())


def test_too_small_a_split_is_said(store):
    with pytest.raises(ValueError, match=r"split 'train' has 2000 nodes, 4000 are asked for"):
        next(sample_batches(store, replace(GIVEN, batches=200)))


@pytest.mark.long
def test_orders_are_compared(tmp_path, capsys):
    commands = (
        ["generate", str(tmp_path / "graph"), "--nodes", "3000", "--degree", "6"],
        *(
            ["ingest", str(tmp_path / "graph"), str(tmp_path / order), "--order", order]
            for order in ("bfs", "random")
        ),
    )
    for words in commands:
        assert app([*words], standalone_mode=False) is None
    stores = [str(tmp_path / order) for order in ("bfs", "random")]
    sizes = ["--fanouts", "3", "2", "--batch-size", "20", "--batches", "4", "--together", "2"]
    capsys.readouterr()
    lines = main([*stores, *sizes, "--out", str(tmp_path / "lines")])
    assert [line["order"] for line in lines] == ["bfs", "random"]
    assert capsys.readouterr().out == table(lines) + "\n"
    assert [json.loads(t) for t in (tmp_path / "lines").read_text().splitlines()] == lines
    for line in lines:
        assert line["rows"]["min"] > 20
        assert line["graph_blocks"]["max"] <= line["all_graph_blocks"]
        assert line["row_pages"]["median"] <= line["together_row_pages"]["median"]
