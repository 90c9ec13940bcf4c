"""Traces are read back, and replayed as plain Python, and the least that is found, have it."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.monitoring.trace import BLOCKS, ROWS, Trace
from tests.graphs import make_csc
from tests.stores import write_store
from tools.replay import (
    BLOCK_POLICIES,
    ROW_POLICIES,
    main,
    next_needs,
    read_trace,
    replay_blocks,
    replay_rows,
    row_groups,
)

IDS = 7
groups_of = st.lists(st.sets(st.integers(0, IDS - 1), max_size=3), min_size=1, max_size=6)
many_groups_of = st.lists(st.sets(st.integers(0, 29), max_size=9), min_size=1, max_size=30)
some = settings(deadline=None, max_examples=50)


def arrays(groups):
    return [np.array(sorted(g), np.int64) for g in groups]


def rows_read(groups, room, policy, look=1, num_ids=IDS):
    return sum(a.size for a in replay_rows(arrays(groups), num_ids, room, policy, look))


def blocks_read(hops, room, policy, num_ids=IDS):
    return replay_blocks(arrays(hops), num_ids, room, policy)


def minimum(groups, room, held=frozenset(), together=True):
    """Reads, whatever is kept; `together`: a group's ids are all held at once, and stay."""
    if not groups:
        return 0
    need = frozenset(groups[0])
    must = need if together else frozenset()
    others = sorted((held | need) - must)
    spare = min(len(others), room - len(must))
    kept = [must | frozenset(some) for some in combinations(others, spare)]
    return len(need - held) + min(minimum(groups[1:], room, k, together) for k in kept)


def naive_rows(groups, room, policy, look):
    """One group after the other, by sets."""
    held, reads, last, uses = set(), 0, {}, {}
    for time, group in enumerate(groups):
        if (time + 1) % 8 == 0:
            uses = {i: n // 2 for i, n in uses.items()}

        def coming(i, time=time):
            return next((t for t in range(time + 1, len(groups)) if i in groups[t]), 10**6)

        def rank(i, time=time, coming=coming, uses=uses):
            if policy == "optimal":
                return -coming(i)
            if policy == "lru":
                return last[i]
            return (1, -coming(i)) if coming(i) <= time + look else (0, uses[i])

        absent = group - held
        reads += len(absent)
        while len(held | group) > room:
            held.remove(min(held - group, key=lambda i: (rank(i), i)))
        held |= group
        for i in group:
            last[i], uses[i] = time, min((0 if i in absent else uses[i]) + 1, 15)
    return reads


@given(groups_of, st.integers(3, 6))
@some
def test_optimal_rows_are_what_brute_force_finds(groups, room):
    assert rows_read(groups, room, "optimal") == minimum(groups, room)


@given(groups_of, st.integers(1, 5))
@some
def test_optimal_blocks_are_what_brute_force_finds(hops, room):
    assert blocks_read(hops, room, "optimal") == minimum(hops, room, together=False)


@given(many_groups_of, st.integers(9, 20), st.integers(1, 4))
@some
def test_rows_are_those_of_plain_python(groups, room, look):
    found = [rows_read(groups, room, policy, look, 30) for policy in ROW_POLICIES]
    assert found == [naive_rows(groups, room, policy, look) for policy in ROW_POLICIES]
    assert found[0] == min(found)


@given(many_groups_of, st.integers(1, 20))
@some
def test_no_policy_reads_fewer_blocks_than_the_optimal_one(hops, room):
    found = [blocks_read(hops, room, policy, 30) for policy in BLOCK_POLICIES]
    assert found[0] == min(found)


@given(many_groups_of, st.integers(9, 20))
@some
def test_one_who_sees_to_the_end_is_optimal(groups, room):
    assert rows_read(groups, room, "next-use", len(groups), 30) == rows_read(
        groups, room, "optimal", 1, 30
    )


def test_all_hops_over_all_blocks_read_what_has_no_room():
    hops = [set(range(IDS))] * 5
    for policy in ("optimal", "present first"):
        assert blocks_read(hops, 3, policy) == IDS + 4 * (IDS - 3)
    assert blocks_read(hops, 3, "lru") == 5 * IDS


def test_a_block_held_for_a_later_hop_stays():
    hops = [{0, 1}, {2, 3}, {0, 1}]
    assert blocks_read(hops, 3, "optimal") == 4
    assert blocks_read(hops, 3, "present first") == 6


def test_needs_look_ahead():
    found = next_needs([np.array([0, 2]), np.array([1]), np.array([0, 1])], 3)
    assert [after.tolist() for after in found] == [[2, 3], [2], [3, 3]]


def test_a_trace_is_read_back_and_replayed(tmp_path):
    write_store(tmp_path / "store", make_csc([3] * 2000, 0), range(10))
    trace = Trace(tmp_path / "trace")
    batches = [np.arange(0, 900), np.arange(800, 1000), np.arange(0, 900)]
    for number, nodes in enumerate(batches):
        trace.write(ROWS, 1, number, nodes.astype(np.uint32))
    trace.write(BLOCKS, 0, 0, np.arange(5))
    trace.write(BLOCKS, 0, 0, np.arange(5))
    trace.close()
    with (tmp_path / "trace").open("ab") as f:
        f.write(np.array([ROWS, 1, 9, 100], np.int64).tobytes())  # cut off
    records = list(read_trace(tmp_path / "trace"))
    assert [g.tolist() for g in row_groups(records)] == [b.tolist() for b in batches]
    lines = main([
        str(tmp_path / "trace"), str(tmp_path / "store"), "--entries", "950", "--graph-mem", "8192",
    ])  # fmt: skip
    found = {(line["what"], line["policy"]): line["read"] for line in lines}
    assert found["rows", "optimal"] == found["rows", "next-use"] == 900 + 100 + 50
    assert found["graph blocks", "optimal"] == found["graph blocks", "present first"] == 5 + 3
    assert found["graph blocks", "lru"] == 10
    assert all(line["bytes"] % 4096 == 0 < line["bytes"] for line in lines)
    of_rows = main([str(tmp_path / "trace"), str(tmp_path / "store"), "--entries", "950"])
    assert of_rows == [line for line in lines if line["what"] == "rows"]
    with pytest.raises(ValueError, match="group 0 needs 900 rows, there is room for 800"):
        main([str(tmp_path / "trace"), str(tmp_path / "store"), "--entries", "800"])


def test_blocks_of_relations_are_told_apart(tmp_path):
    write_store(tmp_path / "store", make_csc([3] * 2000, 0), range(10))
    trace = Trace(tmp_path / "trace")
    for relation in (0, 1):
        trace.write(BLOCKS, 0, relation, np.arange(4))
    trace.close()
    lines = main([str(tmp_path / "trace"), str(tmp_path / "store"), "--graph-mem", "64K"])
    assert {line["read"] for line in lines} == {8}
