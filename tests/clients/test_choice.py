"""Row arrays that are chosen come alone: the others are neither read nor sent."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from blockstore.store import open_store  # noqa: E402
from clients.torch import HeteroDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import DaemonError, Refused  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.partition.partition import InfluenceOptions, PartitionOptions  # noqa: E402
from preprocess.sources.layouts import open_source  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.golden_cases import EDGES, NODES, write_hetero, write_plain  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402

OPTIONS = IngestOptions(
    block_bytes=4096, edge_ids=True, partition=PartitionOptions(8),
    influence=InfluenceOptions(hubs=0.02, halo=0.2),
)  # fmt: skip
PLANS = ("minibatch", "hyperbatch", "macrobatch")
ASKED = {"num_neighbors": (4, 3), "batch_size": 200, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A store of one type and one of several."""
    folder = tmp_path_factory.mktemp("choice")
    for name, write in (("plain", write_plain), ("hetero", write_hetero)):
        write(folder / name)
        ingest(open_source(folder / name).source, folder / f"{name}.store", OPTIONS, QUIET)
    return folder


@pytest.fixture(scope="module", params=["3M", pytest.param("6M", marks=pytest.mark.long), "64M"])
def served(request, folder):
    """Both, with hardly room, more, and room for everything."""
    one = daemon(folder / "plain.store", request.param, 2)
    with one as plain, daemon(folder / "hetero.store", request.param, 2) as hetero:
        yield SimpleNamespace(plain=plain, hetero=hetero, mem=request.param)


def epoch_of(make, endpoint, **options):
    data = make(endpoint, **ASKED, **options)
    found = list(data)
    data.close()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_chosen_arrays_are_those_of_the_whole_batch(served, plan):
    whole = epoch_of(NeighborDataset, served.plain, plan=plan)
    assert all(b.x is not None and set(b.features) == {"year"} for b in whole)
    for features, labels in ((("year",), True), (("x",), False), ((), True), ((), False)):
        options = {"features": features, "labels": labels, "plan": plan}
        found = epoch_of(NeighborDataset, served.plain, **options)
        for batch, both in zip(found, whole, strict=True):
            assert torch.equal(batch.n_id, both.n_id)
            assert torch.equal(batch.edge_index, both.edge_index)
            assert set(batch.features) == set(features) - {"x"}
            assert (batch.x is not None) == ("x" in features)
            assert batch.x is None or torch.equal(batch.x, both.x)
            for name, rows in batch.features.items():
                assert torch.equal(rows, both.features[name])
            assert (batch.y is not None) == labels
            if labels:
                assert torch.equal(batch.y, both.y)


@pytest.mark.parametrize("plan", PLANS)
def test_types_are_chosen_from_one_by_one(served, plan):
    options = {"num_neighbors": (4, 3), "input_type": "paper", "plan": plan}
    options = ASKED | options
    whole = list(HeteroDataset(served.hetero, **options))
    chosen = {"features": {"paper": ("x",), "author": ()}, "labels": False}
    found = list(HeteroDataset(served.hetero, **options, **chosen))
    for batch, both in zip(found, whole, strict=True):
        assert set(batch.x) == {"paper", "term"}  # of a type that is not named all come
        assert set(both.x) == {"paper", "term", "author"}
        assert batch.y == {}
        for name, rows in batch.x.items():
            assert torch.equal(rows, both.x[name])


@pytest.mark.parametrize("plan", PLANS)
def test_an_array_comes_as_labels(served, plan):
    whole = epoch_of(NeighborDataset, served.plain, plan=plan)
    found = epoch_of(NeighborDataset, served.plain, plan=plan, labels="year", features=("x",))
    for batch, both in zip(found, whole, strict=True):
        assert torch.equal(batch.x, both.x)
        assert batch.features == {}
        assert torch.equal(batch.y, both.features["year"].long())


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
def test_rows_of_edges_are_chosen_too(served, plan):
    more = {"edge_features": ("kind",), "features": (), "labels": False, "return_e_id": True}
    for batch in epoch_of(NeighborDataset, served.plain, plan=plan, **more):
        assert set(batch.edge_features) == {"kind"}
        assert batch.edge_features["kind"].shape == (batch.e_id.numel(), 2)
        assert batch.features == {}


def test_what_is_not_asked_for_is_not_read(folder):
    """The graph is in memory, so that what an epoch reads are rows: of labels none but these."""
    read = {}
    for features, labels in ((None, True), (("year",), True), ((), True), ((), False)):
        chosen = {} if features is None else {"features": features}
        with daemon(folder / "plain.store", "64M", 2) as endpoint:
            epoch_of(NeighborDataset, endpoint, plan="minibatch", labels=labels, **chosen)
            read[features, labels] = ask_status(parse_either(endpoint)).counters["bytes_read"]
    whole, years, labels, none = read.values()
    rows = NODES * 8 + 4096  # of labels, and of years, in whole blocks
    assert none < labels <= none + rows
    assert labels < years <= labels + rows
    assert whole > years + NODES * 12 * 2


def test_damage_of_what_is_not_asked_for_is_not_met(folder, tmp_path):
    """Of hubs and halos neither: no plan reads a page of them."""
    shutil.copytree(folder / "plain.store", tmp_path / "store")
    store = open_store(tmp_path / "store")
    (node,) = store.manifest.types
    assert node.halo is not None
    for name in ("x", "year"):
        for array in (node.features[name], node.halo.features[name]):
            for shard in store.rows(array).shards:
                raw = bytearray(Path(shard).read_bytes())
                raw[: 4096 * (len(raw) // 4096)] = bytes(4096 * (len(raw) // 4096))
                Path(shard).write_bytes(raw)
    with daemon(tmp_path / "store", "64M", 2) as endpoint:
        for plan in PLANS:
            assert all(
                b.y is not None for b in epoch_of(NeighborDataset, endpoint, plan=plan, features=())
            )
            with pytest.raises(DaemonError):
                epoch_of(NeighborDataset, endpoint, plan=plan, features=("year",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": ("size",)}, "found the array 'size': the store has x of node, year of"),
        ({"features": {"paper": ()}}, "found the type or relation 'paper': the store has x of"),
        ({"features": "x"}, "found 'x', expected names, as"),
        ({"labels": "size"}, "found the array 'size' as labels: the store has x of node"),
        ({"edge_features": ("age",)}, "found the array 'age': the store has x of node, year of"),
    ],
)
def test_unknown_arrays_are_refused_in_one_line(served, options, words):
    with pytest.raises(Refused, match=words) as raised:
        epoch_of(NeighborDataset, served.plain, **options)
    assert "\n" not in str(raised.value)


def test_datasets_tell_what_the_store_has(served):
    plain = NeighborDataset(served.plain, **ASKED)
    assert (plain.num_nodes, plain.num_edges, plain.num_features) == (NODES, EDGES, 12)
    assert plain.features == {"x": (12,), "year": (), "y": ()}
    assert plain.splits == {"train": 900, "valid": 300, "test": 300}
    assert plain.num_classes == 7
    plain.close()
    hetero = HeteroDataset(served.hetero, input_type="paper", **ASKED)
    assert hetero.num_nodes == {"author": 900, "paper": 1500, "term": 200}
    assert hetero.num_features == {"author": 6, "paper": 6, "term": 6}
    assert hetero.splits["paper"] == {"train": 500, "test": 300}
    assert hetero.num_classes == {"author": 0, "paper": 5, "term": 0}
    assert hetero.node_types == ("author", "paper", "term")
    assert hetero.num_edges["author", "writes", "paper"] == 4000
    assert set(hetero.edge_types) == set(hetero.num_edges)
    hetero.close()


@pytest.mark.parametrize("begun", [False, True])
def test_classes_are_counted_before_and_during_an_epoch(served, begun):
    years = NeighborDataset(served.plain, **ASKED, labels="year", shuffle=False)
    batches = iter(years)
    first = next(batches).step if begun else -1
    assert years.num_classes == 50
    assert [batch.step for batch in batches] == list(range(first + 1, len(years)))
    assert years.num_classes == 50
    years.close()
    assert NeighborDataset(served.plain, **ASKED, labels="x").num_classes == 12


def test_a_daemon_that_counts_no_classes_is_named(served, monkeypatch):
    data = NeighborDataset(served.plain, **ASKED)
    monkeypatch.setattr(data, "counted", data.attached)
    with pytest.raises(Refused, match="the daemon counts no classes, expected one of this version"):
        _ = data.num_classes
    data.close()
