"""What PyG's own loader promises of its parameters, of ours, against the source graph."""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tests.daemons import ROOT, daemon  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.later import Later  # noqa: E402
from tests.stores import write_store  # noqa: E402

samplers, pyg = Later("torch_geometric.sampler"), Later("clients.pyg")
NODES, TRAIN = 300, 75


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    rng = np.random.default_rng(0)
    graph = make_csc(rng.integers(0, 20, NODES), 1)
    num = graph.indices.size
    weights = (np.arange(num) % 3).astype(np.float32)
    times = rng.integers(0, 100, num)
    rows = {"kind": np.arange(num, dtype=np.float32)[:, None]}
    store = tmp_path_factory.mktemp("one") / "store"
    write_store(store, graph, range(TRAIN), weights=weights, times=times, edge_rows=rows)
    targets = np.repeat(np.arange(NODES), np.diff(graph.indptr))
    with daemon(store, "16M", 2) as endpoint:
        yield SimpleNamespace(
            src=graph.indices, dst=targets, weights=weights, times=times, endpoint=endpoint,
            graph=graph,
        )  # fmt: skip


def test_the_table_has_every_parameter_of_pygs_loaders() -> None:
    text = (ROOT / "docs/frameworks.md").read_text()
    table = text[text.index("| parameter of PyG's loaders") :].split("\n\n")[0]
    rows = " ".join(line.split(" | ")[0] for line in table.splitlines())
    listed = set(re.findall(r"`(\w+)`", rows)) | {"directed"}  # stands with subgraph_type
    assert "`directed=False`" in table
    theirs = Later("torch_geometric.loader")
    kinds = (theirs.NeighborLoader, theirs.LinkNeighborLoader, theirs.NodeLoader, theirs.LinkLoader)
    wanted = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    assert wanted - {"self", "kwargs", "node_sampler", "link_sampler"} <= listed


def loader(served: Any, **options: Any) -> Any:
    usual = {"num_neighbors": [4, 3], "input_nodes": "train", "batch_size": 20}
    return pyg.NeighborLoader(served.endpoint, **(usual | options))


def test_node_and_edge_ids_are_those_of_the_graph_and_seeds_come_first(served):
    seeds = []
    for data in loader(served, return_e_id=True, edge_features=True):
        src, dst = data.n_id[data.edge_index].numpy()
        assert src.tolist() == served.src[data.e_id].tolist()
        assert dst.tolist() == served.dst[data.e_id].tolist()
        assert data.edge_attr[:, 0].tolist() == data.e_id.tolist()
        assert data.n_id.unique().numel() == data.num_nodes
        assert data.e_id.unique().numel() == data.num_edges
        seeds += data.n_id[: data.batch_size].tolist()
    assert seeds == list(range(TRAIN))


@pytest.mark.parametrize(
    "nodes", [[3, 7, 7], np.array([3, 7, 7]), torch.tensor([3, 7, 7]), torch.arange(NODES) % 9 == 4]
)
def test_input_nodes_are_ids_masks_or_names(served, nodes):
    data = next(iter(loader(served, input_nodes=nodes, batch_size=NODES)))
    given = torch.as_tensor(nodes)
    wanted = given.nonzero()[:, 0] if given.dtype == torch.bool else given
    assert data.n_id[: data.batch_size].tolist() == wanted.tolist()
    assert data.input_id.tolist() == list(range(wanted.numel()))


def test_all_neighbors_of_all_hops_are_the_whole_neighborhood(served):
    data = next(iter(loader(served, num_neighbors=[-1], return_e_id=True)))
    wanted = [e for e in range(served.dst.size) if served.dst[e] < 20]
    assert sorted(data.e_id.tolist()) == wanted


def test_bidirectional_is_what_pyg_makes_of_the_same_sample(served):
    more = {"return_e_id": True, "edge_features": True, "weight_attr": "w"}
    whole = loader(served, **more)
    for plain, data in zip(
        whole, loader(served, subgraph_type="bidirectional", **more), strict=True
    ):
        output = samplers.SamplerOutput(plain.n_id, *plain.edge_index, plain.e_id)
        wanted = output.to_bidirectional()
        assert data.edge_index.tolist() == [wanted.row.tolist(), wanted.col.tolist()]
        assert torch.equal(data.n_id, plain.n_id)
        ids, ends = data.e_id.numpy(), data.n_id[data.edge_index].numpy()
        there = np.stack([served.src[ids], served.dst[ids]])
        assert ((ends == there).all(0) | (ends == there[::-1]).all(0)).all()
        assert data.edge_attr[:, 0].tolist() == ids.tolist()
        assert data.w.tolist() == served.weights[ids].tolist()
        assert "num_sampled_edges" not in data
        assert "num_sampled_nodes" not in data
        data.validate()
    enum = samplers.SubgraphType if hasattr(samplers, "SubgraphType") else None
    if enum is not None:
        next(iter(loader(served, subgraph_type=enum.bidirectional)))


TYPES = {"author": 60, "paper": 100, "venue": 9}
WRITES, IN = ("author", "writes", "paper"), ("paper", "in", "venue")
RELATIONS = [
    ("paper", "cites", "paper"), WRITES, ("paper", "rev_writes", "author"), IN,
    ("venue", "has", "paper"), ("author", "at", "venue"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Cannot convert to bidirectional:UserWarning")  # of PyG
def test_bidirectional_of_several_relations_is_what_pyg_makes_of_them(tmp_path):
    """Reverses by name, by being the only relation back, within a type, and none."""
    graph = random_hetero(np.random.default_rng(1), TYPES, RELATIONS, 9, {"paper": 5}, "paper")
    write_hetero_store(tmp_path / "store", graph)
    with daemon(tmp_path / "store", "16M", 2) as endpoint:
        ours = {"num_neighbors": [4, 3], "input_nodes": ("paper", "train"), "batch_size": 10}
        plain = list(pyg.NeighborLoader(endpoint, return_e_id=True, **ours))
        with pytest.warns(UserWarning, match=r"no reverse of \('author', 'at', 'venue'\)"):
            both = list(
                pyg.NeighborLoader(
                    endpoint, return_e_id=True, subgraph_type="bidirectional", **ours
                )
            )
    for one, data in zip(plain, both, strict=True):
        ends = {r: one[r].edge_index for r in RELATIONS}
        wanted = samplers.HeteroSamplerOutput(
            one.n_id_dict, {r: e[0] for r, e in ends.items()}, {r: e[1] for r, e in ends.items()},
            one.e_id_dict,
        ).to_bidirectional()  # fmt: skip
        for relation in RELATIONS:
            found = data[relation]
            assert torch.equal(found.edge_index[0], wanted.row[relation]), relation
            assert torch.equal(found.edge_index[1], wanted.col[relation]), relation
        assert torch.equal(data[RELATIONS[2]].edge_index, data[WRITES].edge_index.flip(0))
        assert "e_id" not in data[WRITES]
        assert torch.equal(data[RELATIONS[-1]].e_id, one[RELATIONS[-1]].e_id)
        assert "num_sampled_nodes" not in data["paper"]
        assert data["paper"].batch_size == 10 or data is both[-1]
        data.validate()


def test_with_times_batches_are_disjoint_and_no_edge_is_later(served):
    given = torch.arange(TRAIN)
    for data in loader(served, input_time=given, time_attr="t", disjoint=True, return_e_id=True):
        src, dst = data.edge_index
        assert torch.equal(data.batch[src], data.batch[dst])
        assert data.t.tolist() == served.times[data.e_id].tolist()
        assert (data.t <= data.seed_time[data.batch[dst]]).all()


def test_weights_of_zero_are_never_drawn(served):
    for data in loader(served, weight_attr="w", return_e_id=True):
        assert (data.w > 0).all()
        assert data.w.tolist() == served.weights[data.e_id].tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [20, 25])
def test_drop_last_leaves_an_incomplete_batch_out_of_each_epoch(served, size, workers):
    kept = loader(served, batch_size=size, drop_last=True, num_workers=workers, shuffle=True)
    every = loader(served, batch_size=size, shuffle=True)
    assert len(kept) == TRAIN // size
    assert len(every) == -(-TRAIN // size)
    for epoch in range(2):
        wanted = [data.n_id.tolist() for data in every][: TRAIN // size]
        found = [(data.epoch, data.n_id.tolist()) for data in kept]
        assert found == [(epoch, ids) for ids in wanted]


def test_transform_gets_the_finished_batch(served):
    found = next(iter(loader(served, transform=lambda data: (data.batch_size, data.num_nodes))))
    assert found[0] == 20


@pytest.mark.parametrize("disjoint", [False, True])
def test_induced_has_all_edges_among_the_nodes_that_were_drawn(served, disjoint):
    """Of each seed by itself, if disjoint."""
    enums, seeds = Later("torch_geometric.sampler.base"), []
    for kind in ({"subgraph_type": enums.SubgraphType.induced}, {"directed": False}):
        for data in loader(served, return_e_id=True, disjoint=disjoint, **kind):
            trees = data.batch if disjoint else torch.zeros(data.num_nodes, dtype=torch.int64)
            found = set(zip(trees.tolist(), data.n_id.tolist(), strict=True))
            assert len(found) == data.num_nodes
            wanted = [
                (tree, e)
                for tree, node in sorted(found)
                for e in np.flatnonzero(served.dst == node).tolist()
                if (tree, int(served.src[e])) in found
            ]
            of_edges = trees[data.edge_index[1]].tolist()
            assert sorted(zip(of_edges, data.e_id.tolist(), strict=True)) == sorted(wanted)
            src, dst = data.n_id[data.edge_index].numpy()
            assert src.tolist() == served.src[data.e_id].tolist()
            assert dst.tolist() == served.dst[data.e_id].tolist()
            seeds += data.n_id[: data.batch_size].tolist()
    assert seeds == 2 * list(range(TRAIN))
