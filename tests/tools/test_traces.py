"""Replays of traces: optimal is least, and equals brute force on small ones."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderd.trace import BLOCKS, ROWS, Trace
from tests.graphs import make_csc
from tests.stores import write_store
from tools.traces import main, next_uses, read_trace, replay, row_groups

groups_of = st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=6)


def reads(groups, room, policy):
    return sum(absent.size for absent in replay(groups, room, 7, policy))


def least(groups: list[set[int]], room: int, held: frozenset[int] = frozenset()) -> int:
    """By trying everything."""
    if not groups:
        return 0
    need, after = frozenset(groups[0]), []
    others = sorted(held - need)
    spare = min(len(others), room - len(need))
    for kept in combinations(others, spare):
        after.append(least(groups[1:], room, need | frozenset(kept)))
    return len(need - held) + min(after)


@given(groups_of, st.integers(3, 6))
def test_optimal_is_what_brute_force_finds(groups, room):
    arrays = [np.array(sorted(g), np.int64) for g in groups]
    found = {policy: reads(arrays, room, policy) for policy in ("optimal", "lru", "fifo")}
    assert found["optimal"] == least(groups, room)
    assert found["optimal"] <= min(found.values())


def test_next_uses_look_ahead():
    groups = [np.array([0, 2]), np.array([1]), np.array([0, 1])]
    never = np.iinfo(np.int64).max
    assert [u.tolist() for u in next_uses(groups, 3)] == [[2, never], [2], [never, never]]


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
    found = {(line["what"], line["policy"]): line for line in lines}
    assert found["rows", "optimal"]["read"] == 900 + 100 + 50
    assert found["rows", "optimal"]["bytes"] % 4096 == 0
    assert found["graph blocks", "optimal"]["read"] == 5 + 3
    assert found["graph blocks", "lru in order"]["read"] == 10
