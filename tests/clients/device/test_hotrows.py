"""Which rows are hot, and who has them, against plain Python."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from clients.device.hotrows import HotRows  # noqa: E402

CPU = torch.device("cpu")
batches = st.lists(st.sets(st.integers(0, 40)), max_size=8)


def ids(nodes):
    return torch.tensor(sorted(nodes), dtype=torch.int64)


@settings(deadline=None, max_examples=40)
@given(batches=batches, maximum=st.integers(0, 50))
def test_the_hottest_are_those_wanted_most(batches, maximum):
    hot, counts = HotRows(CPU, 1), Counter()
    for nodes in batches:
        hot.count(ids(nodes))
        counts.update(nodes)
    assert hot.num_counted == len(batches)
    hot.choose(maximum)
    ranked = sorted(counts, key=lambda node: (-counts[node], node))[:maximum]
    expected = sorted(node for node in ranked if counts[node] > 1)
    assert hot.num_rows == len(expected)
    hot.learn(torch.arange(41), torch.zeros((41, 1), dtype=torch.uint8))
    slots, _ = hot.look_up(torch.arange(41))
    assert torch.nonzero(slots >= 0).squeeze(1).tolist() == expected


@settings(deadline=None, max_examples=40)
@given(
    hot=st.sets(st.integers(0, 40)),
    batches=st.lists(st.permutations(range(41)).map(lambda p: p[:20]), max_size=8),
    settle_after=st.integers(0, 8),
)
def test_rows_are_those_that_batches_brought(hot, batches, settle_after):
    cache, held, wanted = HotRows(CPU, 3), set(), set(hot)
    for _ in range(2):
        cache.count(ids(hot))
    cache.choose(3 * 41)
    for number, nodes in enumerate(batches):
        if number == settle_after:
            cache.settle()
            wanted = held.copy()
        n_id = torch.tensor(nodes)
        slots, rows = cache.look_up(n_id)
        assert [slot >= 0 for slot in slots.tolist()] == [node in held for node in nodes]
        for node, slot in zip(nodes, slots.tolist(), strict=True):
            assert slot < 0 or rows[slot].tolist() == [node, node + 1, node + 2]
        share = cache.learn(n_id, (n_id[:, None] + torch.arange(3)).to(torch.uint8))
        held |= wanted & set(nodes)
        if not cache.settled and wanted:
            assert share == pytest.approx(len(held) / len(wanted))
    cache.settle()
    assert cache.num_rows == len(held)
    assert cache.num_bytes == 3 * len(held)
