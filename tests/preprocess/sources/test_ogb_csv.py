"""OGB's datasets in text: of one type, of several types, for link prediction; refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.sources.layouts import open_source
from preprocess.sources.ogb import OgbCsvSource
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    edges_of,
    round_trip,
)
from tests.preprocess.sources.ogbfiles import (
    EDGES,
    ENDS,
    SPLITS,
    arxiv,
    arxiv_graph,
    collab,
    collab_graph,
    csv,
    mag,
    mag_graph,
    names_of,
    proteins,
    proteins_graph,
    text,
)
from tests.preprocess.sources.refusals import assert_refused, cut, drop

HOMOGENEOUS = "raw/edge.csv.gz and raw/num-node-list.csv.gz"
DATASETS = [
    (arxiv, arxiv_graph, HOMOGENEOUS),
    (proteins, proteins_graph, HOMOGENEOUS),
    (collab, collab_graph, HOMOGENEOUS),
    (mag, mag_graph, "raw/triplet-type-list.csv.gz and raw/num-node-dict.csv.gz"),
]


@pytest.mark.parametrize(("write", "graph", "saw"), DATASETS)
def test_datasets_are_recognised_and_read(
    tmp_path: Path, write: Any, graph: Callable[[], ExpectedGraph], saw: str
):
    opened = open_source(write(tmp_path / "small"))
    assert (opened.source.layout, opened.saw) == ("ogb-csv", saw)
    check_source(opened.source, graph())


@pytest.mark.parametrize(("write", "graph", "saw"), DATASETS)
def test_datasets_become_stores(
    tmp_path: Path, write: Any, graph: Callable[[], ExpectedGraph], saw: str
):
    round_trip(OgbCsvSource(write(tmp_path / "small")), graph(), tmp_path)


def test_every_file_that_is_read_is_named(tmp_path: Path):
    assert names_of(OgbCsvSource(arxiv(tmp_path)), tmp_path) == [
        "RELEASE_v1.txt", "raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz",
        "raw/node_year.csv.gz", "raw/num-edge-list.csv.gz", "raw/num-node-list.csv.gz",
        "split/time/test.csv.gz", "split/time/train.csv.gz", "split/time/valid.csv.gz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "undirected"),
    [
        ("ogbn_arxiv", False), ("ogbn_products", True), ("ogbn_proteins_pyg", True),
        ("products", True), ("ogbn-products", True), ("ogbl_ppa", True), ("ppassoc", True),
        ("ogbl_collab_dgl", True), ("ogbl_ddi", True), ("ogbl_citation2", False),
        ("byproducts", False), ("mag", False),
    ],
)  # fmt: skip
def test_inverse_edges_are_added_where_ogb_adds_them(tmp_path: Path, name: str, undirected: bool):
    assert OgbCsvSource(arxiv(tmp_path / name)).undirected is undirected


def test_a_renamed_folder_is_known_by_its_notes(tmp_path: Path):
    assert OgbCsvSource(proteins(tmp_path / "mine")).undirected


def test_without_labels_features_and_splits(tmp_path: Path):
    for name, edges in (("num-node-list", [2]), ("num-edge-list", [1]), ("edge", [(1, 0)])):
        csv(tmp_path / f"raw/{name}.csv.gz", edges)
    relations = {ENDS: ExpectedRelation([[1], [0]])}
    check_source(OgbCsvSource(tmp_path), ExpectedGraph({"node": ExpectedType(2)}, relations))


def test_no_edges_need_no_text(tmp_path: Path):
    csv(tmp_path / "raw/num-node-list.csv.gz", [2])
    csv(tmp_path / "raw/num-edge-list.csv.gz", [0])
    csv(tmp_path / "raw/edge.csv.gz", [])
    source = OgbCsvSource(tmp_path)
    assert edges_of(source, source.relations[0]).shape == (2, 0)


def test_nodes_without_a_label_are_nan(tmp_path: Path):
    csv(arxiv(tmp_path) / "raw/node-label.csv.gz", [4.0, float("nan"), 2.0, float("nan"), 4.0])
    expected = arxiv_graph()
    expected.types["node"].label = [4, np.nan, 2, np.nan, 4]
    check_source(OgbCsvSource(tmp_path), expected)


def test_columns_of_pairs(tmp_path: Path):
    """As ogbl_citation2; ogbl_wikikg2 calls them head and tail."""
    for names in (("source_node", "target_node"), ("head", "tail")):
        folder = collab(tmp_path / names[0])
        for split in SPLITS:
            one = {n: torch.tensor(v) for n, v in zip(names, ([0, 4], [1, 4]), strict=True)}
            one |= {"target_node_neg": torch.zeros(2, 7, dtype=torch.long)}
            torch.save(one, folder / f"split/time/{split}.pt")
        expected = collab_graph()
        expected.relations[ENDS].splits = {s: [[0, 1], [4, 4]] for s in SPLITS}
        check_source(OgbCsvSource(folder), expected)


def test_lists_by_type_in_one_file(tmp_path: Path):
    split = mag(tmp_path) / "split/time"
    lists = {
        "train": {"paper": [2]},
        "valid": {"paper": [0], "author": [1]},
        "test": {"paper": [3]},
    }
    held = {s: {t: torch.tensor(ids) for t, ids in v.items()} for s, v in lists.items()}
    torch.save(held, split / "split_dict.pt")
    expected = mag_graph()
    expected.types["paper"].splits = {"train": [2], "valid": [0], "test": [3]}
    expected.types["author"].splits = {"valid": [1]}
    check_source(OgbCsvSource(tmp_path), expected)


def test_pairs_of_many_relations_are_left_out(tmp_path: Path):
    """As ogbl_biokg."""
    folder = mag(tmp_path)
    for split in SPLITS:
        ids = torch.tensor([0])
        one = {"head_type": ["paper"], "head": ids, "relation": ids, "tail": ids}
        torch.save(one, folder / f"split/time/{split}.pt")
    expected = mag_graph()
    expected.types["paper"].splits = {}
    check_source(OgbCsvSource(folder), expected)


@settings(max_examples=20)
@given(
    num_nodes=st.integers(1, 30), num_edges=st.integers(1, 40), width=st.integers(1, 4),
    floats=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_graph_is_read_as_written(tmp_path_factory, num_nodes, num_edges, width, floats, seed):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("any")
    edges = rng.integers(0, num_nodes, (2, num_edges))
    features = rng.integers(-5, 5, (num_nodes, width))
    rows = features.astype(np.float32) / 4 if floats else features
    csv(folder / "raw/edge.csv.gz", edges.T)
    csv(folder / "raw/num-node-list.csv.gz", [num_nodes])
    csv(folder / "raw/num-edge-list.csv.gz", [num_edges])
    csv(folder / "raw/node-feat.csv.gz", rows)
    node = ExpectedType(num_nodes, {"x": rows})
    expected = ExpectedGraph({"node": node}, {ENDS: ExpectedRelation(edges)})
    check_source(OgbCsvSource(folder), expected)


def put(name: str, rows: Any, header: Any = ()) -> Any:
    """A spoiler that replaces a table."""
    return lambda folder: csv(folder / name, rows, header)


def raw(name: str, content: str) -> Any:
    """A spoiler that replaces a packed text."""
    return lambda folder: text(folder / name, content)


def held(name: str, value: Any) -> Any:
    """A spoiler that replaces a file of torch."""
    return lambda folder: torch.save(value, folder / name)


EDGE, FEAT, LABEL = "raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz"
NODES, COUNT, TRAIN = "raw/num-node-list.csv.gz", "raw/num-edge-list.csv.gz", "split/time/train"
REFUSED = {
    "no folder": (lambda f: (f / "raw").rename(f / "row"), "found no folder raw"),
    "no edges": (drop(EDGE), "raw/edge.csv.gz: found no file: it is missing"),
    "no number of nodes": (drop(NODES), "num-node-list.csv.gz: found no file: it is missing"),
    "no number of edges": (drop(COUNT), "num-edge-list.csv.gz: found no file: it is missing"),
    "no split": (drop(f"{TRAIN}.csv.gz"), "train.csv.gz: found no file: it is missing"),
    "several graphs": (put(NODES, [3, 2]), "num-node-list.csv.gz: found several rows, a graph"),
    "several counts": (put(COUNT, [3, 2]), "num-edge-list.csv.gz: found several rows, a graph ea"),
    "no count": (raw(NODES, ""), "num-node-list.csv.gz: found an empty file"),
    "no nodes": (put(NODES, [0]), "found a graph with no nodes"),
    "a count of text": (put(NODES, ["five"]), "num-node-list.csv.gz:1: found 'five' in column"),
    "nodes below zero": (put(NODES, [-5]), "num-node-list.csv.gz:1: found -5, expected at least 0"),
    "more edges": (put(COUNT, [4]), "edge.csv.gz:5: found one more row, expected 4, as num-edge-l"),
    "fewer edges": (put(COUNT, [6]), "edge.csv.gz: end: found 5 rows, expected 6, as num-edge-lis"),
    "fewer nodes": (put(NODES, [6]), "node-feat.csv.gz: end: found 5 rows, expected 6"),
    "more nodes": (put(NODES, [4]), "node-feat.csv.gz:5: found one more row, expected 4"),
    "few features": (put(FEAT, [(0.5, 1.0)] * 4), "node-feat.csv.gz: end: found 4 rows, expecte"),
    "id too large": (
        raw(EDGE, "0,1\n\n4,5\n0,0\n0,0\n0,0\n"), "edge.csv.gz:3: found node id 5, expected 0 to 4",
    ),
    "id below zero": (put(EDGE, [(0, 1)] * 4 + [(-1, 0)]), "edge.csv.gz:5: found node id -1"),
    "edges with a header": (put(EDGE, [(0, 1)] * 4, ["src", "dst"]), "edge.csv.gz:1: found 'src'"),
    "edges of floats": (put(EDGE, [(0.0, 1.5)] * 5), "edge.csv.gz:1: found '0.0' in column"),
    "one column": (put(EDGE, [0] * 5), "edge.csv.gz:1: found 1 columns, expected 2"),
    "ragged": (raw(FEAT, "1.0,2.0\n1.0\n"), "node-feat.csv.gz:2: found 1 columns"),
    "truncated": (cut(EDGE, 9), "edge.csv.gz: found "),
    "not packed": (lambda f: (f / EDGE).write_text("0,1\n" * 5), "edge.csv.gz: found "),
    "no number": (
        put(FEAT, [(0.5, 1.0), (0.5, 1.0), (0.5, "one")]), "node-feat.csv.gz:3: found 'one' in",
    ),
    "features of text": (put(FEAT, [("a", "b")] * 5), "node-feat.csv.gz:1: found 'a' in col"),
    "label of text": (put(LABEL, [1, 2, "cs.AI", 3, 4]), "node-label.csv.gz:3: found 'cs.AI' in"),
    "year of text": (put("raw/node_year.csv.gz", ["y"] * 5), "node_year.csv.gz:1: found 'y'"),
    "two arrays": (put("raw/node_x.csv.gz", [1] * 5), "node_x.csv.gz: found array 'x' again"),
    "seed too large": (put(f"{TRAIN}.csv.gz", [3, 5]), "train.csv.gz:2: found node id 5, expected"),
    "seed of text": (put(f"{TRAIN}.csv.gz", ["a"]), "train.csv.gz:1: found 'a' in column"),
    "two columns": (put(f"{TRAIN}.csv.gz", [(1, 2)]), "train.csv.gz:1: found 2 columns, expect"),
    "overlap": (put(f"{TRAIN}.csv.gz", [3, 4]), "valid.csv.gz[0]: found node 4, which is in train"),
    "two splits": (
        lambda f: (f / "split/random").mkdir(), "split: found splits random and time, expected one",
    ),
    "split of another type": (
        lambda f: (f / "split/time/paper").mkdir(), "time/paper: found a split of type 'paper'",
    ),
    "pickled": (held("split/time/split_dict.pt", Path("a")), "split_dict.pt: found "),
    "no dictionary": (held("split/time/split_dict.pt", [1]), "split_dict.pt: found a list"),
    "no test split": (
        held("split/time/split_dict.pt", {"train": torch.tensor([1]), "valid": torch.tensor([2])}),
        "split_dict.pt: found no 'test', expected a dictionary of train, valid, test",
    ),
    "split of floats": (
        held("split/time/split_dict.pt", {"train": torch.ones(2)}),
        "split_dict.pt: train: found shape (2,) of float32, expected (n,) of integers",
    ),
    "a number": (
        held("split/time/split_dict.pt", {"train": torch.tensor(2)}),
        "split_dict.pt: train: found one number",
    ),
    "a list": (held("split/time/split_dict.pt", {"train": [1]}), "split_dict.pt: train: found a "),
    "large id": (
        held("split/time/split_dict.pt", {s: torch.tensor([9]) for s in SPLITS}),
        "split_dict.pt: train[0]: found node id 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED[name]
    spoiler(arxiv(tmp_path))
    assert_refused(tmp_path, lambda: OgbCsvSource(tmp_path), words)


CITED = "raw/relations/paper___cites___paper"
TRIPLES = "raw/triplet-type-list.csv.gz"
TYPES = "raw/num-node-dict.csv.gz"
REFUSED_TYPES = {
    "no types": (drop(TYPES), "num-node-dict.csv.gz: found no file: it is missing"),
    "no relations": (drop(TRIPLES), "triplet-type-list.csv.gz: found no file: it is missing"),
    "type twice": (
        put(TYPES, [(3, 4, 4)], ["author", "paper", "paper"]),
        "num-node-dict.csv.gz: found two columns 'paper'",
    ),
    "several graphs": (
        put(TYPES, [(3, 0, 4)] * 2, ["author", "field", "paper"]),
        "num-node-dict.csv.gz: found several rows, a graph each",
    ),
    "types alone": (raw(TYPES, "author,field,paper\n"), "num-node-dict.csv.gz: found no numbers"),
    "unknown type": (
        put(TRIPLES, [("paper", "cites", "paper"), ("paper", "in", "journal")]),
        "triplet-type-list.csv.gz:2: found node type 'journal', expected one of author, field, pap",
    ),
    "relation twice": (
        put(TRIPLES, [("paper", "cites", "paper")] * 2),
        "triplet-type-list.csv.gz:2: found relation paper,cites,paper again",
    ),
    "unknown relation": (
        put(TRIPLES, [("paper", "likes", "paper")]),
        "paper___likes___paper/num-edge-list.csv.gz: found no file: it is missing",
    ),
    "two columns": (put(TRIPLES, [("a", "b")]), "triplet-type-list.csv.gz:1: found 2 columns"),
    "no edges": (drop(f"{CITED}/edge.csv.gz"), "paper/edge.csv.gz: found no file: it is missing"),
    "id of another type": (
        put("raw/relations/author___writes___paper/edge.csv.gz", [(2, 0), (3, 3), (1, 3)]),
        "author___writes___paper/edge.csv.gz:2: found node id 3, expected 0 to 2",
    ),
    "few rows": (
        put(f"{CITED}/edge_reltype.csv.gz", [1]), "edge_reltype.csv.gz: end: found 1 rows",
    ),
    "label said but missing": (
        drop("raw/node-label/paper/node-label.csv.gz"), "node-label.csv.gz: found no file: it is",
    ),
    "label of an unknown type": (
        put("raw/nodetype-has-label.csv.gz", [(True,)], ["journal"]),
        "nodetype-has-label.csv.gz: header: found node type 'journal'",
    ),
    "no truth": (
        put("raw/nodetype-has-label.csv.gz", [("maybe",)], ["paper"]),
        "nodetype-has-label.csv.gz:2: found 'maybe' in column 'paper'",
    ),
    "two truths": (
        put("raw/nodetype-has-label.csv.gz", [(True,)] * 2, ["paper"]),
        "nodetype-has-label.csv.gz: found another number of rows",
    ),
    "split said but missing": (
        drop("split/time/paper/test.csv.gz"), "paper/test.csv.gz: found no file: it is missing",
    ),
    "a tensor without a type": (
        held("split/time/split_dict.pt", {"train": torch.tensor([1])}),
        "split_dict.pt: train: found a Tensor, expected a dictionary by type",
    ),
    "list of an unknown type": (
        held("split/time/split_dict.pt", {"train": {"journal": torch.tensor([1])}}),
        "split_dict.pt: train: found a dictionary of journal, expected types of nodes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_what_is_refused_of_several_types_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED_TYPES[name]
    spoiler(mag(tmp_path))
    assert_refused(tmp_path, lambda: OgbCsvSource(tmp_path), words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"edge": torch.ones(3, 2)},
            "train.pt: edge: found shape (3, 2) of float32, expected (n, 2",
        ),
        (
            {"edge": torch.ones(2, 3, dtype=torch.long)},
            "train.pt: edge: found shape (2, 3) of int64",
        ),
        ({"edge": torch.tensor([[0, 1], [1, 5]])}, "train.pt: edge[1]: found 5, expected 0 to 4"),
        ({"edge": [[0, 1]]}, "train.pt: edge: found a list, expected a tensor"),
        ({"pairs": torch.ones(2)}, "train.pt: found a dictionary of pairs, expected"),
        (torch.ones(2), "train.pt: found a Tensor, expected"),
        (
            {"head": torch.tensor([1]), "tail": torch.tensor([1, 2])},
            "train.pt: tail: found 2 rows, expected 1 as in head",
        ),
    ],
)
def test_pairs_that_are_refused(tmp_path: Path, value: Any, words: str):
    torch.save(value, collab(tmp_path) / "split/time/train.pt")
    assert_refused(tmp_path, lambda: OgbCsvSource(tmp_path), words)


def test_a_missing_file_of_pairs(tmp_path: Path):
    (collab(tmp_path) / "split/time/test.pt").unlink()
    words = "test.pt: found no file: it is missing"
    assert_refused(tmp_path, lambda: OgbCsvSource(tmp_path), words)


def test_edges_stand_in_the_order_of_the_file(tmp_path: Path):
    source = OgbCsvSource(arxiv(tmp_path))
    assert np.array_equal(edges_of(source, source.relations[0]), EDGES)
