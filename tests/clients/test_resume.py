"""Datasets over real daemons that are killed, changed, or met by another number of ranks."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from clients.connection.position import StateMismatch  # noqa: E402
from clients.torch import HopDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import NoDaemon, SessionLost  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.partition.partition import PartitionOptions  # noqa: E402
from preprocess.pipeline.progress import Progress  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import daemon, spawn, stop, until  # noqa: E402
from tests.hopstores import make_hops, write_hop_store  # noqa: E402


@pytest.fixture(scope="module")
def stores(small_graph, tmp_path_factory):
    """A store of the small graph in partitions, one of other block size, one with hops."""
    folder = tmp_path_factory.mktemp("stores")
    options = {
        "sampled": IngestOptions(block_bytes=16 << 10, partition=PartitionOptions(8)),
        "other": IngestOptions(block_bytes=32 << 10),
    }
    with (folder / "progress.txt").open("w") as stream:
        for name, chosen in options.items():
            ingest(PlainSource(small_graph), folder / name, chosen, Progress(stream))
    return SimpleNamespace(sampled=folder / "sampled", other=folder / "other", folder=folder)


@pytest.fixture(scope="module")
def endpoint(stores):
    """Of a daemon that lives on."""
    with daemon(stores.sampled, "64M", 2) as endpoint:
        yield endpoint


@pytest.fixture
def served(tmp_path):
    """Daemons at one endpoint, one after the other."""
    running = []

    def serve(store):
        running.append(spawn(store, serve.endpoint, "--mem", "64M", "--workers", "2"))
        return running[-1]

    serve.endpoint = f"ipc://{tmp_path}/d.sock"
    yield serve
    for process in running:
        if process.poll() is None:
            assert stop(process) == 0
        process.communicate()


def kill(process):
    process.kill()
    process.wait()


def arrays(batch):
    fields = (batch.x, batch.y, batch.n_id, batch.input_id, getattr(batch, "edge_index", None))
    lists = [f if isinstance(f, list) else [f] for f in fields if f is not None]
    return [tensor for found in lists for tensor in found]


def all_same(one, two):
    return all(
        (a.epoch, a.step) == (b.epoch, b.step)
        and all(torch.equal(s, t) for s, t in zip(arrays(a), arrays(b), strict=True))
        for a, b in zip(one, two, strict=True)
    )


PLANS = {
    "minibatch": {"plan": "minibatch"},
    "hyperbatch": {"plan": "hyperbatch", "hyperbatch": 4},
    "macrobatch": {"plan": "macrobatch", "macro_partitions": 2},
}


def neighbors(endpoint, **options):
    wanted = {"num_neighbors": (5, 3), "batch_size": 100, "window": 2} | options
    return NeighborDataset(endpoint, **wanted)


@pytest.mark.parametrize("plan", PLANS)
def test_an_epoch_that_was_begun_ahead_is_the_same(stores, plan):
    """After a second epoch the third is begun, whether it comes or another one does."""
    with daemon(stores.sampled, "64M", 2) as endpoint:

        def built():
            return ask_status(parse_either(endpoint)).counters["batches"]

        data = neighbors(endpoint, **PLANS[plan])
        seen = [list(data) for _ in range(2)]
        until(lambda: built() > sum(map(len, seen)), "no batch is built ahead")
        seen.append(list(data))
        until(lambda: built() > sum(map(len, seen)), "no batch is built ahead")
        data.set_epoch(7)
        seen.append(list(data))
        data.close()
        for epoch, found in zip((0, 1, 2, 7), seen, strict=True):
            alone = neighbors(endpoint, **PLANS[plan])
            alone.set_epoch(epoch)
            assert all_same(found, list(alone))
            alone.close()


@pytest.mark.parametrize("plan", PLANS)
def test_an_epoch_over_daemons_that_are_killed(stores, served, plan):
    process = served(stores.sampled)
    whole = list(neighbors(served.endpoint, **PLANS[plan]))
    data, seen = neighbors(served.endpoint, **PLANS[plan]), []
    for batch in data:
        seen.append(batch)
        if batch.step in ((0, 4) if plan == "minibatch" else (4,)):
            kill(process)
            process = served(stores.sampled)
        if batch.step == 2:  # it drains
            assert stop(process) == 0
            process = served(stores.sampled)
    assert all_same(seen, whole)
    kill(process)
    state = data.state_dict()  # needs no daemon
    assert (state["epoch"], state["step"]) == (1, -1)
    served(stores.sampled)
    assert [b.epoch for b in islice(data, 2)] == [1, 1]
    data.close()


@pytest.mark.parametrize("views", [False, True])
def test_hop_wise_batches_over_a_daemon_that_is_killed(tmp_path, served, views):
    write_hop_store(tmp_path / "hops", {"train": make_hops(600, 25, {"sym": 2}, 1)})
    process = served(tmp_path / "hops")

    def dataset():
        return HopDataset(served.endpoint, batch_size=50, views=views, window=2)

    copies = [[t.clone() for t in arrays(b)] for b in dataset()]
    data = dataset()
    for batch in data:
        if batch.step == 3:
            kill(process)
            process = served(tmp_path / "hops")
        for now, then in zip(arrays(batch), copies[batch.step], strict=True):
            assert torch.equal(now, then)  # also behind the daemon's end
    assert batch.step == len(copies) - 1
    data.close()


def test_without_a_time_to_reconnect_a_lost_session_is_an_error(stores, served):
    process = served(stores.sampled)
    batches = iter(neighbors(served.endpoint, reconnect_s=0))
    next(batches)
    kill(process)
    with pytest.raises(SessionLost):
        list(batches)


def test_a_daemon_that_does_not_come_back(stores, served):
    process = served(stores.sampled)
    data = neighbors(served.endpoint, reconnect_s=0.2)
    batches = iter(data)
    next(batches)
    kill(process)
    with pytest.raises(NoDaemon, match=r"waited 0\.2 s"):
        list(batches)


def test_a_trainer_that_starts_before_its_daemon(stores, served):
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(neighbors, served.endpoint, reconnect_s=60.0)
        assert not made.done()
        served(stores.sampled)
        assert len(made.result()) > 0
    with pytest.raises(NoDaemon, match="no daemon listens there"):
        neighbors(f"{served.endpoint}.other", reconnect_s=0.05)


def test_another_store_is_named(stores, served):
    process = served(stores.sampled)
    data = neighbors(served.endpoint)
    batches = iter(data)
    state, first = data.state_dict(), next(batches)
    kill(process)
    served(stores.other)
    with pytest.raises(StateMismatch, match=state["resolved"]["fingerprint"]):
        list(batches)
    assert first.x.sum().isfinite()  # what was handed out stays
    fresh = neighbors(served.endpoint)
    fresh.load_state_dict(state)
    with pytest.raises(StateMismatch, match="serves another store"):
        iter(fresh)


def test_another_sampler_is_named(endpoint):
    data = neighbors(endpoint)
    state = data.state_dict()
    state["resolved"]["sampler"] += 1
    with pytest.raises(StateMismatch, match=r"sampler 2 \(now 1\)"):
        data.load_state_dict(state)
    late = neighbors(endpoint)
    late.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"sampler 2 \(now 1\)"):
        iter(late)


def test_a_state_goes_on_with_another_number_of_ranks(endpoint):
    whole = list(neighbors(endpoint))
    data = neighbors(endpoint)
    list(islice(data, 4))
    state = json.loads(json.dumps(data.state_dict()))
    ranks = [neighbors(endpoint, rank=r, world_size=3) for r in range(3)]
    for one in ranks:
        one.load_state_dict(state)
    steps = list(zip(*ranks, strict=True))
    assert [parts[0].step for parts in steps] == list(range(4, len(whole)))
    for parts in steps:
        together = torch.cat([p.input_id for p in parts])
        assert torch.equal(together, whole[parts[0].step].input_id)
    ranks[0].set_epoch(1)
    list(islice(ranks[0], 2))
    back = neighbors(endpoint)  # and to one
    back.load_state_dict(ranks[0].state_dict())
    assert [(b.epoch, b.step) for b in back] == [(1, s) for s in range(2, len(whole))]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("to_the_end", [False, True])
def test_behind_the_last_step_torchdatas_loader_begins_the_next_epoch(endpoint, to_the_end):
    with stateful(neighbors(endpoint), 0) as loader:
        batches = iter(loader)
        assert len(list(batches if to_the_end else islice(batches, 12))) == 12
        state = loader.state_dict()
    with stateful(neighbors(endpoint), 0) as loader:
        loader.load_state_dict(state)
        assert [(b.epoch, b.step) for b in loader] == [(1, step) for step in range(12)]


@contextmanager
def stateful(dataset, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
    try:
        yield loader
    finally:
        dataset.close()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize(("workers", "consumed"), [(0, 5), (0, 11), (2, 1), (2, 11), (2, 12)])
def test_under_torchdatas_loader(endpoint, workers, consumed):
    expected = list(neighbors(endpoint))
    assert len(expected) == 12
    with stateful(neighbors(endpoint), workers) as loader:
        batches = iter(loader)
        seen = list(islice(batches, consumed))
        state = loader.state_dict()
        del batches
    with stateful(neighbors(endpoint), workers) as loader:
        loader.load_state_dict(state)
        seen += loader
        assert all_same(seen, expected)
        if workers:
            loader.dataset.set_epoch(1)
        assert [(b.epoch, b.step) for b in islice(loader, 3)] == [(1, 0), (1, 1), (1, 2)]
