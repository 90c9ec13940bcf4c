"""Labels, seeded splits, integer features and int8, against plain numpy."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blockstore.format import NodeType
from blockstore.store import Store, open_store, read_rows
from blockstore.verify import verify_store
from preprocess.errors import BadInput
from preprocess.ingest.contents import split_sizes
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.result import IngestResult
from preprocess.stages.labels import seeded_ids
from tests.effort import tries
from tests.preprocess.naive import ArraySource, Graph
from tests.preprocess.quiet import QUIET

NAN = np.nan


def made(path: Path, options: IngestOptions, **arrays: np.ndarray) -> tuple[IngestResult, Store]:
    """A store of nodes with these arrays, and one edge, in the source's order."""
    size = max(a.shape[0] for a in arrays.values())
    source = Graph().add_type("node", size, **arrays)
    source.add_relation("node", "to", "node", [(0, 0)])
    result = ingest(source, path / "store", options, QUIET)
    verify_store(path / "store")
    return result, open_store(path / "store")


def label_of(path: Path, labels: np.ndarray) -> np.ndarray:
    """Labels as stored."""
    _, store = made(path, IngestOptions(order="source"), y=labels)
    label = store.manifest.types[0].label
    assert label is not None
    return read_rows(store, label)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array([1.0, NAN, 3.0]), np.array([1, -1, 3])),
        (np.array([NAN, NAN], np.float32), np.array([-1, -1])),
        (np.array([2.0, 0.0], np.float16), np.array([2, 0])),
        (np.array([[1.0, NAN], [0.0, 1.0]]), np.array([[1, -1], [0, 1]])),
        (np.array([1.5, NAN, 3.0]), np.array([1.5, NAN, 3.0], np.float32)),
        (np.array([1.0, np.inf]), np.array([1.0, np.inf], np.float32)),
        (np.array([3, -1], np.int16), np.array([3, -1], np.int16)),
        (np.array([[True, False]] * 2), np.array([[1, 0]] * 2, np.uint8)),
    ],
)
def test_labels_become_classes_or_stay_numbers(tmp_path: Path, labels, expected):
    found = label_of(tmp_path, labels)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f")


def test_a_label_that_is_too_large(tmp_path: Path):
    with pytest.raises(BadInput, match=r"y\[1\]: found label 1e\+300"):
        label_of(tmp_path, np.array([0.5, 1e300]))


def splits_of(store: Store) -> dict[str, list[int]]:
    """Ids of each split."""
    node: NodeType = store.manifest.types[0]
    return {name: read_rows(store, array).tolist() for name, array in node.splits.items()}


@pytest.mark.parametrize(
    ("labels", "labelled"),
    [
        (np.where(np.arange(1000) % 3, np.arange(1000) % 7, -1), np.arange(1000) % 3 > 0),
        (np.where(np.arange(1000) % 5, 1.0, NAN), np.arange(1000) % 5 > 0),
        (np.where(np.arange(999) % 5, -1.5, NAN), np.arange(999) % 5 > 0),
        (np.stack([np.arange(50) % 2 - 1, np.full(50, -1)], 1), np.arange(50) % 2 > 0),
    ],
)
def test_a_seeded_split_takes_each_labelled_node_once(tmp_path: Path, labels, labelled):
    options = IngestOptions(split=(0.6, 0.2, 0.2), seed=4)
    _, store = made(tmp_path, options, y=labels)
    splits = splits_of(store)
    assert all(ids == sorted(ids) for ids in splits.values())
    assert sorted(v for ids in splits.values() for v in ids) == np.flatnonzero(labelled).tolist()
    total = int(labelled.sum())
    assert [len(ids) for ids in splits.values()][:2] == [round(0.6 * total), round(0.2 * total)]


def test_splits_follow_the_seed_not_the_memory_and_leave_given_ones(tmp_path: Path):
    y = np.arange(5000) % 4
    found = []
    for i, (seed, mem) in enumerate([(1, 1 << 30), (1, 32 << 20), (2, 1 << 30)]):
        options = IngestOptions(split=(0.5, 0.25, 0.1), seed=seed, mem_bytes=mem)
        (tmp_path / str(i)).mkdir()
        found.append(splits_of(made(tmp_path / str(i), options, y=y)[1]))
    assert found[0] == found[1] != found[2]
    assert sum(map(len, found[0].values())) == 4250
    train = np.array([7, 3])
    options = IngestOptions(split=(0.5, 0.25, 0.25))
    assert splits_of(made(tmp_path, options, y=y, train=train)[1]) == {"train": [7, 3]}


@settings(max_examples=20)
@given(
    labelled=hnp.arrays(np.bool_, st.integers(1, 200)),
    shares=st.tuples(*[st.floats(0, 0.333)] * 3).filter(any),
    key=st.integers(0, 2**64 - 1),
)
def test_split_sizes_are_the_shares(labelled, shares, key):
    total = int(labelled.sum())
    bits = np.packbits(labelled)
    seen: list[int] = []
    for share, places in zip(shares, split_sizes(shares, total), strict=True):
        ids = np.concatenate(list(seeded_ids(bits, labelled.size, total, places, key)))
        assert ids.size == places[1] - places[0]
        assert abs(ids.size - share * total) <= 3
        seen += ids.tolist()
    assert len(set(seen)) == len(seen)
    assert labelled[seen].all()


def test_dtypes_of_features(tmp_path: Path):
    arrays = {
        "x": np.arange(12).reshape(4, 3),
        "year": np.array([2001, 2002, 2003, 2004], np.int16),
        "flag": np.array([True, False, True, True]),
        "score": np.linspace(0, 1, 4),
        "tag": np.arange(4, dtype=np.uint64),
    }
    _, store = made(tmp_path, IngestOptions(dtype="float16", order="source"), **arrays)
    stored = {n: a.dtype for n, a in store.manifest.types[0].features.items()}
    assert stored == {
        "x": "float16", "year": "int16", "flag": "uint8", "score": "float16", "tag": "uint64"
    }  # fmt: skip
    for name, array in store.manifest.types[0].features.items():
        expected = arrays[name].astype(array.dtype)
        assert np.array_equal(read_rows(store, array), expected)


@settings(max_examples=tries(5, 12))
@given(
    x=hnp.arrays(
        np.float32, st.tuples(st.integers(1, 20), st.integers(1, 5)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    )
)  # fmt: skip
def test_int8_is_the_nearest_multiple_of_the_scale(tmp_path_factory, x):
    path = tmp_path_factory.mktemp("int8")
    result, store = made(path, IngestOptions(dtype="int8", order="source"), x=x)
    array = store.manifest.types[0].features["x"]
    assert array.dtype == "int8"
    scale = store.side(array.scale_path, np.float32, x.shape[1])
    assert np.array_equal(scale, np.abs(x).max(0) / np.float32(127))
    stored = read_rows(store, array)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(scale > 0, np.rint(x.astype(np.float64) / scale), 0).clip(-127, 127)
    assert np.array_equal(stored, exact)
    (report,) = result.quantization
    error = np.abs(x - stored * scale.astype(np.float64))
    assert report.path == array.path
    assert np.isclose(report.largest, error.max())
    assert np.isclose(report.rms, np.sqrt((error**2).mean()))
    assert report.largest <= scale.max() * 0.5001


def test_int8_refuses_what_has_no_scale(tmp_path: Path):
    for bad in (NAN, np.inf, -np.inf):
        x = np.ones((5, 2), np.float32)
        x[3, 1] = bad
        with pytest.raises(BadInput, match=r"x\[3, 1\]: found .*finite numbers.* for int8"):
            made(tmp_path, IngestOptions(dtype="int8", allow_nan=True), x=x)
    assert list(tmp_path.iterdir()) == []


def test_int8_is_kept_as_it_is_where_it_is_that_already(tmp_path: Path):
    x = np.arange(-8, 8, dtype=np.int8).reshape(8, 2)
    result, store = made(tmp_path, IngestOptions(dtype="int8", order="source"), x=x)
    array = store.manifest.types[0].features["x"]
    assert (array.scale_path, result.quantization) == ("", ())
    assert np.array_equal(read_rows(store, array), x)


def test_int8_does_not_show_memory_or_order(tmp_path: Path):
    rng = np.random.default_rng(3)
    rows = {"x": rng.standard_normal((3000, 200)).astype(np.float32)}
    source = ArraySource(3000, rng.integers(0, 3000, (5000, 2)), rows)
    found = set()
    for mem in (12 << 20, 1 << 30):
        options = IngestOptions(dtype="int8", mem_bytes=mem, block_bytes=4096)
        result = ingest(source, tmp_path / str(mem), options, QUIET)
        found.add((result.manifest.fingerprint, result.quantization))
    assert len(found) == 1
