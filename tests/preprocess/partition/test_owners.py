"""Owner maps: weights and kernels against plain Python, planted communities, the command."""

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall, StoreError, StoreExists
from blockstore.expansions import Expansions, write_expansions
from blockstore.owners import list_owners, read_owners, remove_owners
from blockstore.store import Store, open_store
from blockstore.verify import verify_store
from preprocess.errors import BadInput
from preprocess.kernels.partition import (
    NodeWeights,
    WeightedLoads,
    place_clusters,
    place_weighted,
    weigh_between,
)
from preprocess.partition.grouped import even_out
from preprocess.partition.metis import WHOLE, both_ways
from preprocess.partition.owners import OwnerOptions, make_owners, weigh_nodes
from tests import reference
from tests.graphs import Csc, csc_graphs, make_csc
from tests.heterostores import random_hetero, write_hetero_store
from tests.preprocess.kills import run_and_kill
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_commands import good, refused
from tests.stores import write_store

needs_metis = pytest.mark.skipif(
    importlib.util.find_spec("pymetis") is None, reason="pymetis is not installed"
)


# -- kernels --------------------------------------------------------------------------------------


def choose(loads: list[float], sizes: list[int], near: list[float], load: float, b: Any) -> int:
    """The best partition for one more load, read aloud."""
    every = range(len(loads))
    room = [p for p in every if loads[p] + load <= b.cap]
    if not room:
        return min(every, key=lambda p: (loads[p], sizes[p], p))
    price = [b.price * math.sqrt(loads[p]) for p in every]
    return min(room, key=lambda p: (load * price[p] - near[p], sizes[p], p))


def in_pieces(kernel: Callable[..., Any], sources: np.ndarray, cuts: list[int]) -> None:
    """Call a kernel with pieces of the sources, and what it returned for the one before."""
    node, skip = 0, 0
    bounds = [0, *sorted(c % (sources.size + 1) for c in cuts), sources.size]
    for low, high in pairwise(bounds):
        node, skip = kernel(node, skip, sources[low:high])


def some_weights(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of nodes and edges: in sixteenths, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return tuple((rng.integers(0, 40, size) / 16).astype(np.float32) for _ in range(2))


@given(csc_graphs(), st.integers(0, 99), st.integers(1, 5), st.booleans(), st.lists(st.integers(0)))
def test_nodes_are_placed_as_one_reads(
    graph: Csc, seed: int, k: int, marked: bool, cuts: list[int]
):
    node, edge = some_weights(seed, graph.num_nodes)
    sources = graph.indices.astype(np.uint32)
    bits = np.random.default_rng(seed).integers(0, 2, sources.size, np.uint32)
    if marked:
        sources = sources * np.uint32(2) + bits
    balance = WeightedLoads.empty(k, 1.1 * float(node.sum()) / k, 0.25)
    found, degrees = np.full(graph.num_nodes, k, np.uint16), np.diff(graph.indptr).astype(np.uint32)
    weights = NodeWeights(node, edge, marked)
    loads, sizes, expected = [0.0] * k, [0] * k, [k] * graph.num_nodes
    for _ in range(2):
        in_pieces(
            lambda v, skip, some: place_weighted(
                v, skip, degrees, some, weights, found, balance
            ), sources, cuts,
        )  # fmt: skip
        for v in range(graph.num_nodes):
            near = [0.0] * (k + 1)
            for i in range(int(graph.indptr[v]), int(graph.indptr[v + 1])):
                u = int(graph.indices[i])
                weight = float(edge[v]) + float(edge[u])
                if marked:
                    weight = float(edge[u] if bits[i] else edge[v])
                near[expected[u]] += weight
            if expected[v] < k:
                loads[expected[v]] -= float(node[v])
                sizes[expected[v]] -= 1
            expected[v] = choose(loads, sizes, near, float(node[v]), balance)
            loads[expected[v]] += float(node[v])
            sizes[expected[v]] += 1
        assert found.tolist() == expected
    assert balance.loads.tolist() == loads
    assert balance.sizes.tolist() == sizes
    assert not balance.near.any()


@given(csc_graphs(), st.integers(0, 99), st.integers(1, 5), st.lists(st.integers(0)))
def test_weights_between_owners(graph: Csc, seed: int, k: int, cuts: list[int]):
    _, edge = some_weights(seed, graph.num_nodes)
    owner = np.random.default_rng(seed).integers(0, k, graph.num_nodes).astype(np.uint16)
    degrees, table = np.diff(graph.indptr).astype(np.uint32), np.zeros((k, k))
    sources = graph.indices.astype(np.uint32)
    in_pieces(
        lambda v, skip, some: weigh_between(v, skip, degrees, some, edge, owner, table), sources,
        cuts,
    )  # fmt: skip
    expected = np.zeros((k, k))
    targets = np.repeat(np.arange(graph.num_nodes), degrees)
    for v, u in zip(targets, sources, strict=True):
        expected[owner[v], owner[u]] += float(edge[v])
    assert np.array_equal(table, expected)


def test_clusters_are_put_together_as_one_reads():
    rng = np.random.default_rng(3)
    table = rng.integers(0, 9, (12, 12)) / 16
    table, loads = table + table.T, rng.integers(1, 9, 12) / 4
    balance = WeightedLoads.empty(3, 1.2 * float(loads.sum()) / 3, 0.1)
    found = np.full(12, 3, np.int64)
    place_clusters(table, loads, np.uint64(7), found, balance)
    held, sizes, expected, moved = [0.0] * 3, [0] * 3, [3] * 12, True
    while moved:
        moved = False
        for i in range(12):
            c = reference.permute(i, 12, 7)
            near = [0.0] * 4
            for other in range(12):
                near[expected[other]] += table[c, other] * (other != c)
            old = expected[c]
            if old < 3:
                held[old] -= loads[c]
                sizes[old] -= 1
            expected[c] = choose(held, sizes, near, loads[c], balance)
            held[expected[c]] += loads[c]
            sizes[expected[c]] += 1
            moved |= expected[c] != old
    assert found.tolist() == expected


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("frontier", ["new", "layer"])
@pytest.mark.parametrize("kind", ["edges", "nodes"])
def test_weights_are_those_of_the_formula(frontier: str, kind: Any):
    degrees = np.array([0, 1, 5, 12], np.uint32)
    counts = np.arange(16, dtype=np.uint32).reshape(4, 4)
    found = Expansions(
        fingerprint="", num_nodes=4, fanouts=(10, 3, -1), batch_size=1, frontier=frontier,
        seeds="all", seed=0, epochs=1, steps=8,
    )  # fmt: skip
    made = weigh_nodes(degrees, (found, counts), kind)
    for v, degree in enumerate(degrees.tolist()):
        edges = times = 0.0
        for hop, maximum in enumerate((10, 3, degree)):
            layers = 3 - hop if frontier == "new" else 1
            edges += layers * counts[hop, v] * min(maximum, degree) / 8
            times += layers * counts[hop, v] / 8
        assert made.node[v] == pytest.approx(edges if kind == "edges" else times)
        assert made.edge[v] * degree == pytest.approx(edges)
    assert made.loaded is not None
    assert np.array_equal(made.loaded, counts[3])


def test_edges_are_sampled_as_often_as_they_weigh():
    """Each edge of 240 within five standard deviations of a binomial at each hop, and the edges of
    a node together exactly, given how often nodes were expanded."""
    graph = make_csc([i % 7 for i in range(80)], 2)
    counts, seen = np.zeros((3, 80), np.uint32), np.zeros(graph.indices.size)
    for step in range(60):
        own = [(7 * step + i) % 80 for i in range(10)]
        batch = reference.sample_batch(graph.indptr, graph.indices, own, (3, 2), 0, 0, step)
        for hop, edges in enumerate(batch.edges):
            low = sum(batch.nodes_per_hop[:hop])
            counts[hop, batch.n_id[low : low + batch.nodes_per_hop[hop]]] += np.uint32(1)
            seen[edges] += 2 - hop
    found = Expansions(
        fingerprint="", num_nodes=80, fanouts=(3, 2), batch_size=10, frontier="new", seeds="all",
        seed=0, epochs=1, steps=60,
    )  # fmt: skip
    degrees = np.diff(graph.indptr)
    made = weigh_nodes(degrees.astype(np.uint32), (found, counts), "edges")
    targets = np.repeat(np.arange(80), degrees)
    assert np.bincount(targets, seen, 80) == pytest.approx(60 * made.node, rel=1e-5)
    variance = np.zeros(80)
    for hop, fanout in enumerate((3, 2)):
        p = np.minimum(fanout, degrees) / np.maximum(degrees, 1)
        variance += (2 - hop) ** 2 * counts[hop] * p * (1 - p)
    away = np.abs(seen - 60 * made.edge[targets])
    assert (away <= 5 * np.sqrt(variance[targets]) + 1e-4).all()


def test_without_counts_edges_count_alike():
    made = weigh_nodes(np.array([0, 1, 5], np.uint32), None, "edges")
    assert (made.node.tolist(), made.edge.tolist(), made.loaded) == ([0, 1, 5], [1, 1, 1], None)
    assert weigh_nodes(np.array([0, 1, 5], np.uint32), None, "nodes").node.tolist() == [1, 1, 1]


def test_both_ways_add_weights_up():
    """0 -> 1 twice, 1 -> 0 and a loop: an edge weighs what its target says."""
    targets, sources = np.array([1, 1, 0, 2], np.uint32), np.array([0, 0, 1, 2], np.uint32)
    weights = np.array([0.5, 2, 7], np.float32)
    starts, neighbors, sums = both_ways(targets, sources, 3, weights)
    assert (starts.tolist(), neighbors.tolist(), sums.tolist()) == ([0, 1, 2, 2], [1, 0], [4.5] * 2)


# -- maps -----------------------------------------------------------------------------------------

GROUPS, EACH = 4, 60
OPTIONS = OwnerOptions("m", GROUPS)


def planted(symmetric: bool) -> Csc:
    """Four groups in which nodes have eight in-edges, one in ten of them from anywhere."""
    rng, size = np.random.default_rng(5), GROUPS * EACH
    dst = np.repeat(rng.permutation(size), 8)
    src = (dst + GROUPS * rng.integers(1, EACH, dst.size)) % size
    away = rng.random(dst.size) < 0.1
    src[away] = rng.integers(0, size, int(away.sum()))
    if symmetric:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    order = np.argsort(dst, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=size))])
    return Csc(indptr, src[order].astype(np.uint32), np.arange(dst.size, dtype=np.uint32))


@pytest.fixture(scope="module", params=[True, False], ids=["symmetric", "directed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("owners") / "store"
    write_store(path, planted(request.param), [1, 2], edge_ids=False)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    return open_store(shutil.copytree(made, tmp_path / "store"))


def write_counts(store: Store, path: Path) -> np.ndarray:
    """Some counts, of two hops and 5 steps."""
    size = store.manifest.num_nodes
    counts = np.random.default_rng(1).integers(0, 9, (3, size)).astype(np.uint32)
    found = Expansions(
        fingerprint=store.manifest.fingerprint, num_nodes=size, fanouts=(4, 4), batch_size=10,
        frontier="new", seeds="split:train", seed=0, epochs=1, steps=5,
    )  # fmt: skip
    write_expansions(path, found, counts)
    return counts


@pytest.mark.parametrize("method", ["stream", pytest.param("metis", marks=needs_metis)])
@pytest.mark.parametrize("weights", ["edges", "nodes"])
def test_groups_are_found(store: Store, tmp_path: Path, method: Any, weights: Any):
    write_counts(store, tmp_path / "counts")
    options = replace(OPTIONS, method=method, weights=weights)
    found = make_owners(store, tmp_path / "counts", options, QUIET, 256 << 20)
    assert np.array_equal(read_owners(store, "m").owner, found.owner)
    assert found.facts["cross"] < 0.12
    assert found.facts["imbalance"] <= 1.05
    groups = found.owner.reshape(EACH, GROUPS)
    for g in range(GROUPS):
        assert np.bincount(groups[:, g]).max() > 0.9 * EACH
    assert found.facts.get("scale") == (WHOLE if method == "metis" else None)


@pytest.mark.parametrize("method", ["stream", "random"])
def test_figures_are_those_of_the_map(store: Store, tmp_path: Path, method: Any):
    counts = write_counts(store, tmp_path / "counts")
    options = replace(OPTIONS, method=method)
    found = make_owners(store, tmp_path / "counts", options, QUIET, 256 << 20)
    graph = planted(store.manifest.relations[0].num_edges > 8 * GROUPS * EACH)
    degrees = np.diff(graph.indptr)
    made = weigh_nodes(
        degrees.astype(np.uint32), (Expansions(**found.facts["presampled"]), counts), "edges"
    )
    targets, owner = np.repeat(np.arange(degrees.size), degrees), found.owner
    cross = made.edge[targets][owner[targets] != owner[graph.indices]].sum()
    assert found.facts["cross"] == pytest.approx(cross / made.edge[targets].sum(), abs=1e-5)
    for name, values in (
        ("imbalance", made.node), ("node_imbalance", np.ones(owner.size)),
        ("row_imbalance", counts[2]),
    ):  # fmt: skip
        sums = np.bincount(owner, values, GROUPS)
        assert found.facts[name] == pytest.approx(sums.max() / sums.mean(), abs=1e-5)


def test_memory_changes_no_owner(store: Store, monkeypatch: pytest.MonkeyPatch):
    """In memory, and with columns in files."""
    first = make_owners(store, None, OPTIONS, QUIET, 256 << 20)
    monkeypatch.setattr("preprocess.partition.owners.visited_fits", lambda *_: False)
    monkeypatch.setattr("preprocess.stages.partition.visited_fits", lambda *_: False)
    again = make_owners(store, None, replace(OPTIONS, name="n"), QUIET, 256 << 20)
    assert np.array_equal(first.owner, again.owner)
    assert [p.name for p in sorted((store.path / "owners").iterdir())] == ["m", "n"]


@pytest.mark.parametrize(
    ("owners", "method"),
    [(1, "stream"), (3, "random"), (300, "stream"), (300, "random"),
     pytest.param(3, "stream", marks=pytest.mark.long),  # that most other tests have
     pytest.param(1, "random", marks=pytest.mark.long)],
)  # fmt: skip
def test_any_number_of_owners(store: Store, method: Any, owners: int):
    found = make_owners(store, None, OwnerOptions("m", owners, method), QUIET, 256 << 20)
    assert found.owner.dtype == (np.uint8 if owners < 257 else np.uint16)
    assert int(found.owner.max()) < owners
    if method == "random":
        assert np.ptp(np.bincount(found.owner, minlength=owners)) <= 1


def test_a_kill_leaves_a_whole_map_or_none(store: Store):
    whole = make_owners(store, None, OPTIONS, QUIET, 256 << 20).owner
    for number in range(6):
        options = replace(OPTIONS, name=f"k{number % 2}")
        if options.name in list_owners(store):
            remove_owners(store, options.name)
        run_and_kill(partial(make_owners, store, None, options, QUIET, 256 << 20), 0.02 * number)
        for name in list_owners(store):
            assert np.array_equal(read_owners(store, name).owner, whole)
    for name in set(list_owners(store)) & {"k0", "k1"}:
        remove_owners(store, name)
    make_owners(store, None, replace(OPTIONS, name="k0"), QUIET, 256 << 20)
    make_owners(store, None, replace(OPTIONS, name="k1"), QUIET, 256 << 20)
    assert verify_store(store.path).strays == ()


def test_what_cannot_be_made_is_refused_at_once(store: Store, tmp_path: Path):
    with pytest.raises(BudgetTooSmall, match=r"--mem: found 64K, expected .* more for weights"):
        make_owners(store, None, OPTIONS, QUIET, 64 << 10)
    with pytest.raises(BadInput, match=r"--balance: found 0\.9"):
        make_owners(store, None, replace(OPTIONS, balance=0.9), QUIET)
    write_counts(store, tmp_path / "counts")
    write_store(tmp_path / "other", planted(True), [3], edge_ids=False)
    other = open_store(tmp_path / "other")
    with pytest.raises(StoreError, match=r"counts: counts of fingerprint .* `loaderd presample`"):
        make_owners(other, tmp_path / "counts", OPTIONS, QUIET)
    assert not (other.path / "owners").exists()
    make_owners(store, None, replace(OPTIONS, method="random"), QUIET)
    with pytest.raises(StoreExists, match="remove the map"):
        make_owners(store, None, OPTIONS, QUIET)
    graph = random_hetero(
        np.random.default_rng(1), {"a": 4, "b": 3}, [("a", "to", "b")], 2, {"a": 1}, "a"
    )
    write_hetero_store(tmp_path / "hetero", graph)
    with pytest.raises(BadInput, match="node types"):
        make_owners(open_store(tmp_path / "hetero"), None, OPTIONS, QUIET)


def test_the_command(store: Store, tmp_path: Path):
    write_counts(store, tmp_path / "counts")
    assert good("owners", store.path).strip() == f"{store.path}: no owner maps"
    words = "--name", "m", "--owners", "3", "--mem", "256M"
    line = good("owners", store.path, tmp_path / "counts", *words).strip()
    assert "m: 3 owners by stream, cross edges 0." in line
    assert "rows loaded 1." in line
    assert "owners/m: exists already" in refused("owners", store.path, *words)
    assert good("owners", store.path).split(maxsplit=1) == ["owners", line.split(": ", 1)[1] + "\n"]
    assert "m: 3 owners by stream" in good("info", store.path)
    facts = json.loads(good("info", store.path, "--json"))["owners"]["m"]
    assert (facts["owners"], facts["facts"]["presampled"]["steps"]) == (3, 5)
    assert "good" in good("verify", store.path)
    good("owners", store.path, "--remove", "m")
    assert "no owner map 'm'" in refused("owners", store.path, "--remove", "m")


# -- whole partitions -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve partitions of unequal size, three of each planted group of nodes."""
    path = tmp_path_factory.mktemp("partitioned") / "store"
    graph = planted(True)
    order = np.argsort(np.arange(GROUPS * EACH) % GROUPS, kind="stable")  # group by group
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    dst = place[np.repeat(np.arange(order.size), np.diff(graph.indptr))]
    by_column = np.argsort(dst, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=order.size))])
    sources = place[graph.indices][by_column].astype(np.uint32)
    sorted_graph = Csc(indptr, sources, np.arange(dst.size, dtype=np.uint32))
    offsets = [g * EACH + at for g in range(GROUPS) for at in (0, 10, 30)] + [order.size]
    write_store(path, sorted_graph, list(range(0, order.size, 2)), edge_ids=False, offsets=offsets)
    return path


def test_whole_partitions_go_to_owners(partitioned: Path, tmp_path: Path):
    store = open_store(shutil.copytree(partitioned, tmp_path / "store"))
    made = make_owners(store, None, OwnerOptions("p", GROUPS, from_partitions=True), QUIET)
    offsets = store.partition_offsets(store.manifest.types[0]).astype(int).tolist()
    for first, stop in pairwise(offsets):
        assert np.unique(made.owner[first:stop]).size == 1
    train = np.bincount(made.owner[::2], minlength=GROUPS)
    assert train.max() <= 1.02 * train.mean()
    assert made.facts["cross"] < 0.12  # the groups were found: an edge in ten is from anywhere
    assert made.facts["method"] == "partitions"
    line = good("owners", store.path, "--name", "q", "--owners", "2", "--from-partitions")
    assert "q: 2 owners by partitions" in line
    asked = "--name", "r", "--owners", "13", "--from-partitions"
    assert "12 partitions, expected 13 to 1,024" in refused("owners", store.path, *asked)


@given(st.integers(0, 999), st.integers(2, 5), st.integers(2, 20))
def test_evening_out_moves_toward_equal_loads(seed: int, k: int, partitions: int):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 9, (partitions, partitions)).astype(float)
    table += table.T
    np.fill_diagonal(table, 0)
    loads = rng.integers(0, 30, partitions).astype(float)
    owner = rng.integers(0, k, partitions).astype(np.uint16)
    before = np.bincount(owner, loads, k).max()
    even_out(table, loads, owner, k, loads.sum() / k)
    totals = np.bincount(owner, loads, k)
    assert totals.max() <= before
    full = int(totals.argmax())
    # no single move and no exchange lowers the greatest load, unless the mean is reached
    if totals.max() > loads.sum() / k:
        for other in set(range(k)) - {full}:
            for p in np.flatnonzero(owner == full):
                for back in [0.0, *loads[owner == other]]:
                    moved = loads[p] - back
                    after = max(totals[full] - moved, totals[other] + moved)
                    assert after >= totals[full]
