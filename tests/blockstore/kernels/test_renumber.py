"""Local ids in order of first occurrence: both tables, against a dict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.renumber import NodeTable, clear_table, enter_seeds, renumber
from tests import reference
from tests.graphs import ID_DTYPES

NUM_IDS = 300
TABLES = ["stamp", "hash"]


class Table:
    """One of the two tables, with room for `maximum` nodes, as a workspace holds it."""

    def __init__(self, kind: str, id_dtype: str, maximum: int, base: int = 0) -> None:
        self.dtype, self.base = np.dtype(id_dtype), base
        if kind == "stamp":
            self.table = NodeTable(None, np.full(NUM_IDS, -1, np.int32))
            return
        size = 1 << max(4, (2 * maximum - 1).bit_length())
        keys = np.full(size, np.iinfo(self.dtype).max, self.dtype)
        self.table = NodeTable(keys, np.zeros(size, np.uint32))

    def run(self, hops, seeds, gap):
        """(n_id, local ids) of one batch; columns lie `gap` apart in the draws."""
        total = sum(len(column) for columns in hops for column in columns)
        n_id = np.full(len(seeds) + total, 7, self.dtype)
        n_id[: len(seeds)] = np.array(seeds, self.dtype) + self.dtype.type(self.base)
        local = np.full(total + 1, 99, np.uint32)
        num_nodes, edge = len(seeds), 0
        enter_seeds(n_id, num_nodes, self.table, None)
        for columns in hops:
            draws, starts, counts = lay_out(columns, gap, self.dtype, self.base)
            num_nodes, edge = renumber(
                draws, starts, counts, self.table, n_id, num_nodes, local, edge, None, None
            )
        clear_table(n_id, num_nodes, self.table, None)
        assert edge == total
        assert local[total] == 99
        return (n_id[:num_nodes] - self.dtype.type(self.base)).tolist(), local[:total].tolist()

    def clean(self) -> bool:
        """Whether the table is as before the first batch."""
        if self.table.keys is not None:
            return bool((self.table.keys == np.iinfo(self.dtype).max).all())
        return bool((self.table.values == -1).all())


def lay_out(columns, gap, dtype, base):
    """Draws as the sampler leaves them: columns with room between, which holds anything."""
    counts = np.array([len(column) for column in columns], np.uint32)
    room = max([len(column) for column in columns], default=0) + gap
    starts = np.arange(len(columns) + 1) * room
    draws = np.full(len(columns) * room, np.iinfo(dtype).max, dtype)
    for start, column in zip(starts[:-1], columns, strict=True):
        draws[start : start + len(column)] = np.array(column, dtype) + dtype.type(base)
    return draws, starts, counts


COLUMNS = st.lists(st.lists(st.integers(0, NUM_IDS - 1), max_size=90), max_size=12)


@pytest.mark.parametrize("kind", TABLES)
@given(
    hops=st.lists(COLUMNS, max_size=3), seeds=st.lists(st.integers(0, NUM_IDS - 1), max_size=40),
    id_dtype=ID_DTYPES, gap=st.integers(0, 3),
)  # fmt: skip
def test_ids_are_numbered_in_order_of_first_occurrence(kind, hops, seeds, id_dtype, gap):
    total = sum(len(column) for columns in hops for column in columns)
    table = Table(kind, id_dtype, len(seeds) + total)
    expected = reference.renumber([column for columns in hops for column in columns], seeds)
    assert table.run(hops, seeds, gap) == expected
    assert table.clean()
    assert table.run(hops, seeds, gap) == expected


@pytest.mark.parametrize(("id_dtype", "base"), [("uint32", 2**32 - 400), ("uint64", 2**63)])
def test_the_hash_table_takes_ids_up_to_the_widest(id_dtype, base):
    rng = np.random.default_rng(2)
    hops = [rng.integers(0, NUM_IDS, (20, 10)).tolist()]
    table = Table("hash", id_dtype, 220, base)
    seeds = list(range(20))
    assert table.run(hops, seeds, 0) == reference.renumber(hops[0], seeds)
    assert table.clean()


@pytest.mark.parametrize("kind", TABLES)
def test_a_column_longer_than_any_prefetch_distance(kind):
    column = np.random.default_rng(3).integers(0, NUM_IDS, 5000).tolist()
    table = Table(kind, "uint32", 5000)
    hops = [[column, [], column[::-1]]]
    assert table.run(hops, [1, 1, 2], 1) == reference.renumber(hops[0], [1, 1, 2])
    assert table.clean()


def test_a_hash_table_that_is_half_full_is_emptied_again():
    """Chains run into each other at this load: clearing must not cut one that is still needed."""
    ids = np.random.default_rng(4).permutation(2**20)[:4096]
    n_id = np.concatenate([ids, ids[:100]]).astype(np.uint32)  # some are given twice
    keys, values = np.full(8192, 2**32 - 1, np.uint32), np.zeros(8192, np.uint32)
    enter_seeds(n_id, n_id.size, NodeTable(keys, values), None)
    assert (keys < 2**32 - 1).sum() == 4096
    clear_table(n_id, n_id.size, NodeTable(keys, values), None)
    assert (keys == 2**32 - 1).all()
