"""A flat tensor that goes around the ring arrives at the rank that it was sent to."""

import pytest

torch = pytest.importorskip("torch")

from clients.micrograph.training import RankRing  # noqa: E402
from clients.ranks import Ranks  # noqa: E402

RANKS = 4
HOPS = (1, 3, -1, 0, 4, 2, 1)


def travel(ranks: Ranks, size: int) -> list[list[float]]:
    """What a rank has after each of some shifts."""
    ring, values, found = RankRing(ranks), torch.full((size,), float(ranks.rank)), []
    for hops in HOPS:
        ring.shift(values, hops)
        found.append(values.unique().tolist())
    return found


@pytest.mark.parametrize(("world", "size"), [(1, 5), (2, 5), (4, 1), (4, 1 << 20)])
def test_values_go_so_many_ranks_on(ranks, world, size):
    """A megabyte is more than a socket takes at once: nobody waits for who waits for him."""
    for rank, found in enumerate(ranks.run(travel, size, world=world)):
        expected = [[float((rank - sum(HOPS[: i + 1])) % world)] for i in range(len(HOPS))]
        assert found == expected
