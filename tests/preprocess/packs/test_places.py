"""Which rows stay and how batches are grouped, against plain Python."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.kernels.order import count_nodes
from loaderd.sampling.hyperbatch.regions import TypeRows
from loaderd.sampling.packed.format import NOWHERE
from preprocess.packs.plan import MAX_WANTS, Grouping, choose_hot, count_levels, hot_nodes

TYPES = [TypeRows(0, 20, (0,), (8,)), TypeRows(30, 30, (1, 2), (4, 20))]  # 20 to 29 have no rows
NUM_NODES = 60
BATCHES = st.lists(
    st.lists(st.integers(0, NUM_NODES - 1), min_size=1, max_size=25, unique=True), min_size=1,
    max_size=8,
)  # fmt: skip


def wanted(batches: Any) -> np.ndarray:
    wants = np.zeros(NUM_NODES, np.uint16)
    for batch in batches:
        count_nodes(np.array(batch, np.uint32), MAX_WANTS, wants)
    return wants


def chosen(batches: Any, num_bytes: int) -> list[int]:
    wants = wanted(batches)
    shares = choose_hot(
        [count_levels(wants, t) for t in TYPES], [sum(t.row_bytes) for t in TYPES], num_bytes
    )
    found = [hot_nodes(wants, t, share) for t, share in zip(TYPES, shares, strict=True)]
    return [int(node) for pieces in found for piece in pieces for node in piece]


def naive_hot(batches: Any, num_bytes: int) -> list[int]:
    """One after the other, the most wanted for its bytes first, until one does not fit."""
    wants = wanted(batches).tolist()
    order = []
    for number, t in enumerate(TYPES):
        width = sum(t.row_bytes)
        for node in range(t.first, t.first + t.num_nodes):
            if wants[node] >= 2:
                order.append((-wants[node] / width, number, wants[node], node, width))
    found: list[int] = []
    for _, _, _, node, width in sorted(order):
        if width > num_bytes:
            break
        num_bytes -= width
        found.append(node)
    return sorted(found)


@given(BATCHES, st.integers(0, 700))
def test_the_rows_wanted_most_for_their_bytes_stay(batches, num_bytes):
    assert chosen(batches, num_bytes) == naive_hot(batches, num_bytes)


def test_a_count_does_not_start_again():
    wants = np.full(3, 65534, np.uint16)
    for _ in range(3):
        count_nodes(np.array([1], np.uint32), MAX_WANTS, wants)
    assert wants.tolist() == [65534, 65535, 65534]


def naive_groups(batches: Any, hot: list[int], maximum: int) -> list[tuple[int, int, list[int]]]:
    """(first batch, end, nodes)."""
    width = {n: sum(t.row_bytes) for t in TYPES for n in range(t.first, t.first + t.num_nodes)}
    found, first, nodes = [], 0, set[int]()
    for i, batch in enumerate(batches):
        own = {n for n in batch if n in width and n not in hot}
        if i > first and sum(width[n] for n in nodes | own) > maximum:
            found.append((first, i, sorted(nodes)))
            first, nodes = i, set()
        nodes |= own
    return [*found, (first, len(batches), sorted(nodes))]


@settings(max_examples=200)
@given(BATCHES, st.integers(0, 300), st.integers(1, 400))
def test_a_group_has_each_row_once_and_every_node_a_place(batches, num_bytes, maximum):
    hot = chosen(batches, num_bytes)
    arrays = [np.array(batch, np.uint32) for batch in batches]
    grouping = Grouping(NUM_NODES, TYPES, np.array(hot, np.uint32), maximum)
    expected, seen = naive_groups(batches, hot, maximum), []
    for group in grouping.groups(len(arrays), lambda i: arrays[i]):
        nodes = group.nodes.tolist()
        seen.append((group.first, group.stop, nodes))
        bounds = [(t.first, t.first + t.num_nodes) for t in TYPES]
        assert group.rows == tuple(sum(a <= n < b for n in nodes) for a, b in bounds)
        for batch in arrays[group.first : group.stop]:
            for node, place in zip(batch.tolist(), grouping.place[batch].tolist(), strict=True):
                if 20 <= node < 30:
                    assert place == NOWHERE
                elif place < len(hot):
                    assert hot[place] == node
                else:
                    assert nodes[place - len(hot)] == node
    assert seen == expected


def test_a_seed_that_is_given_twice_has_one_row():
    grouping = Grouping(NUM_NODES, TYPES, np.empty(0, np.uint32), 100)
    (group,) = grouping.groups(1, lambda _: np.array([5, 40, 5], np.uint32))
    assert group.nodes.tolist() == [5, 40]
