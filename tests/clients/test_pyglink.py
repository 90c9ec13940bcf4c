"""LinkNeighborLoader against PyG's own: the same fields, of the same kinds."""

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.daemons import daemon  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.later import Later  # noqa: E402

geometric, pyg = Later("torch_geometric"), Later("clients.pyg")

CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
CASES = {
    "pairs": lambda: {"neg_sampling_ratio": 1.0},
    "triplets": lambda: {"neg_sampling": geometric.sampler.NegativeSampling("triplet", 2)},
    "one triplet": lambda: {"neg_sampling": "triplet"},
    "edges alone": dict,
    "labels": lambda: {"edge_label": torch.arange(40) % 3, "neg_sampling_ratio": 0.5},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A graph of two types and the endpoint that serves it."""
    nodes = {"author": 90, "paper": 120}
    rng = np.random.default_rng(1)
    graph = random_hetero(rng, nodes, (CITES, WRITES), 12, {"paper": 3, "author": 2}, "paper")
    store = tmp_path_factory.mktemp("links") / "store"
    write_hetero_store(store, graph)
    with daemon(store, "16M", 2) as endpoint:
        yield graph, endpoint


def in_memory(graph) -> Any:
    """The same for PyG."""
    data = geometric.data.HeteroData()
    for name, count in graph.num_nodes.items():
        data[name].x = torch.from_numpy(graph.x(name))
        assert data[name].x.shape[0] == count
    for relation, (indptr, indices) in graph.relations.items():
        targets = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
        data[relation].edge_index = torch.from_numpy(np.stack([indices, targets]))
    return data


def kinds(data: Any) -> dict:
    """What is there of seed edges, with shapes and dtypes."""
    found = {}
    for store in data.stores:
        for name, value in store.items():
            if name.startswith(("edge_label", "src_", "dst_", "seed_time", "input_id", "batch")):
                kind = None if value is None else (tuple(value.shape), value.dtype)
                found[getattr(store, "_key", None), name] = kind
    return found


@pytest.mark.parametrize("case", CASES)
def test_fields_are_pygs(served, case):
    if not geometric.typing.WITH_TORCH_SPARSE and not geometric.typing.WITH_PYG_LIB:
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse")
    graph, endpoint = served
    theirs = in_memory(graph)
    edges = theirs[WRITES].edge_index[:, :40]
    options = {"num_neighbors": [3, 2], "edge_label_index": (WRITES, edges), "batch_size": 16}
    options |= CASES[case]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyg-lib, which may be missing
        expected = list(geometric.loader.LinkNeighborLoader(theirs, **options))
    loader = pyg.LinkNeighborLoader(endpoint, **options)
    found = list(loader)
    assert len(found) == len(expected) == len(loader)
    for ours, other in zip(found, expected, strict=True):
        assert kinds(ours) == kinds(other)
        index = ours[WRITES].input_id
        assert index.tolist() == other[WRITES].input_id.tolist()
        label = ours[WRITES].get("edge_label")
        if label is not None:
            assert label.tolist() == other[WRITES].edge_label.tolist()
            first, second = ours[WRITES].edge_label_index[:, : index.numel()]
        elif "edge_label_index" in ours[WRITES]:
            first, second = ours[WRITES].edge_label_index
        else:
            first, second = ours["author"].src_index, ours["paper"].dst_pos_index
        ends = [ours["author"].n_id[first].tolist(), ours["paper"].n_id[second].tolist()]
        assert ends == edges[:, index].tolist()


def test_weights_of_negatives_and_lone_time_attributes_are_refused(served):
    weighted = geometric.sampler.NegativeSampling("binary", 1, src_weight=torch.ones(90))
    with pytest.raises(ValueError, match="drawn uniformly"):
        pyg.LinkNeighborLoader(served[1], [2], neg_sampling=weighted)
    with pytest.raises(TypeError, match="time_attr without edge_label_time"):
        pyg.LinkNeighborLoader(served[1], [2], time_attr="time")
    with pytest.raises(TypeError, match="time_attr without input_time"):
        pyg.NeighborLoader(served[1], [2], time_attr="time")
    with pytest.raises(TypeError, match="expected a daemon's endpoint"):
        pyg.LinkNeighborLoader(geometric.data.Data(), [2])


def test_an_epoch_goes_on_after_a_saved_state(served):
    def make() -> Any:
        return pyg.LinkNeighborLoader(
            served[1], [2], (WRITES, None), batch_size=64, shuffle=True, neg_sampling_ratio=1.0
        )

    loader, other = make(), make()
    batches = []
    for batch in loader:
        batches.append(batch)
        if batch.step == 2:
            state = loader.state_dict(batch)
    other.load_state_dict(state)
    rest = list(other)
    assert [batch.step for batch in rest] == [batch.step for batch in batches[3:]]
    for again, batch in zip(rest, batches[3:], strict=True):
        assert torch.equal(again["paper"].n_id, batch["paper"].n_id)
        assert torch.equal(again[WRITES].edge_label_index, batch[WRITES].edge_label_index)
