"""IGB: as its owner lays it out, small; files without a header, as long as published; refusals."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.store import open_store, read_rows
from preprocess.files.npy import RawFile
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.igb import SIZES, Headerless, Igb2kSource, IgbSource, _label_array
from preprocess.sources.layouts import open_source
from preprocess.sources.source import Source
from tests.preprocess.quiet import QUIET
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
    rows_of,
)
from tests.preprocess.sources.refusals import Spoiler, assert_refused, drop, moved, save

NUM_NODES = {"paper": 6, "author": 4, "institute": 2, "fos": 3, "journal": 2, "conference": 1}
EDGES = {
    "paper__cites__paper": [[0, 1], [5, 0], [5, 5], [0, 1], [2, 4]],
    "paper__written_by__author": [[0, 3], [5, 0], [1, 1]],
    "author__affiliated_to__institute": [[3, 1], [0, 0]],
    "paper__topic__fos": [[4, 2], [4, 0], [0, 1]],
    "paper__published__journal": [[1, 1]],
    "paper__venue__conference": [[2, 0], [3, 0]],
}
CITES = "paper__cites__paper"
LABELS = {"19": [18, 0, 3, 7, 0, 1], "2K": [2982, 14, 10, 0, 0, 0]}
TINY_FULL = {"full": Headerless({"paper": 6, "author": 4}, {"19": 5, "2K": 3})}
UNLABELLED = {"19": [18, 0, 3, 7, 0, -1], "2K": [2982, 14, 10, -1, -1, -1]}
RESHAPED = {"19": np.array(LABELS["19"], np.float32), "2K": np.array(LABELS["2K"], np.int64)}
FEATURES = {
    name: (np.arange(n * 1024, dtype=np.float32).reshape(n, 1024) / 8 - n)
    for name, n in NUM_NODES.items()
}


def write_graph(root: Path, size: str, *, hetero: bool, header: bool) -> Path:
    """Six papers; beside them five other types, as IGBH has since `large`."""
    held = root / size / "processed"
    relations = EDGES if hetero else {CITES: EDGES[CITES]}
    for name, edges in relations.items():
        (held / name).mkdir(parents=True)
        np.save(held / name / "edge_index.npy", np.array(edges, np.int64))
    for name in NUM_NODES if hetero else ["paper"]:
        (held / name).mkdir()
        np.save(held / name / f"{name}_id_index_mapping.npy", np.arange(3))
        has_header = header or name not in ("paper", "author")
        put(held / name / "node_feat.npy", FEATURES[name], header=has_header)
    for classes, labels in LABELS.items():
        path = held / "paper" / f"node_label_{classes}.npy"
        put(path, np.array(labels, np.float32), header=header)
    return root / size


def put(path: Path, array: np.ndarray, *, header: bool) -> None:
    """As numpy saves it, or as np.memmap leaves it."""
    if header:
        np.save(path, array)
    else:
        array.tofile(path)


def expected(*, hetero: bool, labels: Any = LABELS, first: str = "19") -> ExpectedGraph:
    relations = EDGES if hetero else {CITES: EDGES[CITES]}
    types = {
        name: ExpectedType(NUM_NODES[name], {"x": FEATURES[name]})
        for name in (NUM_NODES if hetero else ["paper"])
    }
    second = "2K" if first == "19" else "19"
    types["paper"].features[f"label_{second}"] = np.array(labels[second])
    types["paper"].label = np.array(labels[first])
    return ExpectedGraph(
        types,
        {
            (s, r, d): ExpectedRelation(np.array(edges).T)
            for name, edges in relations.items()
            for s, r, d in [name.split("__")]
        },
    )


@pytest.mark.parametrize("hetero", [False, True])
def test_a_graph_is_read_and_becomes_a_store(tmp_path: Path, hetero: bool):
    opened = open_source(write_graph(tmp_path, "small", hetero=hetero, header=True))
    assert type(opened.source) is IgbSource
    more = " and 5 more relations" if hetero else ""
    assert opened.saw == f"processed/{CITES}{more}"
    check_source(opened.source, expected(hetero=hetero))
    round_trip(opened.source, expected(hetero=hetero), tmp_path)


@pytest.mark.parametrize(
    ("name", "hetero"),
    [
        ("full", False),
        ("igb-heterogeneous-full", True),
        ("igb_full", False),
        *(
            pytest.param(name, hetero, marks=pytest.mark.long)
            for name, hetero in (
                ("full", True), ("igb-heterogeneous-full", False), ("igb_full", True),
            )
        ),
    ],
)  # fmt: skip
def test_files_without_a_header(tmp_path: Path, hetero: bool, name: str):
    folder = write_graph(tmp_path, name, hetero=hetero, header=False)
    source = IgbSource(folder, TINY_FULL)
    graph = expected(hetero=hetero, labels=UNLABELLED)
    check_source(source, graph)
    round_trip(source, graph, tmp_path)


def test_of_full_only_the_labelled_papers_are_split(tmp_path: Path):
    source = Igb2kSource(write_graph(tmp_path, "full", hetero=False, header=False), TINY_FULL)
    options = IngestOptions(mem_bytes=256 << 20, split=(0.6, 0.2, 0.2))
    (paper,) = ingest(source, tmp_path / "store", options, QUIET).manifest.types
    store = open_store(tmp_path / "store")
    ids = [read_rows(store, split).tolist() for split in paper.splits.values()]
    assert sorted(chain(*ids)) == [0, 1, 2]


def test_files_of_large_that_were_saved_again_with_a_header(tmp_path: Path):
    folder = write_graph(tmp_path, "large", hetero=True, header=True)
    check_source(open_source(folder).source, expected(hetero=True))


def test_labels_that_end_with_the_labelled_papers(tmp_path: Path):
    folder = write_graph(tmp_path, "full", hetero=False, header=False)
    np.array(LABELS["2K"][:3], np.float32).tofile(folder / "processed/paper/node_label_2K.npy")
    graph = expected(hetero=False, labels=UNLABELLED)
    check_source(IgbSource(folder, TINY_FULL), graph)
    np.save(folder / "processed/paper/node_label_19.npy", np.array(LABELS["19"][:5], np.float32))
    check_source(IgbSource(folder, TINY_FULL), graph)


def test_the_other_classes_by_name(tmp_path: Path):
    folder = write_graph(tmp_path, "medium", hetero=False, header=True)
    source = open_source(folder, "igb-2k").source
    assert type(source) is Igb2kSource
    check_source(source, expected(hetero=False, first="2K"))


def test_one_kind_of_labels_is_enough(tmp_path: Path):
    folder = write_graph(tmp_path, "tiny", hetero=False, header=True)
    (folder / "processed/paper/node_label_2K.npy").unlink()
    source = IgbSource(folder)
    assert [rows.name for rows in source.features("paper")] == ["x"]
    assert source.label("paper") is not None
    assert_refused(folder, lambda: Igb2kSource(folder), "node_label_2K.npy: found no file")


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.float16])
def test_labels_and_edges_of_other_dtypes_and_orders(tmp_path: Path, dtype: Any):
    folder = write_graph(tmp_path, "tiny", hetero=False, header=True)
    held = folder / "processed"
    np.save(held / "paper/node_label_19.npy", np.array(LABELS["19"], dtype))
    np.save(held / CITES / "edge_index.npy", np.asfortranarray(np.array(EDGES[CITES], np.int32)))
    check_source(IgbSource(folder), expected(hetero=False))


def test_the_folder_above_or_below_is_taken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_graph(tmp_path, "full", hetero=False, header=False)
    graph = expected(hetero=False, labels=UNLABELLED)
    assert IgbSource.recognise(tmp_path) == f"full/processed/{CITES}"
    for path in (tmp_path, folder / "processed"):
        check_source(IgbSource(path, TINY_FULL), graph)
    monkeypatch.chdir(folder)
    check_source(IgbSource(Path(), TINY_FULL), graph)


def test_of_several_sizes_one_is_to_be_named(tmp_path: Path):
    for size in ("tiny", "small"):
        write_graph(tmp_path, size, hetero=False, header=True)
    assert_refused(tmp_path, lambda: open_source(tmp_path).source, "several graphs: small, tiny")


@pytest.mark.parametrize("size", ["large", "full"])
def test_published_sizes(tmp_path: Path, size: str):
    """Files as long as the owner's, all holes: what is said of them, and their first rows."""
    folder = write_graph(tmp_path, size, hetero=True, header=False)
    num_nodes = SIZES[size].num_nodes
    for name, count in num_nodes.items():
        resize(folder / "processed" / name / "node_feat.npy", 4096 * count)
    for classes in LABELS:
        resize(folder / f"processed/paper/node_label_{classes}.npy", 4 * num_nodes["paper"])
    source = open_source(folder).source
    assert source.num_nodes == {**NUM_NODES, **num_nodes}
    x, other = source.features("paper")
    label = source.label("paper")
    assert label is not None
    assert x.num_rows == other.num_rows == label.num_rows == num_nodes["paper"]
    first = next(source.rows(x, 3))
    assert (first.shape, first.dtype) == ((3, 1024), np.float32)
    assert np.array_equal(first, FEATURES["paper"][:3])
    assert next(source.rows(label, 4)).tolist() == LABELS["19"][:4]


def resize(path: Path, num_bytes: int) -> None:
    """A file of that length."""
    with path.open("r+b") as file:
        file.truncate(num_bytes)


@given(
    values=st.lists(st.integers(-1, 2982) | st.just(np.nan), min_size=1, max_size=20),
    labelled=st.integers(0, 20),
    count=st.integers(1, 25),
)
def test_labels_against_plain_python(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], labelled: int, count: int
):
    path = tmp_path_factory.mktemp("labels") / "node_label_19.npy"
    np.array(values, np.float32).tofile(path)
    num = len(values)
    labels = _label_array("a", RawFile(path, np.float32, (num,)), num, min(labelled, num))
    pieces = [piece.tolist() for piece in labels.pieces(count)]
    assert all(0 < len(piece) <= count for piece in pieces)
    assert list(chain(*pieces)) == [
        int(v) if i < labelled and v == v else -1 for i, v in enumerate(values)
    ]


def resized(name: str, difference: int) -> Spoiler:
    """A spoiler that makes a file longer or shorter."""
    return lambda held: resize(held / name, (held / name).stat().st_size + difference)


def wrong_label(name: str, value: float) -> Spoiler:
    def spoil(held: Path) -> None:
        labels = np.fromfile(held / name, np.float32)
        labels[2] = value
        labels.tofile(held / name)

    return spoil


X, AUTHORS, FOS = "paper/node_feat.npy", "author/node_feat.npy", "fos/node_feat.npy"
L19, L2K = "paper/node_label_19.npy", "paper/node_label_2K.npy"
CITED, WRITTEN = f"{CITES}/edge_index.npy", "paper__written_by__author/edge_index.npy"
REFUSED: dict[str, tuple[Spoiler, str]] = {
    "no edges": (drop(CITED), f"{CITED}: found no file"),
    "no features": (drop(X), f"{X}: found no file"),
    "no labels": (drop(L19), f"{L19}: found no file"),
    "no authors": (moved("author", "writer"), "written_by__author: found a relation of node type"),
    "no features of authors": (drop(AUTHORS), f"{AUTHORS}: found no file"),
    "unknown type": (moved(CITES, "paper__in__book"), "found no processed/paper__cites__paper"),
    "another type": (
        moved("paper__topic__fos", "paper__in__book"),
        "paper__in__book: found a relation of node type 'book', expected a folder processed/book",
    ),
    "two names": (moved("paper__topic__fos", "paper__fos"), "paper__fos: found 2 names"),
    "features too short": (
        resized(X, -4), f"{X}: end: found 24572 bytes, expected 24576 for shape (6, 1024)",
    ),
    "features too long": (resized(X, 1), f"{X}: end: found 24577 bytes, expected 24576"),
    "authors too short": (resized(AUTHORS, -4096), f"{AUTHORS}: end: found 12288 bytes"),
    "labels too short": (resized(L19, -8), f"{L19}: end: found 16 bytes, expected 24"),
    "labels too long": (resized(L2K, 4), f"{L2K}: end: found 28 bytes, expected 24"),
    "no header where one is": (
        lambda held: FEATURES["fos"].tofile(held / FOS),
        f"{FOS}: header: found none, in a folder full, expected one; save it again",
    ),
    "truncated features": (resized(FOS, -1), f"{FOS}: end: found "),
    "truncated edges": (resized(CITED, -1), f"{CITED}: end: found "),
    "edges of rows": (save(CITED, np.zeros((2, 5), int)), "(2, 5) of int64, expected (edges"),
    "edges of floats": (save(CITED, np.zeros((5, 2))), f"{CITED}: header: found shape (5, 2)"),
    "id too large": (save(CITED, [[0, 1], [5, 6]]), f"{CITED}[1, 1]: found node id 6"),
    "id below zero": (save(CITED, [[0, 1], [-1, 0]]), f"{CITED}[1, 0]: found node id -1"),
    "no such author": (save(WRITTEN, [[5, 4]]), f"{WRITTEN}[0, 1]: found node id 4, expected 0 "),
    "one column": (save(FOS, np.zeros(3)), f"{FOS}: header: found shape (3,)"),
    "Fortran order": (save(FOS, np.asfortranarray(FEATURES["fos"])), "Fortran order"),
    "complex": (save(FOS, np.zeros((3, 2), complex)), f"{FOS}: header: found shape (3, 2) of c"),
    "text": (save(FOS, np.array([["a"]] * 3)), f"{FOS}: found items of <U1"),
    "label rows": (save(L19, np.zeros(7)), f"{L19}: header: found 7 rows, expected 6"),
    "label columns": (save(L19, np.zeros((6, 2))), f"{L19}: header: found shape (6, 2)"),
    "half a label": (wrong_label(L19, 0.5), f"{L19}[2]: found label 0.5, expected a class"),
    "a label below": (wrong_label(L2K, -2), f"{L2K}[2]: found label -2.0, expected a class"),
    "an infinite label": (wrong_label(L2K, np.inf), f"{L2K}[2]: found label inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED[name]
    folder = write_graph(tmp_path, "full", hetero=True, header=False)
    spoiler(folder / "processed")
    assert_refused(folder, lambda: IgbSource(folder, TINY_FULL), words)


def test_without_a_header_the_folder_says_the_size(tmp_path: Path):
    folder = write_graph(tmp_path, "IGBH", hetero=False, header=False)
    words = "node_feat.npy: header: found none, in a folder IGBH, expected one, or large or full as"
    assert_refused(folder, lambda: open_source(folder).source, words)


def test_the_size_of_a_whole_file_is_exact(tmp_path: Path):
    folder = write_graph(tmp_path, "large", hetero=False, header=False)

    def attempt() -> Source:
        return open_source(folder).source

    resize(folder / "processed" / X, 4096 * 10**8 - 4096)
    assert_refused(folder, attempt, "found 409599995904 bytes, expected 409600000000")
    resize(folder / "processed" / X, 4096 * 10**8)
    assert_refused(folder, attempt, f"{L19}: end: found 24 bytes, expected 400000000")


def test_rows_are_whole_in_any_pieces(tmp_path: Path):
    source = IgbSource(write_graph(tmp_path, "full", hetero=True, header=False), TINY_FULL)
    (authors,) = source.features("author")
    assert np.array_equal(rows_of(source, authors), FEATURES["author"])
