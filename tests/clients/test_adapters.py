"""What other frameworks are given: PyG's records, layers, GraphBolt's fields, arrays by DLPack."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from clients.dgl import DataLoader as DglLoader  # noqa: E402
from clients.dgl import to_sample  # noqa: E402
from clients.mfg import layer_fanouts, to_hetero_mfgs, to_mfgs, to_minibatch  # noqa: E402
from clients.models import GraphSage  # noqa: E402
from clients.torch import HeteroDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.stores import write_store  # noqa: E402

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")
FANOUTS = {CITES: [4, 3], WRITES: [3, 0], WRITTEN: [0, 2]}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A graph of one type, and the endpoint of its daemon."""
    graph = make_csc(np.random.default_rng(0).integers(0, 20, 300), 1)
    store = tmp_path_factory.mktemp("one") / "store"
    write_store(store, graph, range(0, 300, 4))
    with daemon(store, "16M", 2) as endpoint:
        yield SimpleNamespace(graph=graph, endpoint=endpoint)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A graph of several types, and the endpoint of its daemon."""
    types = {"author": 60, "paper": 100}
    graph = random_hetero(
        np.random.default_rng(1), types, (CITES, WRITES, WRITTEN), 9, {"paper": 5}, "paper"
    )
    store = tmp_path_factory.mktemp("several") / "store"
    write_hetero_store(store, graph)
    with daemon(store, "16M", 2) as endpoint:
        yield SimpleNamespace(graph=graph, endpoint=endpoint)


def hetero(several, **options):
    wanted = {"num_neighbors": FANOUTS, "batch_size": 10, "input_type": "paper"} | options
    return HeteroDataset(several.endpoint, "train", return_e_id=True, **wanted)


@pytest.fixture
def pyg():
    """PyG, with an implementation of its own loader."""
    package = pytest.importorskip("torch_geometric")
    if not package.typing.WITH_PYG_LIB and not package.typing.WITH_TORCH_SPARSE:
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse")
    return package


def test_hetero_data_has_the_fields_of_pygs_own(several, pyg):
    from clients.pyg import NeighborLoader

    graph = several.graph
    data = pyg.data.HeteroData()
    data["paper"].x = torch.from_numpy(graph.x("paper"))
    data["paper"].y = torch.from_numpy(graph.labels["paper"])
    data["author"].num_nodes = 60
    for relation, (indptr, indices) in graph.relations.items():
        targets = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
        data[relation].edge_index = torch.from_numpy(np.stack([indices, targets]))
    train = torch.from_numpy(graph.train["paper"])
    arguments = {"num_neighbors": FANOUTS, "batch_size": 10, "shuffle": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyg-lib, which may be missing
        theirs = next(
            iter(pyg.loader.NeighborLoader(data, input_nodes=("paper", train), **arguments))
        )
    loader = NeighborLoader(
        several.endpoint, input_nodes=("paper", train), return_e_id=True, **arguments
    )
    ours = next(iter(loader))
    assert set(ours.node_types) == set(theirs.node_types)
    assert set(ours.edge_types) == set(theirs.edge_types)
    for kind in (*theirs.node_types, *theirs.edge_types):
        for name, value in theirs[kind].to_dict().items():
            if value is not None:
                assert type(ours[kind][name]) is type(value), (kind, name)
                assert getattr(ours[kind][name], "dtype", None) == getattr(value, "dtype", None)
    assert ours["paper"].batch_size == 10
    assert set(ours.num_sampled_nodes_dict) == set(theirs.node_types)
    assert set(ours.num_sampled_edges_dict) == set(theirs.edge_types)
    assert torch.equal(ours["paper"].n_id[:10], train[ours["paper"].input_id])
    assert ours.validate()
    loader.dataset.close()


def test_hetero_data_goes_through_pygs_own_model(several, pyg):
    from clients.pyg import NeighborLoader

    model = pyg.nn.to_hetero(
        pyg.nn.GraphSAGE((-1, -1), 8, 2, 3), (["author", "paper"], [CITES, WRITES, WRITTEN])
    )
    embedding = torch.nn.Embedding(60, 5)
    for batch in NeighborLoader(several.endpoint, FANOUTS, ("paper", "train"), 10):
        x = {"paper": batch["paper"].x, "author": embedding(batch["author"].n_id)}
        edges = {r: batch[r].edge_index for r in (CITES, WRITES, WRITTEN)}
        assert model(x, edges)["paper"].shape == (batch["paper"].num_nodes, 3)


def forward(model, x, mfgs):
    """The model layer by layer."""
    h = x
    for layer, mfg in zip(model.layers, mfgs, strict=True):
        h = layer(h[: mfg.num_src], h[: mfg.num_dst], torch.stack([mfg.src, mfg.dst]))
        h = torch.relu(h) if layer is not model.layers[-1] else h
    return h


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_layers_are_what_a_model_goes_through(one, frontier):
    graph = one.graph
    model = GraphSage(2, 8, 3, 2, dropout=0.0).eval()
    data = NeighborDataset(
        one.endpoint, "train", (5, 4), 16, frontier=frontier, return_e_id=True
    )  # fmt: skip
    for batch in data:
        mfgs = to_mfgs(batch)
        assert mfgs[-1].num_dst == batch.batch_size
        assert mfgs[0].num_src == batch.num_nodes
        for mfg in mfgs:
            n_id = batch.n_id.numpy()
            np.testing.assert_array_equal(n_id[mfg.src], graph.indices[mfg.e_id])
            columns = np.searchsorted(graph.indptr, mfg.e_id.numpy(), side="right") - 1
            np.testing.assert_array_equal(n_id[mfg.dst], columns)
            assert int(mfg.src.max()) < mfg.num_src
            assert int(mfg.dst.max()) < mfg.num_dst
            counts = torch.bincount(mfg.dst, minlength=mfg.num_dst)
            assert mfg.indptr.diff().tolist() == counts.tolist()
        if frontier == "new":
            counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
            whole = model(batch.x, batch.edge_index, *counts)
            torch.testing.assert_close(forward(model, batch.x, mfgs), whole)
        else:  # each layer has draws of its own
            assert mfgs[0].src.numel() == batch.num_sampled_edges[1]
    data.close()


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_layers_of_several_types(several, frontier):
    for batch in hetero(several, frontier=frontier):
        layers = to_hetero_mfgs(batch)
        assert layers[-1].num_dst == {"author": 0, "paper": batch.batch_size}
        assert layers[0].num_src == batch.num_nodes
        for layer in layers:
            for (src, name, dst), mfg in layer.relations.items():
                _, indices = several.graph.relations[src, name, dst]
                found = batch.n_id[src][mfg.src].numpy()
                np.testing.assert_array_equal(found, indices[mfg.e_id])
                assert (mfg.num_src, mfg.num_dst) == (layer.num_src[src], layer.num_dst[dst])
                assert mfg.indptr.numel() == mfg.num_dst + 1
                assert (mfg.dst.diff() >= 0).all()


def test_minibatches_have_graphbolts_fields(one, several):
    batch = next(iter(NeighborDataset(one.endpoint, "train", (5, 4), 16, return_e_id=True)))
    mini = to_minibatch(batch)
    assert torch.equal(mini.seeds, batch.n_id[:16])
    assert mini.node_features["feat"] is batch.x
    assert mini.labels is None
    outer = mini.sampled_subgraphs[0]
    assert outer.indptr[-1] == outer.indices.numel() == batch.edge_index.size(1)
    assert torch.equal(outer.original_row_node_ids, batch.n_id)
    assert torch.equal(mini.sampled_subgraphs[-1].original_column_node_ids, mini.seeds)
    found = next(iter(hetero(several)))
    mini = to_minibatch(found)
    assert mini.seeds["paper"].tolist() == found.n_id["paper"][:10].tolist()
    assert mini.labels["paper"].numel() == 10
    assert set(mini.node_features) == {("paper", "feat")}
    assert set(mini.sampled_subgraphs[0]) == {":".join(r) for r in FANOUTS}


def test_dgls_loader_without_dgl(one, several):
    loader = DglLoader(one.endpoint, fanouts=[4, 6], batch_size=16)
    request = loader.dataset.attached().resolved
    assert request.fanouts == ((6,), (4,))  # DGL's list begins at the input
    assert request.frontier == "layer"
    inputs, outputs, blocks = next(iter(loader))
    assert blocks[0].num_src == inputs.numel()
    assert blocks[-1].num_dst == outputs.numel() == 16
    loader = DglLoader(several.endpoint, [4, 6], "train", 10, input_type="paper")
    inputs, outputs, blocks = next(iter(loader))
    assert blocks[0].num_src == {t: i.numel() for t, i in inputs.items()}
    assert outputs["paper"].numel() == 10
    assert layer_fanouts([1, 2, 3]) == [3, 2, 1]


def test_dgls_blocks(one, several):
    dgl = pytest.importorskip("dgl", exc_type=Exception)
    batch = next(iter(NeighborDataset(one.endpoint, "train", (5, 4), 16, frontier="layer")))
    blocks = to_sample(batch, dgl).blocks
    assert blocks[0].num_src_nodes() == batch.num_nodes
    assert blocks[-1].num_dst_nodes() == 16
    assert torch.equal(blocks[0].srcdata["feat"], batch.x)
    found = next(iter(hetero(several, frontier="layer")))
    blocks = to_sample(found, dgl).blocks
    assert blocks[-1].num_dst_nodes("paper") == 10
    assert blocks[-1].dstnodes["paper"].data["label"].numel() == 10


def test_dgl_that_cannot_be_imported_is_refused_in_one_line(one, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dgl", None)
    with pytest.raises(Refused, match="take plain tensors") as caught:
        DglLoader(one.endpoint, [4], as_dgl=True)
    assert "\n" not in str(caught.value)


def test_arrays_share_memory_and_speak_dlpack(one, several):
    batch = next(iter(NeighborDataset(one.endpoint, "train", (5, 4), 16)))
    arrays = batch.numpy()
    for name in ("x", "edge_index", "n_id", "input_id"):
        tensor = getattr(batch, name)
        assert isinstance(arrays[name], np.ndarray)
        assert np.shares_memory(arrays[name], tensor.numpy())
        assert torch.equal(torch.from_dlpack(arrays[name]), tensor)
        np.testing.assert_array_equal(np.from_dlpack(tensor), arrays[name])
    assert arrays["num_sampled_nodes"] == batch.num_sampled_nodes
    found = next(iter(hetero(several)))
    arrays = found.numpy()
    assert np.shares_memory(arrays["x"]["paper"], found.x["paper"].numpy())
    assert torch.equal(torch.from_dlpack(arrays["edge_index"][CITES]), found.edge_index[CITES])
    half = batch.map(lambda t: t.bfloat16() if t.is_floating_point() else t)
    np.testing.assert_array_equal(half.numpy()["x"], half.x.float().numpy())
