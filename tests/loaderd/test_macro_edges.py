"""Rows of edges with macro-batches: of every edge that is drawn those that the source has of it."""

from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.torch import HeteroDataset, NeighborDataset  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.partition.partition import InfluenceOptions  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.preprocess.naive import Graph  # noqa: E402
from tests.preprocess.partitions import ingest_parts  # noqa: E402
from tests.preprocess.test_hetero import edge_arrays  # noqa: E402
from tests.remotes import remote_daemon  # noqa: E402
from tests.stores import write_store  # noqa: E402

NODES = 400
OFFSETS = (0, 60, 61, 150, 230, 230, 310, 400)  # one of one node, one empty
HUBS = (17, 33, 200)
HALOS = ([70, 200, 399], [], [0, 17, 300], [61, 62], [5], [], [1, 2, 3, 200, 201])
EVERY = {"return_e_id": True, "edge_features": True, "edge_weights": True, "edge_times": True}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Columns from none to several blocks, copied ones too; rows of edges of 400 and of 8 bytes."""
    rng = np.random.default_rng(1)
    degrees = rng.integers(0, 30, NODES)
    degrees[[5, 17, 61, 200, 229, 399]] = (3000, 1500, 2000, 900, 2500, 2100)
    csc = make_csc(degrees, 2)
    num = csc.indices.size
    rows = {
        "feat": (np.arange(num)[:, None] * 4 + np.arange(100)).astype(np.float32),
        "type": rng.integers(0, 9, num),
    }
    weights = rng.exponential(1.0, num).astype(np.float32)
    store = tmp_path_factory.mktemp("macro") / "store"
    write_store(
        store, csc, range(NODES), weights=weights, times=np.arange(num) << 20, offsets=OFFSETS,
        hubs=HUBS, halos=HALOS, edge_rows=rows,
    )  # fmt: skip
    return csc, rows, weights, store


@pytest.fixture(scope="module")
def endpoint_of(graph):
    """With hardly room for one macro-batch, with more, and with room for all rows of edges."""
    with ExitStack() as daemons:

        @cache
        def endpoint(mem: str) -> str:
            return daemons.enter_context(daemon(graph[3], mem, 2))

        yield endpoint


def epoch_of(make: Any, endpoint: str, **options: Any) -> list[Any]:
    data = make(endpoint, batch_size=50, plan="macrobatch", seed=3, **options)
    found = list(data)
    data.close()
    return found


CASES: dict[str, dict[str, Any]] = {
    "without copies": {"num_neighbors": (4, 3), "hubs": False, "halos": False},
    "hubs": {"num_neighbors": (4, 3), "halos": False},
    "halos": {"num_neighbors": (4, 3), "hubs": False},
    "both": {"num_neighbors": (4, 3), "frontier": "layer"},
    "all": {"num_neighbors": (-1, 2)},
    "replace": {"num_neighbors": (5, 4), "replace": True},
    "weighted": {"num_neighbors": (4, 3), "weighted": True},
    "labor": {"num_neighbors": (4, 3), "sampler": "labor"},
}


# Each case once at least, copies and drawing with each budget.
SOME = {
    "5M": ("without copies", "both", "all", "weighted"),
    "8M": ("hubs", "replace", "labor"),
    "64M": ("halos", "both"),
}


@pytest.mark.parametrize(
    ("mem", "case"),
    [
        pytest.param(mem, case, marks=() if case in some else pytest.mark.long)
        for mem, some in SOME.items()
        for case in CASES
    ],
)
def test_edges_bring_what_the_source_has_of_them(graph, endpoint_of, mem, case):
    csc, rows, weights, _ = graph
    endpoint = endpoint_of(mem)
    options = {"macro_partitions": 3, **CASES[case]}
    plain = epoch_of(NeighborDataset, endpoint, return_e_id=True, **options)
    seen = set[int]()
    for batch, other in zip(
        epoch_of(NeighborDataset, endpoint, **EVERY, **options), plain, strict=True
    ):
        edges = batch.e_id.numpy()
        seen |= set(edges.tolist())
        assert set(batch.edge_features) == set(rows)
        for name, values in rows.items():
            np.testing.assert_array_equal(batch.edge_features[name].numpy(), values[edges])
        np.testing.assert_array_equal(batch.edge_weight.numpy(), weights[edges])
        np.testing.assert_array_equal(batch.edge_time.numpy(), edges << 20)
        np.testing.assert_array_equal(csc.indices[edges], batch.n_id[batch.edge_index[0]])
        for name in ("n_id", "edge_index", "e_id", "x", "input_id"):
            assert torch.equal(getattr(batch, name), getattr(other, name)), name
    assert len(seen) > 1000


def test_they_come_without_ids_and_over_tcp_and_by_row_areas(graph):
    options = {"num_neighbors": (12, 8), "macro_partitions": 2, "window": 1}
    wanted = {"edge_features": ("feat",), "features": (), "edge_weights": False}
    with remote_daemon(graph[3], "3M") as (local, remote):
        expected = epoch_of(NeighborDataset, local, return_e_id=True, **options)
        for endpoint in (local, remote):
            before = ask_status(parse_either(local)).counters
            found = epoch_of(NeighborDataset, endpoint, **wanted, **options)
            after = ask_status(parse_either(local)).counters
            assert after["rows_copied"] > before["rows_copied"]
            for batch, plain in zip(found, expected, strict=True):
                assert batch.x is None
                assert batch.e_id is None
                rows = batch.edge_features["feat"].numpy()
                np.testing.assert_array_equal(rows, graph[1]["feat"][plain.e_id])


WRITES, CITES, OF = ("a", "writes", "p"), ("p", "cites", "p"), ("p", "of", "a")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Three relations, one of them without rows; hubs and halos of both types by a real ingest."""
    rng, graph = np.random.default_rng(2), Graph()
    for name, count in (("a", 90), ("p", 300)):
        graph.add_type(name, count, x=rng.standard_normal((count, 3)), train=np.arange(0, count, 2))
    pairs = {}
    for (src, name, dst), num, wanted in (
        (WRITES, 1500, {"attr", "weight"}), (CITES, 4000, {"attr", "kind", "time"}), (OF, 1200, {})
    ):  # fmt: skip
        low = rng.integers(0, [graph.num_nodes[src], graph.num_nodes[dst]], (num, 2))
        pairs[src, name, dst] = np.minimum(low, low[::-1])
        graph.add_relation(
            src, name, dst, pairs[src, name, dst].tolist(), **edge_arrays(set(wanted), num)
        )
    options = IngestOptions(
        block_bytes=4096, edge_ids=True, influence=InfluenceOptions(hubs=0.05, halo=0.4)
    )
    store = tmp_path_factory.mktemp("several") / "store"
    parts = rng.integers(0, 6, 390).astype(np.uint32)
    ingest_parts(parts, graph, store, options)
    return pairs, store


@pytest.mark.parametrize(
    ("mem", "kind"),
    [
        ("2M", "p"), ("4M", "a"),
        *(pytest.param(*case, marks=pytest.mark.long)
          for case in (("2M", "a"), ("4M", "p"), ("64M", "a"), ("64M", "p"))),
    ],
)  # fmt: skip
def test_each_relation_has_its_own(several, mem, kind):
    pairs, store = several
    with daemon(store, mem, 2) as endpoint:
        options = {"num_neighbors": (5, 3), "input_type": kind, "macro_partitions": 2}
        seen = dict.fromkeys(pairs, 0)
        for batch in epoch_of(HeteroDataset, endpoint, **EVERY, **options):
            rows = batch.edge_features
            assert {r: set(own) for r, own in rows.items()} == {
                WRITES: {"attr"}, CITES: {"attr", "kind"}
            }  # fmt: skip
            for relation, ends in pairs.items():
                edges = batch.e_id[relation].numpy()
                seen[relation] += edges.size
                src = batch.n_id[relation[0]][batch.edge_index[relation][0]]
                assert src.tolist() == ends[edges, 0].tolist()
                every = edge_arrays({"attr", "kind", "weight", "time"}, len(ends))
                for name, found in rows.get(relation, {}).items():
                    np.testing.assert_array_equal(found.numpy(), every[name][edges])
            edges = batch.e_id[WRITES].numpy()
            np.testing.assert_array_equal(batch.edge_weight[WRITES].numpy(), edges + 0.5)
            edges = batch.e_id[CITES].numpy()
            np.testing.assert_array_equal(batch.edge_time[CITES].numpy(), (edges << 33) - 5)
        assert min(seen.values()) > 50
