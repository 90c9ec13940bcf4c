"""How a share of the arena is divided: no more than there is, and each type has what it needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.format import NodeType, RowArray
from loaderd.memory.ledger import ServedRows, SessionNeed
from loaderd.plans.hyperbatch import HyperbatchSize
from loaderd.sampling.hyperbatch.entries import entry_bytes
from loaderd.sampling.hyperbatch.regions import TypeRows, region_rows, rows_by_type
from loaderd.sampling.hyperbatch.sizing import (
    Estimate,
    PassEstimate,
    cut_without_cache,
    region_curve,
    share_rows,
    size_hyperbatches,
)
from loaderd.sampling.rows import ServedFiles

IDS = RowArray("ids", "uint32", 1_000_000)
NODES = NodeType(name="node", first=0, num_nodes=1_000_000, original_id=IDS, store_id=IDS)
NEED = SessionNeed(9, 1, 2, 4, 6, 50, 2)
SERVED = [ServedRows("x", NODES, RowArray("x", "float32", 1_000_000, (16,)), 0)]
NO_REGION = np.zeros(region_rows(rows_by_type(SERVED)[0]).size, np.bool_)
FILES = ServedFiles(SERVED, None, 0, None, 1 << 20, 1 << 20, "uint32")  # type: ignore[arg-type]


def spread(total: int, regions: int) -> np.ndarray:
    """So many rows, fewer in each region than in the one before."""
    weights = 1 / np.arange(1, regions + 1)
    return (total * weights / weights.sum()).astype(np.int64)


@given(st.integers(1, 3000), st.integers(0, 1), st.integers(0, 40))
def test_a_sizing_takes_no_more_than_there_is(room, together, asked):
    regions = region_rows(rows_by_type(SERVED)[0]).size
    wanted = tuple(spread(n, regions) for n in (10_000, 18_000, 30_000))
    passes = PassEstimate(1 << 19, 1 << 18, 1 << 20, 1 << 17, 2, 500 << 20) if together else None
    estimate = Estimate(100, 1 << 20, 1 << 20, 10_000, NEED.structure << 20, wanted, passes)
    sizing = size_hyperbatches(room, FILES, NEED, estimate, 8, 4, asked)
    if sizing is None:
        assert not together or asked == 1 or room < 100
        return
    assert sizing.slots(8) <= room
    assert 1 <= sizing.size <= (asked or 100)
    assert sizing.chunk * sizing.areas >= sizing.size
    assert sizing.quota >= NEED.min_quota
    assert sizing.area >= NEED.structure
    assert bool(sizing.sampling.slots) == bool(together)
    assert bool(sizing.shares) == bool(sizing.rows + sizing.staying) == bool(sizing.tables)
    assert sizing.shares or together  # with the graph in memory nothing else is gained


def test_an_area_holds_the_batches_that_were_sampled_first():
    """If rows have no room, the size is what the rest of the memory holds."""
    passes = PassEstimate(2 << 20, 1 << 20, 4 << 20, 1 << 18, 2, 500 << 20)
    estimate = Estimate(100, 4 << 20, 1 << 20, 90_000, 9 << 20, (), passes)
    usual, larger = (
        cut_without_cache(100, 1 << 20, NEED, estimate._replace(first_area=first << 20), 100)
        for first in (0, 30)
    )
    assert usual is not None
    assert larger is not None
    assert (usual.area, larger.area) == (19, 30)
    assert larger.slots(0) <= 100
    assert larger.size < usual.size


@pytest.mark.parametrize(
    ("room", "first", "expected"),
    [(55, 30, (30, 2)), (54, 30, (10, 2)), (28, 30, (9, 2)), (27, 30, (9, 0)), (24, 30, None)],
)
def test_less_is_kept_and_begun_early_if_two_batches_have_no_room_else(room, first, expected):
    passes = PassEstimate(2 << 20, 1 << 20, 4 << 20, 1 << 18, 2, 500 << 20)
    estimate = Estimate(100, 4 << 20, 1 << 20, 90_000, 9 << 20, (), passes, first_area=first << 20)
    found = cut_without_cache(room, 1 << 20, NEED, estimate, 100)
    assert (None if found is None else (found.area, found.sampling.early)) == expected


def test_areas_that_hold_the_worst_batch_hold_several_usual_ones():
    """Else most of the memory of small hyperbatches would be room that nothing takes."""
    usual = 2 << 20
    wanted = tuple(spread(n, region_rows(rows_by_type(SERVED)[0]).size) for n in (90_000, 150_000))
    estimate = Estimate(100, 1 << 20, usual, 90_000, 9 << 20, wanted)
    sizing = size_hyperbatches(160, FILES, NEED, estimate, 8, 4, 5)
    assert sizing is not None
    assert (sizing.size, sizing.area, sizing.chunk, sizing.areas) == (5, 9, 4, 5)


@pytest.mark.parametrize(("usual", "minimum", "maximum"), [(1 << 16, 100, 400), (9 << 20, 1, 3)])
def test_more_batches_are_known_where_structures_are_small(usual, minimum, maximum):
    regions = region_rows(rows_by_type(SERVED)[0]).size
    wanted = tuple(spread(n, regions) for n in (90_000, 150_000))
    estimate = Estimate(1000, 1 << 20, usual, 90_000, 1 << 20, wanted)
    sizing = size_hyperbatches(800, FILES, NEED, estimate, 8, 4, 5)
    assert sizing is not None
    assert minimum <= sizing.chunk * sizing.areas - 2 * sizing.size <= maximum


SLOT = 400_000  # nothing is left over of one
A, B = TypeRows(0, 1000, (0,), (400,)), TypeRows(1000, 3000, (1, 2), (50, 50))
NONE = np.zeros(region_rows(A).size + region_rows(B).size, np.bool_)  # stays for others


def choose(stay: list[int], passing: tuple[float, float], room: float = 0.0) -> HyperbatchSize:
    """`passing`: rows of each type that pass, all in its last region, and bytes for them."""
    counts = [region_rows(t).size for t in (A, B)]
    wanted = np.zeros(sum(counts))
    wanted[counts[0] - 1], wanted[-1] = passing
    return HyperbatchSize(4, np.array(stay, np.int64), wanted, room)


def test_entries_go_to_types_by_what_of_their_rows_passes():
    (a, b), _ = share_rows([A, B], SLOT, choose([], (10.0, 90.0)), 60_000, "uint32", NONE)
    assert a.stay_rows == b.stay_rows == 0
    assert 0 < a.entries < b.entries
    assert a.entries * (400 + entry_bytes(4)) + b.entries * (100 + entry_bytes(4)) <= 60_000


def test_rows_that_stay_come_first():
    first = int(region_rows(A)[0])
    (a, b), _ = share_rows(
        [A, B], SLOT, choose([0], (1.0, 9.0)), first * 400 + 20_000, "uint32", NONE
    )
    assert (a.stay.tolist(), a.stay_rows, b.stay_rows) == ([0], first, 0)
    assert a.entries * (400 + entry_bytes(4)) + b.entries * (100 + entry_bytes(4)) <= 20_000
    (a, b), _ = share_rows([A, B], SLOT, choose([0], (1.0, 9.0)), first * 400 - 1, "uint32", NONE)
    assert (a.stay.size, a.stay_rows) == (0, 0)  # it has no room after all
    (a, b), _ = share_rows(
        [A, B], SLOT, choose([2, 1, 0], (1.0, 9.0)), 2 * first * 400 + 9, "uint32", NONE
    )
    assert (a.stay.tolist(), a.stay_rows) == ([1, 2], 2 * first)  # those that are wanted most
    chosen = choose([2, 1, 0], (1.0, 9.0), 5000.0)
    (a, b), _ = share_rows([A, B], SLOT, chosen, 2 * first * 400 + 4999, "uint32", NONE)
    assert (a.stay.tolist(), a.stay_rows) == ([2], first)  # rows that pass have room beside them


def test_what_stays_for_others_takes_no_room():
    first = int(region_rows(A)[0])
    kept = NONE.copy()
    kept[[0, 1]] = True
    chosen = choose([0, 1, 2], (1.0, 9.0))
    (a, _), _ = share_rows([A, B], SLOT, chosen, first * 400, "uint32", kept)
    assert (a.stay.tolist(), a.stay_rows) == ([2], first)
    kept[:] = True
    for share in share_rows([A, B], SLOT, chosen, 10**9, "uint32", kept)[0]:
        assert (share.stay.size, share.entries) == (0, 0)


def test_each_of_some_sessions_keeps_its_part():
    first = int(region_rows(A)[0])
    chosen, kept = choose([3, 1, 0, 2], (1.0, 9.0)), NONE.copy()
    (a, _), _ = share_rows([A, B], SLOT, chosen, 10**6, "uint32", kept, 2)
    assert (a.stay.tolist(), a.stay_rows) == ([1, 3], 2 * first)
    kept[[1, 3]] = True
    (a, _), _ = share_rows([A, B], SLOT, chosen, 10**6, "uint32", kept, 2)
    assert (a.stay.tolist(), a.stay_rows) == ([0, 2], 2 * first)


def test_the_first_of_some_sessions_keeps_all_regions_if_there_is_room():
    """Each has as much left for rows that pass, and pays for an equal part of the others."""
    first = int(region_rows(A)[0])
    room, chosen, kept = 2 * first * 400 + 9_000, choose([3, 1, 0, 2], (1.0, 9.0)), NONE.copy()
    own = [share_rows([A, B], SLOT, chosen, room, "uint32", kept, 2, 10**6)]
    assert own[0][0][0].stay.tolist() == [0, 1, 2, 3]
    kept[[0, 1, 2, 3]] = True
    own.append(share_rows([A, B], SLOT, chosen, room, "uint32", kept, 2, 10**6))
    assert own[1][0][0].stay.size == 0
    assert own[0][1] == own[1][1] == 2 * first * 400
    entries = [[share.entries for share in shares] for shares, _ in own]
    assert entries[0] == entries[1]
    assert 0 < sum(entries[0]) * 100 < 9_000
    kept[:] = False
    (a, _), _ = share_rows([A, B], SLOT, chosen, room, "uint32", kept, 2, first * 400)
    assert a.stay.tolist() == [0, 1, 3]  # those of the other as far as there is room


def test_a_session_that_finds_rows_in_memory_adds_others():
    regions = region_rows(rows_by_type(SERVED)[0]).size
    heat = np.arange(regions, 0, -1) / regions
    wanted = tuple((heat * n).astype(np.int64) for n in (100, 150, 220, 300, 400))
    estimate = Estimate(1000, 1 << 20, 1 << 16, 90_000, 1 << 20, wanted)
    alone = size_hyperbatches(60, FILES, NEED, estimate, 8, 4, 5)
    assert alone is not None
    (first,) = alone.shares
    assert 0 < first.stay.size < regions
    kept = np.isin(np.arange(regions), first.stay)
    second = size_hyperbatches(60, FILES, NEED, estimate._replace(kept=kept), 8, 4, 5)
    assert second is not None
    (share,) = second.shares
    assert share.stay.size
    assert not np.isin(share.stay, first.stay).any()
    assert second.slots(8) <= 60
    everything = size_hyperbatches(60, FILES, NEED, estimate._replace(kept=~NO_REGION), 8, 4, 5)
    assert everything is not None
    assert everything.staying == everything.rows == 0


@pytest.mark.parametrize("more", [2, pytest.param(1, marks=pytest.mark.long)])
def test_next_to_all_rows_stay_where_there_is_room_for_next_to_all(more):
    """Whatever is lost where structures, tables and rows are rounded up to slots."""
    regions = region_rows(rows_by_type(SERVED)[0]).size
    wanted = tuple(spread(n, regions) for n in (100_000, 180_000, 300_000))
    estimate = Estimate(100, 1 << 20, 1 << 20, 10_000, 1 << 20, wanted)
    minimum = -(-1_000_000 * 64 // (1 << 20))
    stay = []
    for room in range(minimum, minimum + 60, more):
        sizing = size_hyperbatches(room, FILES, NEED, estimate, 8, 4, 0)
        stay.append(sizing.shares[0].stay_rows if sizing is not None and sizing.shares else 0)
    assert stay[-1] == 1_000_000
    known = stay[stay.index(next(n for n in stay if n)) :]
    assert min(known) > 0, "more room, and no rows stay"


def test_a_type_that_nobody_wanted_yet_has_some_entries():
    (a, _), _ = share_rows([A, B], SLOT, choose([], (0.0, 90.0)), 100_000, "uint32", NONE)
    assert a.entries > 0
    whole, _ = share_rows([A, B], SLOT, choose([], (0.0, 90.0)), 10**9, "uint32", NONE)
    assert [share.entries for share in whole] == [1000, 3000]


def test_a_curve_has_the_regions_of_all_types_in_turn():
    counts = [region_rows(t).size for t in (A, B)]
    curve = region_curve([A, B], SLOT, [np.arange(sum(counts))])
    assert curve.rows.sum() == 4000
    assert curve.row_bytes.tolist() == [400] * counts[0] + [100] * counts[1]
    assert curve.wanted.shape == (1, sum(counts))
