"""Large batches of partitions over real daemons, against plain Python."""

import pickle
import re
from itertools import islice, pairwise
from math import ceil
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.cut import cut_batch  # noqa: E402
from clients.large.batch import PLACE  # noqa: E402
from clients.large.dataset import LargeDataset  # noqa: E402
from clients.torch import Batch, NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.clients.batches import different_fields, digest  # noqa: E402
from tests.daemons import daemon, spawn, stop  # noqa: E402
from tests.differences import flat  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.reference import make_key, permute, sample_edges  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.stores import write_store  # noqa: E402

NODES, SEED, SIZE, FANOUTS = 900, 5, 20, (4, 3, 3)
OFFSETS = (0, 150, 151, 300, 300, 420, 600, 700, 800, 900)  # one of one node, one empty
SEEDS = [*range(1, 500, 3), 7, 7]  # 169, none in the last three partitions
DEALT, ORDERED = 1 << 62, 3 << 61
OPTIONS = {
    "num_neighbors": FANOUTS, "batch_size": SIZE, "seed": SEED, "frontier": "layer",
    "draws": "partitions", "macro_partitions": 2, "return_e_id": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Daemons of one graph: with room for all, over tcp, with little room."""
    rng = np.random.default_rng(4)
    degrees = rng.integers(0, 20, NODES)
    degrees[[5, 410]] = 2500  # of several blocks
    graph = make_csc(degrees, 5)
    path = tmp_path_factory.mktemp("partitions") / "store"
    write_store(path, graph, SEEDS, width=100, offsets=OFFSETS)
    with remote_daemon(path, "64M") as (local, remote), daemon(path, "3M") as tight:
        yield SimpleNamespace(roomy=local, remote=remote, tight=tight, graph=graph, path=path)


def opened(endpoint: str, **options) -> LargeDataset:
    return LargeDataset(endpoint, **(OPTIONS | options))


def epoch_of(data, number: int = 0) -> list[Batch]:
    data.set_epoch(number)
    batches = list(data)
    data.close()
    return batches


def large_ones(data: LargeDataset, epoch: int = 0) -> list:
    data.set_epoch(epoch)
    found = [step.batch for step in data.ahead() if step.batch is not None]
    data.close()
    return found


def deal(epoch: int, size: int, world: int) -> list[list[int]]:
    """Partitions of each macro-batch."""
    count = len(OFFSETS) - 1
    key = make_key(SEED, epoch, DEALT, 0, 0)
    order = [permute(i, count, key) for i in range(count)]
    macros = min(ceil(count / size / world), count // world) * world
    cuts = [count * i // macros for i in range(macros + 1)]
    return [sorted(order[a:b]) for a, b in pairwise(cuts)]


def seeds_of(members: list[int], epoch: int, macro: int) -> list[int]:
    """Places of the seeds of a macro-batch, in its order."""
    places = [
        i for p in members for i, v in enumerate(SEEDS) if OFFSETS[p] <= v < OFFSETS[p + 1]
    ]  # fmt: skip
    key = make_key(SEED, epoch, ORDERED, macro, 0)
    return [places[permute(i, len(places), key)] for i in range(len(places))]


def sample(graph, inner: set[int], places: list[int], epoch: int, macro: int):
    """(nodes, edges, nodes by hop) of a batch of which inner nodes alone are expanded."""
    nodes = [SEEDS[i] for i in places]
    local = {node: i for i, node in reversed(list(enumerate(nodes)))}
    edges: list[tuple[int, int, int]] = []  # (hop, source, target), local
    per_hop = [len(nodes)]
    for hop, fanout in enumerate(FANOUTS):
        for target, node in enumerate(list(nodes)):
            if node not in inner:
                continue
            for edge in sample_edges(
                graph.indptr, node, fanout, make_key(SEED, epoch, macro, hop, 0)
            ):
                source = int(graph.indices[edge])
                if source not in local:
                    local[source] = len(nodes)
                    nodes.append(source)
                edges.append((hop, local[source], target))
        per_hop.append(len(nodes) - sum(per_hop))
    return nodes, edges, per_hop


@pytest.mark.parametrize("world", [1, 2, 4])
def test_large_batches_are_those_of_plain_python(served, world):
    size = {1: 2, 2: 2, 4: 1}[world]
    dealt = deal(3, size, world)
    for rank in range(world):
        options = {"macro_partitions": size, "rank": rank, "world_size": world}
        found = large_ones(opened(served.roomy, **options), 3)
        assert len(found) == len(dealt) // world
        for number, large in enumerate(found):
            macro = number * world + rank
            inner = {v for p in dealt[macro] for v in range(OFFSETS[p], OFFSETS[p + 1])}
            places = seeds_of(dealt[macro], 3, macro)
            nodes, edges, per_hop = sample(served.graph, inner, places, 3, macro)
            whole = large.whole
            assert whole.input_id.tolist() == places
            assert whole.n_id.tolist() == large.store_id.tolist() == nodes
            assert whole.num_sampled_nodes == per_hop
            assert list(zip(*whole.edge_index.tolist(), strict=True)) == [e[1:] for e in edges]
            assert torch.equal(whole.x[:, 0], whole.n_id.float())
            assert large.inner.tolist() == [v in inner for v in nodes]
            for layer, pull in enumerate(large.pull, 1):
                hop = len(FANOUTS) - layer - 1
                read = {s for h, s, _ in edges if h == hop and nodes[s] not in inner}
                assert pull.tolist() == sorted(read)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_have_each_seed_once_and_as_many_on_every_rank(served, world):
    options = {"macro_partitions": 1, "world_size": world}
    ranks = [epoch_of(opened(served.roomy, rank=rank, **options), 1) for rank in range(world)]
    assert len({tuple(b.step for b in batches) for batches in ranks}) == 1
    assert [b.step for b in ranks[0]] == list(range(len(opened(served.roomy, **options))))
    assert max(sum(b.batch_size for b in step) for step in zip(*ranks, strict=True)) <= SIZE
    seen = flat(b.input_id.tolist() for batches in ranks for b in batches)
    assert sorted(seen) == list(range(len(SEEDS)))


def test_a_step_is_cut_out_of_its_large_batch(served):
    data = opened(served.roomy)
    for read in data.ahead():
        for step in data.hand_out(read, read.batch):
            large = data.current
            start, stop = large.cut_seeds[step.step - large.first]
            expected = cut_batch(large.whole, torch.arange(start, stop))
            assert torch.equal(large.whole.n_id[step.features.pop(PLACE) - 1], step.n_id)
            assert torch.equal(step.edge_index, expected.edge_index)
            assert torch.equal(step.x, expected.x)
    data.close()


def test_rows_of_a_large_batch_are_those_of_its_steps_once(served):
    for large in large_ones(opened(served.roomy)):
        union = {int(v) for step in large.batches() for v in step.n_id}
        nodes = large.whole.n_id.tolist()
        assert set(nodes) == union
        twice = [v for v in set(nodes) if nodes.count(v) > 1]
        assert set(twice) <= {7}  # given as a seed three times
        assert large.whole.x.size(0) == len(nodes)


def test_with_all_partitions_nothing_is_outside_and_draws_are_shared(served):
    (large,) = large_ones(opened(served.roomy, macro_partitions=len(OFFSETS) - 1))
    assert large.inner.all()
    assert [pull.numel() for pull in large.pull] == [0, 0]
    shared = opened(served.roomy, draws="shared", macro_partitions=0, large_batches=50)
    (other,) = large_ones(shared)
    place = torch.argsort(other.whole.input_id)
    same = cut_batch(other.whole, place[large.whole.input_id])
    assert different_fields(same, large.whole) == []


@pytest.mark.parametrize("place", ["tight", "remote"])
@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2}, {"replace": True}])
def test_they_come_by_every_way(served, place, options):
    expected = epoch_of(opened(served.roomy, **options), 2)
    assert digest(epoch_of(opened(getattr(served, place), **options), 2)) == digest(expected)


def test_a_state_goes_on_inside_a_large_batch(served):
    expected = epoch_of(opened(served.roomy), 3)
    for consumed in (0, 1, 4, len(expected) - 1):
        data = opened(served.roomy)
        data.set_epoch(3)
        list(islice(data, consumed))
        state = pickle.loads(pickle.dumps(data.state_dict()))
        data.close()
        after = opened(served.roomy)
        after.load_state_dict(state)
        after.set_epoch(3)
        assert digest(list(after)) == digest(expected[consumed:])
        after.close()


def test_batches_are_the_same_whoever_builds_them(served):
    digests = set()
    for workers in (1, 2, 8):
        with daemon(served.path, "64M", workers) as endpoint:
            digests.add(digest(epoch_of(opened(endpoint))))
    assert len(digests) == 1


def test_the_daemon_may_be_killed_between_large_batches(served, tmp_path):
    endpoint = f"ipc://{tmp_path}/daemon.sock"
    expected = epoch_of(opened(served.roomy))
    first = spawn(served.path, endpoint, "--mem", "64M")
    data = opened(endpoint)
    batches = iter(data)
    found = list(islice(batches, 3))
    first.kill()
    first.communicate()
    second = spawn(served.path, endpoint, "--mem", "64M")
    found += batches
    data.close()
    assert stop(second) == 0
    assert digest(found) == digest(expected)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"frontier": "new"}, "draws 'partitions': found frontier 'new'"),
        ({"large_batches": 4}, "large_batches: found 4 with draws 'partitions'"),
        ({"second_fanout": (1, 1, 1)}, "second_fanout: found draws 'partitions', expected"),
        ({"macro_partitions": 10}, "macro_partitions is 10, expected 1 to the store's 9"),
        ({"world_size": 10}, "9 partitions cannot be dealt out to 10 ranks; take fewer"),
        ({"reuse": 2}, "plan 'partitions': found reuse 2, expected frontier 'layer', one pass"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(served, wrong, text):
    with pytest.raises(Refused) as caught:
        len(opened(served.roomy, **wrong))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_without_partitions_is_refused(served, tmp_path):
    write_store(tmp_path / "store", make_csc([3] * 50, 1), range(20))
    with daemon(tmp_path / "store", "8M") as endpoint:
        with pytest.raises(Refused, match="plan 'partitions': the store is not partitioned"):
            len(opened(endpoint))
        data = NeighborDataset(endpoint, num_neighbors=(2,))
        assert len(data) == 1
        data.close()


def test_partitions_beyond_the_budget_are_refused_with_what_would_do(served):
    options = {"num_neighbors": (200, 200, 200), "macro_partitions": 9}
    with daemon(served.path, "1M") as endpoint, pytest.raises(Refused) as caught:
        len(opened(endpoint, **options))
    assert re.search(r"serve with at least --mem \d+M, or ask for fewer m", str(caught.value))
