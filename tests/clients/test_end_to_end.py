"""The clients over a real daemon: PyG's invariants, orders, workers, states, seeds, training."""

import warnings
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.pipeline.progress import Progress  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.processes import run_main  # noqa: E402

FANOUTS = (6, 4)


@pytest.fixture(scope="module")
def graph(small_graph, tmp_path_factory):
    """The source's arrays, and the endpoint of a daemon that serves them."""
    folder = tmp_path_factory.mktemp("served")
    options = IngestOptions(block_bytes=16 << 10, edge_ids=True)
    with (folder / "progress.txt").open("w") as stream:
        ingest(PlainSource(small_graph), folder / "store", options, Progress(stream))
    names = ("edge_index", "node_feat", "node_label", "train_idx", "valid_idx", "test_idx")
    arrays = {name: np.load(small_graph / f"{name}.npy") for name in names}
    with daemon(folder / "store", "64M", 2) as endpoint:
        yield SimpleNamespace(endpoint=endpoint, store=folder / "store", **arrays)


def dataset(graph, **options):
    wanted = {"num_neighbors": FANOUTS, "batch_size": 100} | options
    return NeighborDataset(graph.endpoint, **wanted)


def same(a, b):
    fields = ("x", "y", "edge_index", "n_id", "input_id")
    return (a.epoch, a.step) == (b.epoch, b.step) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in fields
    )


def all_same(one, two):
    return all(same(a, b) for a, b in zip(one, two, strict=True))


def check_structure(graph, batch):
    """Counts are min(degree, fanout); local ids are in order of first occurrence."""
    degrees = np.bincount(graph.edge_index[1], minlength=graph.node_label.size)
    targets, n_id = batch.edge_index[1].numpy(), batch.n_id.numpy()
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    assert (sum(nodes), sum(edges)) == (n_id.size, targets.size)
    first = edge = 0
    for hop, fanout in enumerate(FANOUTS):
        counts = np.bincount(targets[edge : edge + edges[hop]], minlength=n_id.size)
        frontier = slice(first, first + nodes[hop])
        np.testing.assert_array_equal(counts[frontier], np.minimum(degrees[n_id[frontier]], fanout))
        assert counts.sum() == counts[frontier].sum()
        first, edge = first + nodes[hop], edge + edges[hop]
    assert np.unique(n_id).size == n_id.size
    new = [s for s in dict.fromkeys(batch.edge_index[0].tolist()) if s >= nodes[0]]
    assert new == list(range(nodes[0], n_id.size))


def test_batches_have_pygs_invariants(graph):
    source_edges = Counter(map(tuple, graph.edge_index.T.tolist()))
    seeds = []
    for batch in dataset(graph, return_e_id=True):
        check_structure(graph, batch)
        ends = batch.n_id[batch.edge_index]
        assert not Counter(map(tuple, ends.T.tolist())) - source_edges
        np.testing.assert_array_equal(graph.edge_index[:, batch.e_id.numpy()], ends.numpy())
        assert batch.e_id.unique().numel() == batch.e_id.numel()
        n_id = batch.n_id.numpy()
        np.testing.assert_array_equal(batch.x.numpy(), graph.node_feat[n_id], strict=True)
        np.testing.assert_array_equal(batch.y.numpy(), graph.node_label[n_id])
        np.testing.assert_array_equal(n_id[: batch.batch_size], graph.train_idx[batch.input_id])
        seeds += batch.input_id.tolist()
    assert sorted(seeds) == list(range(graph.train_idx.size))


def test_epochs_differ_and_repeat(graph):
    data = dataset(graph)
    zero, one = list(data), list(data)
    assert not torch.equal(zero[0].n_id, one[0].n_id)
    data.set_epoch(0)
    assert all_same(zero, data)
    assert not torch.equal(zero[0].n_id, next(iter(dataset(graph, seed=1))).n_id)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_keep_the_order(graph, context):
    data = dataset(graph)
    data.set_epoch(1)
    alone = list(data)
    data.set_epoch(1)
    workers = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert len(workers) == len(alone) == len(data)
    assert all_same(alone, workers)


def test_a_resumed_run_equals_an_uninterrupted_one(graph):
    data = dataset(graph)
    whole = [*data, *data]
    resumed, state = [], None
    for steps in (3, 1, 5, 9, 100):
        data = dataset(graph)
        if state is not None:
            data.load_state_dict(state)
        resumed += islice(data, steps)
        state = data.state_dict()
        data.close()
    resumed += list(islice(data, len(whole) - len(resumed)))
    assert all_same(whole, resumed)


def test_a_broken_off_epoch_leaves_nothing_behind(graph):
    data = dataset(graph, window=2)
    for number in range(6):
        assert [b.epoch for b in islice(data, 3)] == [number] * 3
    data.set_epoch(0)
    assert all_same(data, dataset(graph))


def test_two_datasets_in_one_process(graph):
    train, valid = dataset(graph), dataset(graph, split="valid", shuffle=False)
    expected = list(dataset(graph))
    seen = []
    for ours, theirs in zip(train, expected, strict=True):
        assert same(ours, theirs)
        if not seen:
            seen = [batch.n_id[: batch.batch_size] for batch in valid]
    assert torch.cat(seen).tolist() == graph.valid_idx.tolist()


@pytest.mark.parametrize("kind", ["ids", "mask", "all", "duplicates"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_input_nodes(graph, kind, shuffle):
    mask = np.zeros(graph.node_label.size, bool)
    mask[graph.test_idx] = True
    wanted = {
        "ids": graph.test_idx[::-1].copy(),
        "mask": torch.from_numpy(mask),
        "all": "all",
        "duplicates": [5, 7, 5, 5, 9],
    }[kind]
    ids = {"mask": np.flatnonzero(mask), "all": np.arange(mask.size)}.get(kind, wanted)
    batches = list(dataset(graph, input_nodes=wanted, shuffle=shuffle, batch_size=300))
    places = torch.cat([b.input_id for b in batches]).numpy()
    seeds = torch.cat([b.n_id[: b.batch_size] for b in batches]).numpy()
    np.testing.assert_array_equal(seeds, np.asarray(ids)[places])
    np.testing.assert_array_equal(np.sort(places), np.arange(len(ids)))
    assert (places.tolist() == sorted(places)) is not shuffle


def test_ranks_share_each_batch(graph):
    one = list(dataset(graph))
    two = list(zip(*(dataset(graph, rank=r, world_size=2) for r in range(2)), strict=True))
    assert len(one) == len(two)
    for whole, parts in zip(one, two, strict=True):
        assert torch.equal(whole.input_id, torch.cat([p.input_id for p in parts]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "holdout"}, "holdout"),
        ({"num_neighbors": (5, 0)}, "fanout"),
        ({"input_nodes": [0, 4000]}, "4000"),
        ({"input_nodes": np.ones(99, bool)}, "a mask over 99 nodes, expected one over the"),
        ({"batch_size": 0}, "batch_size"),
        ({"plan": "magic"}, "magic"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(graph, options, message):
    with pytest.raises(Refused, match=message) as caught:
        iter(dataset(graph, **options))
    assert "\n" not in str(caught.value)


def test_pygs_loader_by_one_changed_line(graph):
    pyg = pytest.importorskip("torch_geometric")
    if not pyg.typing.WITH_PYG_LIB and not pyg.typing.WITH_TORCH_SPARSE:
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse")
    from clients.pyg import NeighborLoader

    whole = pyg.data.Data(
        x=torch.from_numpy(graph.node_feat),
        y=torch.from_numpy(graph.node_label),
        edge_index=torch.from_numpy(graph.edge_index),
    )
    arguments = {
        "num_neighbors": list(FANOUTS),
        "input_nodes": torch.from_numpy(graph.train_idx),
        "batch_size": 100,
        "shuffle": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyg-lib, which may be missing
        theirs = next(iter(pyg.loader.NeighborLoader(whole, **arguments)))
    ours = next(iter(NeighborLoader(graph.endpoint, **arguments)))
    for name, value in theirs.to_dict().items():
        if name != "e_id" and value is not None:
            assert type(ours[name]) is type(value), name
            assert getattr(ours[name], "dtype", None) == getattr(value, "dtype", None), name
    assert ours.num_nodes == ours.x.size(0) == ours.n_id.numel()
    assert ours.validate()


@pytest.mark.parametrize("workers", [0, 2])
def test_pyg_loader_epochs_advance(graph, workers):
    pytest.importorskip("torch_geometric")
    from clients.pyg import NeighborLoader

    loader = NeighborLoader(
        graph.endpoint, list(FANOUTS), "train", 200, True, num_workers=workers,
        transform=lambda data: data.update({"mark": data.step}),
    )  # fmt: skip
    for number in range(2):
        seen = list(loader)
        assert [(d.epoch, d.mark) for d in seen] == [(number, s) for s in range(len(loader))]
    loader.load_state_dict(loader.state_dict(seen[1]))
    assert [(d.epoch, d.step) for d in loader] == [(1, s) for s in range(2, len(loader))]
    assert {d.epoch for d in loader} == {2}


def test_training_learns(graph, capsys):
    command = ["clients.train", graph.endpoint, "--epochs", "4", "--learning-rate", "0.01"]
    options = ["--num-neighbors", "10", "5", "--batch-size", "200", "--hidden", "32"]
    code, (out, errors) = run_main(*command, *options), capsys.readouterr()
    assert code == 0, errors
    *epochs, last = out.splitlines()
    assert len(epochs) == 4
    assert all("loss" in line and "waiting for data" in line for line in epochs)
    assert last.startswith("test accuracy ")
    assert float(last.split()[-1]) > 0.5  # of 5 classes


def test_training_without_a_daemon_says_so_in_one_line(tmp_path, capsys):
    assert run_main("clients.train", f"ipc://{tmp_path}/none") == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ipc://")
    assert errors.count("\n") == 1
