"""Rows in another order against indexing; conversion to narrow floats; what is refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blockstore.format import RowArray
from preprocess.errors import BadInput
from preprocess.kernels.rows import densify, group_places
from preprocess.stages.edge_places import rows_by_id
from preprocess.stages.rows import checked_features, convert, place_rows
from tests.preprocess.naive import ArraySource
from tests.preprocess.quiet import QUIET


def place(rows, rank, share: int, work: Path, chunk: int):
    """What `place_rows` gives, in one piece."""
    array = RowArray("x", rows.dtype.name, rows.shape[0], rows.shape[1:])
    pieces = (rows[i : i + chunk].copy() for i in range(0, rows.shape[0], chunk))
    found = []
    place_rows(pieces, array, rank, share, work, lambda r: found.append(r.copy()), QUIET)
    assert list(work.iterdir()) == []
    return np.concatenate(found)


@given(
    num_rows=st.integers(1, 60),
    shape=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from(["float32", "uint16", "int64"]),
    share=st.sampled_from([1, 300, 1 << 20]),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_rows_go_to_their_places(tmp_path_factory, num_rows, shape, dtype, share, chunk, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1000, (num_rows, *shape)).astype(dtype)
    rank = rng.permutation(num_rows).astype(rng.choice(["uint32", "uint64"]))
    expected = np.empty_like(rows)
    expected[rank] = rows
    work = tmp_path_factory.mktemp("work")
    assert np.array_equal(place(rows, rank, share, work, chunk), expected)
    assert np.array_equal(place(rows, None, share, work, chunk), rows)


@given(places=hnp.arrays(np.uint32, st.integers(0, 50), elements=st.integers(0, 39)))
def test_groups_keep_the_order(places):
    starts, order = np.empty(5, np.int64), np.empty(places.size, np.int64)
    group_places(places, 10, starts, order)
    assert order.tolist() == sorted(range(places.size), key=lambda i: (places[i] // 10, i))
    assert np.diff(starts).tolist() == np.bincount(places // 10, minlength=4).tolist()


@given(bits=hnp.arrays(np.uint32, 20))
def test_bfloat16_is_the_nearest_ties_to_even(bits):
    values = bits.view(np.float32)
    got = convert(values, "bfloat16")
    for value, found in zip(values, got, strict=True):
        back = np.array(int(found) << 16, np.uint32).view(np.float32)
        if np.isnan(value):
            assert np.isnan(back)
            continue
        low = int(np.array(value).view(np.uint32)) >> 16  # towards zero; the other one is next
        near = [np.array(b << 16, np.uint32).view(np.float32) for b in (low, low + 1)]
        if not np.isfinite(near[1]):
            continue  # rounds to infinity or stays below: either is one of the two
        distance = [abs(np.float64(value) - np.float64(n)) for n in near]
        best = low + int(distance[1] < distance[0] or (distance[0] == distance[1] and low & 1))
        assert int(found) == best


def features(rows, dtype="float32", allow_nan=False):
    """All of `checked_features`."""
    source = ArraySource(len(rows), [], {"x": rows})
    (facts,) = source.features("node")
    pieces = checked_features(source, facts, dtype, allow_nan, 1)
    return np.concatenate([piece.copy() for piece in pieces])


def test_nan_is_refused_by_row_or_kept():
    rows = np.ones((5, 3), np.float32)
    rows[3, 1] = np.nan
    with pytest.raises(BadInput, match=r"x\[3\]: found NaN, expected numbers; --allow-nan"):
        features(rows)
    assert np.array_equal(features(rows, allow_nan=True), rows, equal_nan=True)


def test_a_number_that_float16_cannot_hold_is_refused():
    rows = np.ones((4, 2))
    rows[2, 0] = -70000
    with pytest.raises(BadInput, match=r"x\[2, 0\]: found -70000, expected less than 65520"):
        features(rows, "float16")
    rows[2, 0] = -np.inf
    assert features(rows, "float16")[2, 0] == -np.inf
    rows[2, 0] = 65519  # rounds to the largest
    assert features(rows, "float16")[2, 0] == 65504


@pytest.mark.parametrize("dtype", ["int16", "bool", "float64", "uint8"])
def test_features_of_any_numbers(dtype: str):
    rows = (np.arange(12).reshape(4, 3) % 2).astype(dtype)
    assert np.array_equal(features(rows), rows.astype(np.float32))


@given(
    dense=hnp.arrays(np.uint32, st.tuples(st.integers(1, 6), st.integers(1, 5)),
                     elements=st.integers(0, 3)),
    offset=st.integers(0, 9),
)  # fmt: skip
def test_densify_undoes_sparse(dense, offset):
    rows, columns = np.nonzero(dense)
    indptr = offset + np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    out = np.full_like(dense, 9)
    densify(indptr, columns, dense[rows, columns], out)
    assert np.array_equal(out, dense)


@given(
    num_ids=st.integers(0, 60),
    share=st.sampled_from([1, 100, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_rows_come_back_by_id(tmp_path_factory, num_ids, share, seed):
    """Some ids are missing (dropped edges), some are beyond the list (added reverses)."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(2 * num_ids)[: rng.integers(0, 2 * num_ids + 1)]
    numbers, rows = rng.integers(0, 100, ids.size), rng.random((ids.size, 3))
    work = tmp_path_factory.mktemp("work")
    pieces = (
        (ids[i : i + 7].astype("uint32"), (numbers[i : i + 7], rows[i : i + 7]))
        for i in range(0, ids.size, 7)
    )
    parts = [(np.dtype("uint16"), 1), (np.dtype("float64"), 3)]
    count, ordered = rows_by_id(pieces, num_ids, parts, ids.size, share, work, QUIET)
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([np.empty((0, 1))], [np.empty((0, 3))])
    for number, values in ordered:
        found[number].append(values)
    listed = np.argsort(ids)[: np.count_nonzero(ids < num_ids)]
    assert count == listed.size
    assert np.array_equal(np.concatenate(found[0]).reshape(-1), numbers[listed])
    assert np.array_equal(np.concatenate(found[1]), rows[listed])
    assert list(work.iterdir()) == []
