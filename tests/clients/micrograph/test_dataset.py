"""Home batches over real daemons: each seed on the rank that owns it, edges as if it were alone."""

import operator
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.owners import write_owners  # noqa: E402
from blockstore.store import open_store  # noqa: E402
from clients.micrograph.dataset import HomeDataset  # noqa: E402
from clients.prefetch import Prefetcher  # noqa: E402
from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from loaderd.api.protocol import Attach, HomePlacement, SeedEdges, Temporal  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from loaderd.sessions.owners import map_digest  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.differences import At, flat  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.loaderd.packing import pack  # noqa: E402
from tests.reference import make_epoch_key, permute, sample_batch  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.stores import write_store  # noqa: E402

NODES, TRAIN, BATCH, SEED, FANOUTS = 400, 150, 40, 3, (4, 3)
OPTIONS = {"num_neighbors": FANOUTS, "batch_size": BATCH, "seed": SEED, "frontier": "layer"}
SIZES = (40, 40, 40, 30)  # of the global batches
OWNERS = {"two": 2, "four": 4, "one of three": 3}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A graph, its store, and the owner of each node by map; one gives all to rank 1."""
    graph = make_csc(np.random.default_rng(1).integers(0, 1000, NODES), 2)
    path = tmp_path_factory.mktemp("home") / "store"
    write_store(path, graph, range(TRAIN), width=500)
    rng, maps = np.random.default_rng(5), {}
    for name, owners in OWNERS.items():
        owner = np.ones(NODES, np.int64) if name[:3] == "one" else rng.integers(0, owners, NODES)
        write_owners(open_store(path), name.replace(" ", "_"), owner, owners, {})
        maps[name] = owner
    pack(path, OPTIONS | {"world_size": 2}, 2)
    return SimpleNamespace(graph=graph, path=path, maps=maps)


@pytest.fixture(scope="module")
def served(stored):
    roomy = remote_daemon(stored.path, "32M")
    with roomy as (local, remote), daemon(stored.path, "2500K") as tight:
        yield SimpleNamespace(roomy=local, remote=remote, tight=tight)


def open_ranks(endpoint: str, name: str, **options) -> list[HomeDataset]:
    own = {"owners": name.replace(" ", "_"), "world_size": OWNERS[name]}
    return [
        HomeDataset(endpoint, rank=rank, **(OPTIONS | own | options))
        for rank in range(OWNERS[name])
    ]


def read_all(*data: HomeDataset) -> list[list]:
    """The epochs of all ranks, read side by side."""
    for one in data:
        one.attached()
    with ThreadPoolExecutor(len(data)) as pool:
        return list(pool.map(list, data))


def order_of(epoch: int) -> list[int]:
    key = make_epoch_key(SEED, epoch)
    return [permute(i, TRAIN, key) for i in range(TRAIN)]


def steps_of(world: int) -> list[list[int]]:
    """Positions of each global batch; a tail smaller than the ranks joins the one before."""
    starts = list(range(0, TRAIN, BATCH))
    assert world <= TRAIN % BATCH
    return [list(range(first, min(first + BATCH, TRAIN))) for first in starts]


def check(ranks: list[list], stored, placed, epoch: int = 0, key=lambda step: step) -> None:
    """Batches of all ranks against the sampler in plain Python, of each rank's seeds alone.

    placed   seeds in order of a global batch -> rank of each
    """
    order, graph = order_of(epoch), stored.graph
    for step, positions in enumerate(steps_of(len(ranks))):
        seeds = [order[p] for p in positions]
        expected_ranks = placed(np.array(seeds)).tolist()
        for rank, batches in enumerate(ranks):
            batch, at = batches[step], At(epoch, step)
            own = [s for s, r in zip(seeds, expected_ranks, strict=True) if r == rank]
            expected = sample_batch(
                graph.indptr, graph.indices, own, FANOUTS, SEED, epoch, step, "layer"
            )
            at.same("seed_rank", batch.seed_rank, expected_ranks)
            at.same("input_id", batch.input_id, own)
            at.same("batch_size", batch.batch_size, len(own))
            at.same("n_id", batch.n_id, expected.n_id)
            at.same("num_sampled_nodes", batch.num_sampled_nodes, expected.nodes_per_hop)
            at.same("edge_index[0]", batch.edge_index[0], flat(expected.src_local))
            at.same("edge_index[1]", batch.edge_index[1], flat(expected.dst_local))
            at.same("x[:, 1]", batch.x[:, 1], [2.0 * node for node in expected.n_id])


WAYS = [
    ("roomy", "minibatch", "owner map"), ("roomy", "hyperbatch", "hyperbatches of"),
    ("tight", "minibatch", "owner map"), ("tight", "auto", "hyperbatches of"),
    ("remote", "auto", "owner map"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "plan", "sign", "name"),
    [  # each way with two maps, each map with three ways or more; all with --long
        pytest.param(*way, name, marks=() if (i + j) % 3 else pytest.mark.long)
        for i, way in enumerate(WAYS)
        for j, name in enumerate(OWNERS)
    ],
)
def test_each_rank_trains_what_it_owns(served, stored, place, plan, sign, name):
    data, owner = open_ranks(getattr(served, place), name, plan=plan), stored.maps[name]
    for epoch in range(2):
        check(read_all(*data), stored, lambda seeds: owner[seeds], epoch)
    found = ask_status(parse_either(getattr(served, place)))
    assert any(sign in entry.basis for entry in found.ledger)
    for one in data:
        one.close()


@pytest.mark.parametrize(("name", "time_steps"), [("two", 1), ("four", 1), ("four", 3)])
def test_seeds_are_merged_by_model(served, stored, name, time_steps):
    owner, world = stored.maps[name], OWNERS[name]

    def placed(seeds):
        """Each model's seeds of the time steps with the fewest go to its others in turn."""
        size = seeds.size
        models = [sum(p >= size * (r + 1) // world for r in range(world)) for p in range(size)]
        times = [(int(owner[s]) - d) % world for s, d in zip(seeds, models, strict=True)]
        left, turns = list(range(world)), [0] * world
        for _ in range(world - time_steps):
            left.remove(min(left, key=times.count))
        for i, model in enumerate(models):
            if times[i] not in left:
                times[i] = left[turns[model] % time_steps]
                turns[model] += 1
        return (np.array(models) + times) % world

    data = open_ranks(served.roomy, name)
    for one in data:
        one.set_time_steps(time_steps)
    check(read_all(*data), stored, placed)
    for one in data:
        one.set_time_steps(0)
    check(read_all(*data), stored, lambda seeds: owner[seeds], 1)
    for one in data:
        one.close()


def test_equal_seeds_come_as_often_as_they_are_given(served, stored):
    nodes = [7, 9, 7, 7, 30, 9, 31, 32]
    data = open_ranks(served.roomy, "two", input_nodes=nodes, shuffle=False, batch_size=8)
    found = read_all(*data)
    for rank, (batch,) in enumerate(found):
        own = [i for i, node in enumerate(nodes) if stored.maps["two"][node] == rank]
        assert batch.input_id.tolist() == own
        assert batch.n_id[: len(own)].tolist() == [nodes[i] for i in own]
    for one in data:
        one.close()


def test_a_state_goes_on_with_other_ranks_and_without_a_map(served):
    data = open_ranks(served.tight, "two")
    whole = NeighborDataset(served.roomy, **OPTIONS)
    epoch = [sorted(batch.input_id.tolist()) for batch in whole]
    next(iter(data[0]))
    state = data[0].state_dict()
    whole.load_state_dict(state)
    more = open_ranks(served.roomy, "four")
    for one in more:
        one.load_state_dict(state)
    ahead = [Prefetcher(pickle.loads(pickle.dumps(one)), "cpu") for one in more]
    parts = zip(*read_all_of(ahead), strict=True)
    found = [sorted(torch.cat([b.input_id for b in ranks]).tolist()) for ranks in parts]
    assert found == epoch[1:] == [sorted(batch.input_id.tolist()) for batch in whole]
    for one in (*data, *ahead, *more, whole):
        one.close()


def read_all_of(iterables) -> list[list]:
    with ThreadPoolExecutor(len(iterables)) as pool:
        return list(pool.map(list, iterables))


@pytest.mark.parametrize("mode", ["staging", "direct", "cached"])
def test_home_batches_come_to_a_device(served, mode):
    data = open_ranks(served.roomy, "one of three")
    for rank, one in enumerate(data):
        expected = list(one)
        assert [batch.batch_size for batch in expected] == [0 if rank != 1 else n for n in SIZES]
        one.set_epoch(0)
        with Prefetcher(one, "cpu", mode=mode) as ahead:
            for found, batch in zip(ahead, expected, strict=True):
                for field in fields(batch):
                    one_value, other = getattr(found, field.name), getattr(batch, field.name)
                    same = torch.equal if isinstance(other, torch.Tensor) else operator.eq
                    assert same(one_value, other), field.name
        one.close()


def test_a_pack_of_ranges_is_not_used(served):
    options = OPTIONS | {"plan": "hyperbatch"}
    plain = [NeighborDataset(served.roomy, rank=r, world_size=2, **options) for r in range(2)]
    signs = []
    for data in (plain, open_ranks(served.roomy, "two", plan="hyperbatch")):
        read_all(*data)
        entries = ask_status(parse_either(served.roomy)).ledger
        signs.append(any("packed epochs" in entry.basis for entry in entries))
        for one in data:
            one.close()
    assert signs == [True, False]


def test_ranks_at_home_and_ranks_of_ranges_share_no_stream(served, stored):
    home = open_ranks(served.roomy, "two")
    plain = NeighborDataset(served.roomy, rank=0, world_size=2, **OPTIONS)
    starts = [next(iter(one)).input_id.tolist() for one in (home[0], plain)]
    order = order_of(0)[:BATCH]
    assert starts == [[n for n in order if stored.maps["two"][n] == 0], order[: BATCH // 2]]
    for one in (*home, plain):
        one.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frontier": "new"}, "found frontier 'new', expected 'layer'"),
        ({"world_size": 3}, "the map has 2 owners, expected 3, one for each rank"),
        ({"owners": "none"}, "owners 'none': .*no owner map 'none', expected one of"),
        ({"owners": ""}, "found no owner map, expected the name of one"),
        ({"plan": "macrobatch"}, "found plan 'macrobatch', expected 'minibatch' or 'hyperbatch'"),
        ({"time_steps": 3}, "home.time_steps is 3, expected 0 to 2"),
        ({"return_e_id": True}, "found return_e_id, expected"),
    ],
)
def test_what_cannot_be_placed_is_refused(served, options, words):
    own = OPTIONS | {"owners": "two", "world_size": 2} | options
    with pytest.raises(Refused, match=words) as refused:
        HomeDataset(served.roomy, **own).attached()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fields", [{"temporal": Temporal()}, {"edges": SeedEdges()}])
def test_edges_and_times_are_not_placed(stored, fields):
    request = Attach(
        token=0, request=0, owners="two", home=HomePlacement(), frontier="layer", world_size=2,
        **fields,
    )  # fmt: skip
    with pytest.raises(Refused, match="owners 'two': found"):
        map_digest(open_store(stored.path), request)
