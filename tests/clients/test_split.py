"""Pieces of batches over real daemons: all owners' together are the batch, each part once."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from blockstore.owners import remove_owners, write_owners  # noqa: E402
from blockstore.store import Store, open_store, read_rows  # noqa: E402
from clients.prefetch import Prefetcher  # noqa: E402
from clients.split import SplitBatch, SplitDataset  # noqa: E402
from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from loaderd.api.protocol import Attach, SeedEdges, Temporal  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from loaderd.sessions.owners import map_digest  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.sources.generate import GraphRecipe, generate  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import daemon, until  # noqa: E402
from tests.loaderd.packing import pack  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.split_reference import split  # noqa: E402

NODES, WIDTH, TIGHT = 3000, 500, "5M"  # of 6 MB of rows, a third has room
OPTIONS = {"num_neighbors": (4, 3), "batch_size": 80, "seed": 5}
GROUPS = {"batch_size": 240, "num_neighbors": (10, 10)}
PACKED = OPTIONS | {"seed": 6}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> tuple[Path, dict[str, list[int]], dict[str, int]]:
    """A store with maps: by name the owner of each original id, and how many there are."""
    folder = tmp_path_factory.mktemp("split")
    generate(folder / "graph", GraphRecipe(NODES, 8, WIDTH, 4, train=0.08, seed=2), QUIET)
    path = folder / "store"
    ingest(PlainSource(folder / "graph"), path, IngestOptions(block_bytes=4096), QUIET)
    opened, rng, nodes = open_store(path), np.random.default_rng(1), np.arange(NODES)
    ids = read_rows(opened, opened.manifest.types[0].original_id)
    maps, sizes = {}, {}
    for name, num, owner in (
        *((f"random{n}", n, rng.integers(0, n, NODES)) for n in (1, 2, 3, 4, 8, 300)),
        ("one", 4, np.full(NODES, 2)),
        ("parts", 4, nodes * 4 // NODES),  # of the store's order, which is breadth-first
    ):
        write_owners(opened, name, owner, num, {})
        maps[name], sizes[name] = np.empty(NODES, np.int64), num
        maps[name][ids] = owner
    other = Store(path, structs.replace(opened.manifest, fingerprint="0123"))
    write_owners(other, "other", np.zeros(NODES, np.int64), 2, {})
    for frontier in ("new", "layer"):
        pack(path, PACKED | {"frontier": frontier}, 1)
    return path, maps, sizes


@pytest.fixture(scope="module")
def served(store):
    """Endpoints with room for everything, the same over tcp, and with little room."""
    roomy = remote_daemon(store[0], "64M", "--remote-credit", "64K")
    with roomy as (local, remote), daemon(store[0], TIGHT) as tight:
        yield SimpleNamespace(roomy=local, tight=tight, remote=remote)


def open_pieces(endpoint: str, name: str, num: int, **options) -> list[SplitDataset]:
    """The datasets of all owners."""
    return [
        SplitDataset(endpoint, owners=name, owner=i, num_owners=num, **(OPTIONS | options))
        for i in range(num)
    ]


def side_by_side(*data):
    """What each of the datasets reads of a step; each waits for the daemon by itself.

    All attach before one begins: where batches come in several row groups, nobody can join later.
    """
    num_steps = max(map(len, data))
    iterators = [iter(d) for d in data]
    with ThreadPoolExecutor(len(data)) as pool:
        for _ in range(num_steps):
            yield list(pool.map(next, iterators))


def close(*datasets) -> None:
    for data in datasets:
        data.close()


def is_same(one, two) -> bool:
    """Whether two fields of records are equal, whatever they are made of."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(is_same(v, two[name]) for name, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(is_same, one, two))
    return bool(np.array_equal(one, two))


def check_same(found: SplitBatch, expected: SplitBatch) -> None:
    one, two = found.numpy(), expected.numpy()
    assert {k: (v, two[k]) for k, v in one.items() if not is_same(v, two[k])} == {}


def check_whole(pieces: list[SplitBatch], batch) -> None:
    """Nodes, seeds and edges of a batch, each of them with one owner; what is sent arrives."""
    for name in ("n_id", "input_id"):
        parts = torch.cat([getattr(piece, name) for piece in pieces])
        assert sorted(parts.tolist()) == sorted(getattr(batch, name).tolist())
    for hop, num in enumerate(batch.num_sampled_edges):
        assert sum(piece.num_sampled_edges[hop] for piece in pieces) == num
        given = [piece.exchanges[hop].send_counts for piece in pieces]
        taken = [piece.exchanges[hop].recv_counts for piece in pieces]
        assert np.array_equal(given, np.transpose(taken))
        assert not np.diagonal(given).any()


EACH = ("random2", "random8", "one", "parts", "random1", "random3", "random4")
WAYS = [  # and what the ledger says of the session
    ("roomy", "minibatch", EACH, {}, "owner map"),
    ("roomy", "auto", ("random8", "one"), {"mixed_rows": True}, "owner map"),
    ("tight", "minibatch", ("random2", "parts"), {"mixed_rows": True}, "owner map"),
    ("tight", "minibatch", ("random8",), GROUPS, "owner map"),  # in several row groups
    ("roomy", "hyperbatch", ("random1", "random3", "parts"), {}, "hyperbatches of"),
    ("tight", "auto", ("random8", "one"), PACKED, "packed epochs"),
    ("remote", "auto", ("random4", "parts"), {}, "owner map"),
]


@pytest.mark.parametrize("frontier", ["new", "layer"])
@pytest.mark.parametrize(("place", "plan", "names", "more", "sign"), WAYS)
def test_pieces_are_those_of_the_batch(served, store, place, plan, names, more, sign, frontier):
    endpoint, (_, maps, sizes) = getattr(served, place), store
    options = OPTIONS | {"plan": plan, "frontier": frontier} | more
    mixed = options.pop("mixed_rows", False)
    plain = NeighborDataset(endpoint, **options)
    batches = list(plain)
    plain.close()
    before = ask_status(parse_either(served.tight)).counters
    for name in names:
        data = open_pieces(endpoint, name, sizes[name], mixed_rows=mixed, **options)
        for pieces, batch in zip(side_by_side(*data), batches, strict=True):
            owner = maps[name][batch.n_id].tolist()
            for found, expected in zip(
                pieces, split(batch, owner, sizes[name], mixed), strict=True
            ):
                check_same(found, expected)
            check_whole(pieces, batch)
        found = ask_status(parse_either(endpoint))
        assert any(sign in entry.basis for entry in found.ledger)
        close(*data)
    counters = ask_status(parse_either(served.tight)).counters
    assert (counters["groups"] - before["groups"] > counters["batches"] - before["batches"]) == (
        more is GROUPS
    )


def test_owners_of_two_bytes(served, store):
    plain, (_, maps, _) = NeighborDataset(served.roomy, **OPTIONS), store
    batch = next(iter(plain))
    plain.close()
    data = SplitDataset(served.roomy, owners="random300", owner=270, **OPTIONS)
    data = pickle.loads(pickle.dumps(data))  # as a DataLoader's workers get it
    (expected,) = split(batch, maps["random300"][batch.n_id].tolist(), 300, wanted=[270])
    check_same(next(iter(data)), expected)
    data.close()


def test_rows_that_are_mixed_are_those_that_owners_would_send(served):
    data = open_pieces(served.roomy, "random3", 3)
    mixed = open_pieces(served.roomy, "random3", 3, mixed_rows=True)
    for pieces, whole in zip(side_by_side(*data), side_by_side(*mixed), strict=True):
        for piece in whole:
            rows = [p.x for p in pieces]
            arrived = torch.full((sum(piece.num_remote_nodes), WIDTH), torch.nan)
            for hop, exchange in enumerate(piece.exchanges):
                sent = []
                for other in pieces:
                    groups = other.exchanges[hop].send.split(other.exchanges[hop].send_counts)
                    sent.append(rows[other.owner][groups[piece.owner]])
                arrived[exchange.recv] = torch.cat(sent)
            assert torch.equal(torch.cat([rows[piece.owner], arrived]), piece.x)
    close(*data, *mixed)


def bytes_read(endpoint: str) -> int:
    return ask_status(parse_either(endpoint)).counters["bytes_read"]


@pytest.mark.parametrize(("plan", "name"), [("minibatch", "random8"), ("auto", "parts")])
def test_owners_read_together_what_one_trainer_reads(store, plan, name):
    def read(make) -> int:
        with daemon(store[0], TIGHT) as endpoint:
            data = make(endpoint)
            assert sum(1 for _ in range(2) for _ in side_by_side(*data)) == 6
            close(*data)
            return bytes_read(endpoint)

    alone = read(lambda endpoint: [NeighborDataset(endpoint, plan=plan, **OPTIONS)])
    num = store[2][name]
    assert 0 < read(lambda endpoint: open_pieces(endpoint, name, num, plan=plan)) <= 1.05 * alone


def test_another_map_of_a_name_is_for_new_sessions(served, store):
    opened, digests = open_store(store[0]), list[str]()
    olds = []
    for owner in (np.arange(NODES) % 2, np.arange(NODES) // 1500):
        write_owners(opened, "moving", owner, 2, {})
        olds.append(SplitDataset(served.roomy, owners="moving", owner=1, **OPTIONS))
        digests.append(olds[-1].attached().owners)
        remove_owners(opened, "moving")
    assert digests[0] != digests[1]
    found = [sum(batch.n_id.numel() for batch in data) for data in olds]
    assert found[0] != found[1]
    close(*olds)


@pytest.mark.parametrize("mixed_rows", [False, True])
@pytest.mark.parametrize("mode", ["staging", "direct", "cached"])
def test_pieces_come_to_a_device(served, mode, mixed_rows):
    (data,) = open_pieces(served.roomy, "random3", 3, mixed_rows=mixed_rows)[1:2]
    expected = list(data)
    data.set_epoch(0)
    with Prefetcher(data, "cpu", mode=mode) as ahead:
        for found, piece in zip(ahead, expected, strict=True):
            check_same(found, piece)


def test_one_that_leaves_in_mid_epoch_leaves_nothing(served, store):
    endpoint = parse_either(served.tight)
    before = ask_status(endpoint).ledger
    data = open_pieces(served.tight, "random2", 2)
    ones, others = map(iter, data)
    next(ones), next(others)
    assert any("owner map random2 (3,000 B)" in e.basis for e in ask_status(endpoint).ledger)
    data[1].close()
    assert len(list(ones)) == 2
    data[0].close()
    until(lambda: ask_status(endpoint).ledger == before, "slots of the sessions")


def test_a_state_goes_on_with_another_map(served):
    def seeds(pieces) -> list[int]:
        return sorted(torch.cat([p.input_id for p in pieces]).tolist())

    data = open_pieces(served.roomy, "random4", 4)
    epoch = [seeds(pieces) for pieces in side_by_side(*data)]
    data[0].set_epoch(0)
    next(iter(data[0]))
    state = data[0].state_dict()
    fewer = open_pieces(served.roomy, "random2", 2)
    for piece in fewer:
        piece.load_state_dict(state)
    ahead = Prefetcher(fewer[1], "cpu")
    assert [seeds(pieces) for pieces in zip(fewer[0], ahead, strict=True)] == epoch[1:]
    ahead.close()
    close(*data, *fewer)


def test_workers_of_a_loader_take_steps_in_turn(served):
    """Two owners, each with two workers, against one process."""
    plain = open_pieces(served.tight, "random2", 2)
    expected = list(side_by_side(*plain))
    data = open_pieces(served.tight, "random2", 2)
    loaders = [DataLoader(d, batch_size=None, num_workers=2) for d in data]
    for found, pieces in zip(side_by_side(*loaders), expected, strict=True):
        for one, other in zip(found, pieces, strict=True):
            check_same(one, other)
    close(*plain, *data)


def test_ranks_share_a_batch_and_owners_each_share(served, store):
    """Hybrid parallelism: two shares of the global batch, each of them split."""
    endpoint, owners = served.roomy, store[1]["parts"]
    for rank in range(2):
        ranks = {"rank": rank, "world_size": 2}
        plain = NeighborDataset(endpoint, **OPTIONS, **ranks)
        data = open_pieces(endpoint, "parts", 4, **ranks)
        for batch, *pieces in side_by_side(plain, *data):
            for found, expected in zip(pieces, split(batch, owners[batch.n_id], 4), strict=True):
                check_same(found, expected)
        close(plain, *data)


REFUSED = [
    ({"owners": "absent"}, "no owner map 'absent', expected one of: one, other, parts, random1"),
    ({"owners": "../x"}, "no owner map '../x'"),
    ({"owners": "other"}, "the map is of a store of fingerprint 0123"),
    ({"owners": ""}, "expected the name of an owner map"),
    ({"num_owners": 3}, "wrong number of owners: the map 'random4' has 4, expected 3"),
    ({"owner": 4}, "owner 4: the map 'random4' has 4 owners"),
    ({"edge_features": True}, "found edge_features, expected batches around seed nodes"),
    ({"return_e_id": True}, "found return_e_id"),
    ({"plan": "rows"}, "found plan 'rows'"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED)
def test_what_cannot_be_split_is_refused_in_a_line(served, wrong, text):
    with pytest.raises(Refused) as caught:
        len(SplitDataset(served.roomy, **(OPTIONS | {"owners": "random4", "owner": 0} | wrong)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"edges": SeedEdges()}, "seeds that are edges"), ({"temporal": Temporal()}, "times of the")],
)
def test_other_seeds_are_refused(store, fields, text):
    with pytest.raises(Refused, match=f"owners 'one': found {text}"):
        map_digest(open_store(store[0]), Attach(token=0, request=0, owners="one", **fields))


def test_stores_of_several_types_and_hosts_far_away_are_refused(served, store):
    opened = open_store(store[0])
    several = structs.replace(opened.manifest, types=opened.manifest.types * 2)
    with pytest.raises(Refused, match="found a store of several node types or relations"):
        map_digest(Store(store[0], several), Attach(token=0, request=0, owners="one"))
    with pytest.raises(Refused, match="mixed_rows takes rows out of the memory of a daemon on"):
        SplitDataset(served.remote, owners="one", owner=0, mixed_rows=True)
