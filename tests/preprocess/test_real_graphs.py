"""Real graphs through the commands: in, out again, and in once more."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from preprocess.sources.layouts import open_source
from preprocess.sources.source import Source, SourceRows
from tests.preprocess.export.test_export import same_files
from tests.preprocess.test_commands import good

LARGE = "coauthor-physics"  # 1.2 GB of features when dense: they stay where they are
LONG = {"am-rdf", "hetero-dblp", "kg-fb15k237", LARGE}
TWICE = {"hetero-acm", "kg-fb15k237", "deezer-hu"}
GRAPHS = {
    "am-rdf": "plain",
    "hetero-dblp": "plain-hetero",
    "hetero-acm": "plain-hetero",
    "kg-fb15k237": "plain",
    "gowalla-bipartite": "plain",
    "deezer-hu": "plain",
    LARGE: "plain",
}
_ITEMS = 1 << 22  # compared at a time


def same_graph(left: Source, right: Source) -> None:
    """Two sources give the same, array by array."""
    assert list(left.num_nodes.items()) == list(right.num_nodes.items())
    for name in left.num_nodes:
        same_arrays(left, left.features(name), right, right.features(name))
        same_arrays(left, left.splits(name), right, right.splits(name))
        labels = [[r for r in [s.label(name)] if r is not None] for s in (left, right)]
        same_arrays(left, labels[0], right, labels[1])
    for a, b in zip(left.relations, right.relations, strict=True):
        assert a[:4] == b[:4]
        for x, y in zip(left.edges(a, _ITEMS), right.edges(b, _ITEMS), strict=True):
            assert np.array_equal(np.stack(x), np.stack(y))
        same_arrays(left, left.edge_rows(a), right, right.edge_rows(b))
        same_arrays(left, left.edge_splits(a), right, right.edge_splits(b))


def same_arrays(
    left: Source, of_left: list[SourceRows], right: Source, of_right: list[SourceRows]
) -> None:
    """The same arrays in the same order."""
    for a, b in zip(of_left, of_right, strict=True):
        assert (a.name, a.dtype, a.row_shape, a.held) == (b.name, b.dtype, b.row_shape, b.held)
        count = max(1, _ITEMS // max(1, int(np.prod(a.row_shape))))
        for x, y in zip(left.rows(a, count), right.rows(b, count), strict=True):
            assert np.array_equal(x, y), a.name


def same_files_of(source: Source, folder: Path) -> None:
    """Every array that a source reads is in the folder, equal and of the same dtype."""
    for path in source.files:
        if path.suffix == ".npy":
            a, b = np.load(path), np.load(folder / path.name)
            assert a.dtype == b.dtype, path.name
            assert np.array_equal(a, b), path.name


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in GRAPHS],
)
def test_a_real_graph_goes_in_and_comes_out_equal(dataset, tmp_path: Path, name: str):
    source, back = dataset(name), tmp_path / "back"
    words = ["--mem", "128M", "--edge-ids", "--block-size", "64K"]
    words += ["--order", "source"] if name == LARGE else []
    good("ingest", source, tmp_path / "store", *words)
    good("export", tmp_path / "store", back, "--mem", "128M")
    left, right = open_source(source).source, open_source(back).source
    assert left.layout == right.layout == GRAPHS[name]
    if left.layout == "plain":
        same_files_of(left, back)
        assert {p.name for p in left.files} == {p.name for p in right.files}
    else:
        same_graph(left, right)
    if name in TWICE:
        good("ingest", back, tmp_path / "again", *words)
        same_files(tmp_path / "store", tmp_path / "again")
    shutil.rmtree(tmp_path / "store")
