"""What is said of a graph, against plain Python."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blockstore.store import open_store
from preprocess.cli.summary import (
    Bin,
    ClassCount,
    StoreSummary,
    count_values,
    degrees_of,
    graph_text,
    summarise,
    summarise_ingest,
    summary_text,
)
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.result import QuantizationError
from tests.effort import tries
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET


@given(
    hnp.arrays(
        np.int64,
        st.integers(0, 60),
        elements=st.one_of(st.integers(0, 9), st.integers(4090, 4100), st.integers(0, 2**40)),
    ),
    st.integers(1, 7),
)
def test_degrees_are_exact(degrees: np.ndarray, pieces: int):
    counts = Counter[int]()
    for piece in np.array_split(degrees, pieces):
        count_values(piece, counts)
    found, held = degrees_of(counts), sorted(degrees.tolist())
    assert counts.total() == len(held)
    if not held:
        assert found.histogram == ()
        return
    assert (found.min, found.max) == (held[0], held[-1])
    assert found.median == held[(len(held) - 1) // 2]
    assert found.p99 == held[min(len(held) - 1, len(held) * 99 // 100)]
    assert found.mean == pytest.approx(sum(held) / len(held))
    bins = Counter(d.bit_length() for d in held)
    assert [b.num_nodes for b in found.histogram] == [
        bins[b] for b in range(held[0].bit_length(), held[-1].bit_length() + 1)
    ]
    for b in found.histogram:
        assert b.num_nodes == sum(b.low <= d <= b.high for d in held)


def made(path: Path, source: Graph, **options: object) -> StoreSummary:
    """The summary of the source's store."""
    ingest(source, path, IngestOptions(block_bytes=4096, **options), QUIET)
    return summarise(open_store(path), QUIET)


PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=60)


@given(PAIRS, PAIRS, st.sampled_from(["source", "bfs", "random"]))
@settings(max_examples=tries(8, 15))
def test_isolated_nodes_have_no_edge_of_any_relation(tmp_path_factory, wrote, cites, order):
    """7 authors, 5 papers; a paper cites a paper by id modulo 5."""
    cites = [(src % 5, dst) for src, dst in cites]
    source = Graph().add_type("author", 7).add_type("paper", 5)
    source.add_relation("author", "wrote", "paper", wrote)
    source.add_relation("paper", "cites", "paper", cites)
    found = made(tmp_path_factory.mktemp("s") / "store", source, order=order)
    author, paper = found.types
    assert author.num_isolated == 7 - len({src for src, _ in wrote})
    linked = {dst for _, dst in wrote} | {node for pair in cites for node in pair}
    assert paper.num_isolated == 5 - len(linked)
    for relation, pairs in zip(found.relations, (wrote, cites), strict=True):
        degrees = Counter(dst for _, dst in pairs)
        assert relation.degrees.max == max(degrees.values(), default=0)
        assert relation.degrees.mean == pytest.approx(len(pairs) / 5)
        assert relation.num_edges == relation.num_source_edges == len(pairs)


def test_a_column_over_several_blocks_counts_once(tmp_path: Path):
    """Node 0 has 5,000 in-edges, over five blocks of 4 KiB."""
    source = Graph().add_type("node", 5001)
    source.add_relation("node", "to", "node", [(i, 0) for i in range(1, 5001)])
    (relation,) = made(tmp_path / "store", source, order="source").relations
    assert relation.degrees.histogram[0] == Bin(0, 0, 5000)
    assert relation.degrees.histogram[-1] == Bin(4096, 8191, 1)
    assert relation.degrees.max == 5000


def labels_of(path: Path, labels: np.ndarray):
    source = Graph().add_type("node", labels.shape[0], y=labels)
    source.add_relation("node", "to", "node", [(0, 0)])
    return made(path / "store", source).types[0].labels


def test_shares_of_classes(tmp_path: Path):
    found = labels_of(tmp_path, np.array([3.0, 1.0, math.nan, 3.0, 0.0, 7.0, 8.0, 9.0, math.nan]))
    assert (found.kind, found.num_labelled, found.num_classes) == ("classes", 7, 6)
    assert found.top == tuple(ClassCount(c, n) for c, n in ((3, 2), (0, 1), (1, 1), (7, 1), (8, 1)))


def test_columns_of_multi_label_rows(tmp_path: Path):
    rows = np.array([[1, 0, 1], [0, 0, 1], [math.nan] * 3, [math.nan, 1, 1]])
    found = labels_of(tmp_path, rows)
    assert (found.kind, found.num_labelled, found.num_classes) == ("multi-label", 3, 3)
    assert found.top == (ClassCount(2, 3), ClassCount(0, 1), ClassCount(1, 1))


def test_labels_that_are_numbers(tmp_path: Path):
    found = labels_of(tmp_path, np.array([0.5, math.nan, -1.5, 4.0]))
    assert (found.kind, found.num_labelled, found.top) == ("numbers", 3, ())
    assert (found.least, found.mean, found.greatest) == (-1.5, 1.0, 4.0)


def test_more_values_than_classes_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("preprocess.cli.summary._MOST_CLASSES", 3)
    found = labels_of(tmp_path, np.array([5, 6, 7, 8, -1]))
    assert (found.kind, found.num_labelled, found.mean) == ("numbers", 4, 6.5)


def test_a_page_on_what_was_made(tmp_path: Path):
    rng = np.random.default_rng(3)
    source = Graph().add_type("node", 100, x=rng.random((100, 4)), y=rng.integers(0, 3, 100) - 1)
    source.add_relation("node", "to", "node", [(i % 50, i * i % 60) for i in range(300)])
    options = IngestOptions(dtype="int8", undirected=True, split=(0.5, 0.25, 0.25))
    result = ingest(source, tmp_path / "store", options, QUIET)
    found = summarise_ingest(source, tmp_path / "store", result, QUIET)
    (error,) = found.quantization
    assert isinstance(error, QuantizationError)
    assert found.store_bytes == sum(
        p.stat().st_size for p in (tmp_path / "store").rglob("*") if p.is_file()
    )
    (t,), (relation,) = found.graph.types, found.graph.relations
    labelled = t.labels.num_labelled
    assert sum(t.splits.values()) == labelled < 100
    text = summary_text(found)
    for words in (
        "node: 100, ", " isolated", "labels: 2 classes; ", "unlabelled", "splits: train ",
        f"{relation.num_edges:,}, 300 in the source", "in-degree: min ", "of memory",
        f"nodes/node/features/x: off by {error.largest:.3g} at most",
    ):  # fmt: skip
        assert words in text
    assert text.startswith(graph_text(found.graph))


def test_labels_without_splits_are_pointed_out(tmp_path: Path):
    source = Graph().add_type("node", 2, y=np.array([0, 1])).add_type("other", 2)
    source.add_relation("node", "to", "other", [(0, 0)])
    text = graph_text(made(tmp_path / "store", source))
    assert text.count("splits: none; ingest --split 0.6,0.2,0.2 makes some") == 1
