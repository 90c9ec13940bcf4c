"""Large batches over real daemons: their steps are the batches that plain sampling gives."""

import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from clients.connection.position import StateMismatch  # noqa: E402
from clients.large.batch import OwnBatches  # noqa: E402
from clients.large.dataset import LargeDataset  # noqa: E402
from clients.large.steps import LargeSteps  # noqa: E402
from clients.prefetch import Prefetcher  # noqa: E402
from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from tests.clients.batches import different_fields, digest  # noqa: E402
from tests.daemons import daemon, spawn, stop  # noqa: E402
from tests.differences import flat  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.reference import draw_hash, make_key, sample_batch, sample_edges  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.stores import write_store  # noqa: E402

LONG = pytest.mark.long
NODES, SEEDS, SIZE = 1500, 410, 40  # 11 steps, the last of 10 seeds
PLAIN = {"num_neighbors": (4, 3), "batch_size": SIZE, "seed": 5, "return_e_id": True}
LAYER = PLAIN | {"frontier": "layer"}
SHARED = LAYER | {"draws": "shared", "large_batches": 4}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Daemons of one graph: with room for all, over tcp, with little room."""
    rng = np.random.default_rng(4)
    graph = make_csc(rng.integers(0, 30, NODES), 5)
    path = tmp_path_factory.mktemp("large") / "store"
    write_store(path, graph, rng.permutation(NODES)[:SEEDS], width=600)
    roomy = remote_daemon(path, "64M", "--remote-credit", "256K")
    with roomy as (local, remote), daemon(path, "3M") as tight:
        yield SimpleNamespace(roomy=local, remote=remote, tight=tight, graph=graph, path=path)


def epoch_of(data, number: int = 0) -> list:
    data.set_epoch(number)
    batches = list(data)
    data.close()
    return batches


def check_epoch(found: list, expected: list) -> None:
    assert [(b.epoch, b.step) for b in found] == [(b.epoch, b.step) for b in expected]
    for one, other in zip(found, expected, strict=True):
        assert different_fields(one, other) == [], (one.step, one)


# -- own draws -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("large", "world", "frontier"),
    [  # each two of them together; all three with --long
        pytest.param(*p, frontier, marks=() if (i % 2 == 0) == (frontier == "new") else LONG)
        for i, p in enumerate(product((1, 4, 16), (1, 2, 4)))
        for frontier in ("new", "layer")
    ],
)
def test_own_draws_are_the_batches_of_minibatches(served, frontier, world, large):
    options = PLAIN | {"frontier": frontier, "world_size": world}
    for rank in range(world):
        place = options | {"rank": rank}
        expected = epoch_of(NeighborDataset(served.roomy, **place), 1)
        check_epoch(epoch_of(LargeDataset(served.roomy, large_batches=large, **place), 1), expected)


@pytest.mark.parametrize("place", ["tight", "remote"])
@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
def test_own_draws_come_by_every_way(served, place, plan):
    endpoint, options = getattr(served, place), PLAIN | {"plan": plan}
    options |= {"batch_size": 130, "num_neighbors": (10, 10)} if place == "tight" else {}
    if (place, plan) == ("remote", "hyperbatch"):
        options["window"] = 1
    expected = epoch_of(NeighborDataset(endpoint, **options))
    check_epoch(epoch_of(LargeDataset(endpoint, large_batches=3, **options)), expected)


def large_ones(data: LargeDataset) -> list:
    return [step.batch for step in data.ahead() if step.batch is not None]


@pytest.mark.parametrize("large", [0, 3])
def test_rows_of_a_large_batch_are_those_of_its_steps_once(served, large):
    data = LargeDataset(served.roomy, large_batches=large, **PLAIN)
    steps = epoch_of(NeighborDataset(served.roomy, **PLAIN))
    size = large or 1  # 11 steps are a twelfth each
    found = large_ones(data)
    assert len(found) == -(-len(steps) // size)
    for number, batch in enumerate(found):
        assert isinstance(batch, OwnBatches)
        own = steps[number * size : (number + 1) * size]
        union = {int(v) for step in own for v in step.n_id}
        brought = [s.n_id[p >= known] for s, p, known in new_rows(batch)]
        assert batch.num_rows == len(union) == sum(s.x.size(0) for s in batch.steps)
        assert {int(v) for ids in brought for v in ids} == union
    data.close()


def new_rows(batch: OwnBatches):
    """(step, places, nodes known before it) of each."""
    known = 0
    for step, places in zip(batch.steps, batch.places, strict=True):
        yield step, places, known
        known += step.x.size(0)


# -- shared draws ----------------------------------------------------------------------------------


def reference(served, step: int, seeds, large: int, fanouts, replace=False):
    """What the reference sampler gives for the seeds of a step under the key of a large batch."""
    graph = served.graph
    return sample_batch(
        graph.indptr, graph.indices, seeds, fanouts, 5, 1, step // large, "layer", replace
    )


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("large", [1, 4, 16])
def test_shared_draws_are_those_of_the_reference_under_the_key_of_the_large_batch(
    served, world, large
):
    for rank in range(world):
        place = {"world_size": world, "rank": rank}
        plain = epoch_of(NeighborDataset(served.roomy, **LAYER, **place), 1)
        data = LargeDataset(served.roomy, **(SHARED | {"large_batches": large}), **place)
        for found, usual in zip(epoch_of(data, 1), plain, strict=True):
            assert torch.equal(found.input_id, usual.input_id)
            seeds = usual.n_id[: usual.batch_size].tolist()
            expected = reference(served, found.step, seeds, large, LAYER["num_neighbors"])
            assert found.step == usual.step
            assert found.n_id.tolist() == expected.n_id
            assert found.num_sampled_nodes == expected.nodes_per_hop
            assert found.edge_index[0].tolist() == flat(expected.src_local)
            assert found.edge_index[1].tolist() == flat(expected.dst_local)
            assert torch.equal(found.x[:, 0], found.n_id.float())
            assert found.e_id.tolist() == flat(expected.edges)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_shared_draws_are_those_of_the_steps_of_a_rank_once(served, world):
    for rank in range(world):
        options = SHARED | {"world_size": world, "rank": rank}
        steps = epoch_of(LargeDataset(served.roomy, **options))
        data = LargeDataset(served.roomy, **options)
        for number, large in enumerate(large_ones(data)):
            union = {int(v) for step in steps[4 * number : 4 * number + 4] for v in step.n_id}
            assert large.num_rows == large.whole.x.size(0) == len(union)
            assert {int(v) for v in large.whole.x[:, 0]} == union
        data.close()


def test_a_large_batch_of_shared_draws_is_a_minibatch_of_all_its_seeds(served):
    data = LargeDataset(served.roomy, **SHARED)
    whole = [large.whole for large in large_ones(data)]
    data.close()
    check_epoch(
        whole, epoch_of(NeighborDataset(served.roomy, **(LAYER | {"batch_size": 4 * SIZE})))
    )


@pytest.mark.parametrize("world", [pytest.param(2, marks=LONG), 4])
def test_the_daemon_samples_once_for_all_ranks(served, world):
    def sampled(world: int) -> tuple[int, ...]:
        with daemon(served.path, "64M") as endpoint:
            ranks = [
                LargeDataset(endpoint, **SHARED, world_size=world, rank=rank)
                for rank in range(world)
            ]
            for data in ranks:
                data.attached()
            with ThreadPoolExecutor(world) as pool:
                list(pool.map(list, ranks))
            counters = ask_status(parse_either(endpoint)).counters
        return tuple(counters[name] for name in ("batches", "edges", "rows"))

    assert sampled(world) == sampled(1)


@pytest.mark.parametrize("place", ["tight", "remote"])
@pytest.mark.parametrize("world", [1, 2])
def test_shared_draws_come_by_every_way(served, place, world):
    options = SHARED | {"large_batches": 2, "world_size": world, "rank": world - 1}
    expected = epoch_of(LargeDataset(served.roomy, **options))
    check_epoch(epoch_of(LargeDataset(getattr(served, place), **options)), expected)


def test_the_second_stage_keeps_the_draws_of_least_hash(served):
    graph, second = served.graph, (2, 1)
    data = LargeDataset(served.roomy, **(SHARED | {"second_fanout": second}))
    for batch in epoch_of(data, 1):
        key = (5, 1, batch.step)
        n_id = batch.n_id[: batch.batch_size].tolist()
        local = {node: place for place, node in enumerate(n_id)}
        sources, targets, per_hop = [], [], [len(n_id)]
        for hop, fanout in enumerate(SHARED["num_neighbors"]):
            first = make_key(5, 1, batch.step // 4, hop, 0)
            for place, node in enumerate(list(n_id)):
                picks = sample_edges(graph.indptr, node, fanout, first)
                hashes = [
                    draw_hash(make_key(*key, hop, 6 << 60), node, k) for k in range(len(picks))
                ]
                for slot in sorted(np.argsort(np.array(hashes, np.uint64))[: second[hop]]):
                    source = int(graph.indices[picks[slot]])
                    if source not in local:
                        local[source] = len(n_id)
                        n_id.append(source)
                    sources.append(local[source])
                    targets.append(place)
            per_hop.append(len(n_id) - sum(per_hop))
        assert batch.n_id.tolist() == n_id
        assert batch.edge_index.tolist() == [sources, targets]
        assert batch.num_sampled_nodes == per_hop


# -- on the way to a trainer -----------------------------------------------------------------------

KINDS = [PLAIN | {"large_batches": 4}, SHARED, SHARED | {"second_fanout": (2, 2)}]


@pytest.mark.parametrize("options", KINDS, ids=["own", "shared", "second"])
@pytest.mark.parametrize("mode", ["auto", "staging"])
def test_steps_are_taken_on_the_device(served, options, mode):
    expected = epoch_of(LargeDataset(served.roomy, **options))
    with Prefetcher(LargeDataset(served.roomy, **options), "cpu", mode=mode) as ahead:
        check_epoch(list(ahead), expected)
        assert len(ahead) == len(expected)


@pytest.mark.parametrize("options", KINDS, ids=["own", "shared", "second"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_goes_on_inside_a_large_batch(served, options, ahead):
    expected = epoch_of(LargeDataset(served.roomy, **options), 3)
    for consumed in (0, 3, 4, 10):
        data = LargeDataset(served.roomy, **options)
        reader = Prefetcher(data, "cpu") if ahead else data
        reader.set_epoch(3)
        list(islice(reader, consumed))
        state = pickle.loads(pickle.dumps(reader.state_dict()))
        reader.close()
        after = LargeDataset(served.roomy, **options)
        after.load_state_dict(state)
        after.set_epoch(3)
        check_epoch(list(after), expected[consumed:])
        after.close()


def test_states_of_own_draws_are_those_of_minibatches(served):
    data = LargeDataset(served.roomy, large_batches=4, **PLAIN)
    list(islice(data, 6))
    plain = NeighborDataset(served.roomy, **PLAIN)
    plain.load_state_dict(data.state_dict())
    assert [b.step for b in plain] == [6, 7, 8, 9, 10]
    data.close()
    plain.close()


def test_states_of_shared_draws_are_for_the_same_large_batches(served):
    data = LargeDataset(served.roomy, **SHARED)
    state = data.state_dict()
    for wrong, text in (
        ({"large_batches": 5}, "'large_batches': 4"),
        ({"batch_size": 20}, "'batch_size': 40"),
        ({"second_fanout": (1, 1)}, r"'second_fanout': \[\]"),
        ({"draws": "own"}, "with shared draws"),
    ):
        with pytest.raises(StateMismatch, match=text):
            LargeDataset(served.roomy, **(SHARED | wrong)).load_state_dict(state)
    with pytest.raises(StateMismatch):
        NeighborDataset(served.roomy, **LAYER).load_state_dict(state)
    other = LargeDataset(served.roomy, **(SHARED | {"large_batches": 0}))
    other.load_state_dict(state)
    assert other.state_dict() == state
    own = NeighborDataset(served.roomy, **LAYER)
    with pytest.raises(StateMismatch, match="with own draws"):
        data.load_state_dict(own.state_dict())
    for one in (data, other, own):
        one.close()


def test_batches_of_the_same_options_are_the_same_whoever_builds_them(served):
    digests = set()
    for workers in (1, 8):
        with daemon(served.path, "64M", workers) as endpoint:
            digests.add(tuple(digest(epoch_of(LargeDataset(endpoint, **o))) for o in KINDS))
    assert len(digests) == 1


def test_the_daemon_may_be_killed_between_large_batches(served):
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/daemon.sock"
        for options in KINDS[::2]:  # own draws, and shared ones in two stages
            expected = epoch_of(LargeDataset(served.roomy, **options))
            first = spawn(served.path, endpoint, "--mem", "64M")
            data = LargeDataset(endpoint, **options)
            batches = iter(data)
            found = list(islice(batches, 5))
            first.kill()
            first.communicate()
            second = spawn(served.path, endpoint, "--mem", "64M")
            found += batches
            data.close()
            assert stop(second) == 0
            check_epoch(found, expected)


# -- what cannot be --------------------------------------------------------------------------------


def test_a_twelfth_of_an_epoch_is_the_default(served):
    data = LargeDataset(served.roomy, **(SHARED | {"large_batches": 0, "batch_size": 8}))
    assert len(data) == 52
    assert data.state_dict()["large"]["large_batches"] == 5
    data.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_the_seeds_of_each_step(world):
    for num_seeds in range(max(world, 5), 60):
        for size in (4, 5, 7):
            for steps in (1, 2, 3, 5, 50):
                plan = LargeSteps(num_seeds, size, world, steps).without_tail()
                ranks = [[], *([] for _ in range(world - 1))]
                for step in range(plan.num_steps):
                    first = step // plan.steps * plan.steps * size
                    for rank, seeds in enumerate(ranks):
                        seeds += [first + place for place in plan.seeds(step, rank)]
                        # the daemon, which knows one rank, has no more seeds in a large batch
                        assert plan.seeds(step, rank).stop <= plan.steps * size
                assert sorted(flat(ranks)) == list(range(num_seeds))


REFUSED = [
    ({"draws": "other"}, "draws 'other': expected 'own' or 'shared'"),
    ({"draws": "shared", "frontier": "new"}, "draws 'shared': found frontier 'new'"),
    ({"large_batches": -1}, "large_batches: found -1, expected a number of steps"),
    ({"large_batches": 1.5}, "large_batches: found 1.5, expected a number of steps"),
    ({"plan": "macrobatch"}, "large batches: found plan 'macrobatch', expected 'auto' or"),
    ({"edge_features": True, "return_e_id": False}, "large batches: found edge_features"),
    ({"second_fanout": (2, 2)}, "second_fanout: found draws 'own', expected 'shared'"),
    ({"second_fanout": "2 2"}, "second_fanout: found '2 2', expected an integer for each hop"),
    ({"draws": "shared", "second_fanout": (2,)}, "found [2], expected a fanout for each of 2"),
    ({"draws": "shared", "second_fanout": (2, -2)}, "found [2, -2], expected a fanout"),
    ({"draws": "shared", "world_size": 4, "batch_size": 102, "large_batches": 2},
     "410 seeds in large batches of 2 steps leave fewer to the last one than the 4 ranks; take "
     "large_batches 3"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "text"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(served, wrong, text):
    with pytest.raises(Refused) as caught:
        len(LargeDataset(served.roomy, **(LAYER | wrong)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_large_batch_beyond_the_budget_is_refused_with_one_that_would_do(served):
    options = SHARED | {"large_batches": 11, "num_neighbors": (30, 30), "return_e_id": False}
    with daemon(served.path, "700K") as endpoint:
        with pytest.raises(Refused, match="serve with at least --mem 1M, or ask for a") as caught:
            len(LargeDataset(endpoint, **options))
        assert len(LargeDataset(endpoint, **(options | {"large_batches": 1}))) == 11
    assert "\n" not in str(caught.value)


def test_workers_are_refused(served):
    data = LargeDataset(served.roomy, **SHARED)
    with pytest.raises(Refused, match="found a DataLoader with 1 workers, expected none"):
        next(iter(DataLoader(data, batch_size=None, num_workers=1)))
