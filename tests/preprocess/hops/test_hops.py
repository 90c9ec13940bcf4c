"""Hops against dense float64 matrices; the same bytes for any memory, threads and kills."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall, CorruptBlock, OutOfSpace
from blockstore.format import HopSet, RowArray
from blockstore.store import Store, open_store, read_rows
from blockstore.verify import verify_store
from preprocess.cli.info import info_text
from preprocess.hops import columns
from preprocess.hops import hops as hops_module
from preprocess.hops import plan as hops_plan
from preprocess.hops.hops import make_hops
from preprocess.hops.plan import HopsPlan, HopsRequest, Operator, plan_hops, resolve_hops
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.layouts import open_source
from tests.effort import tries
from tests.preprocess.derive.test_derive import held_rows
from tests.preprocess.kills import run_and_kill
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_hetero import stored_blocks
from tests.preprocess.test_resume import tree

OPTIONS = IngestOptions(block_bytes=4096)
ALL = ("sym", "row", "ppr", "heat")
EVERY = HopsRequest(ALL, rows="all")


def adjacency(store: Store, weighted: bool) -> np.ndarray:
    """A[target, source] by original ids, dense float64: parallel edges add up."""
    (nodes,) = store.manifest.types
    found = stored_blocks(store, store.manifest.relations[0])
    original = read_rows(store, nodes.original_id).astype(np.int64)
    matrix = np.zeros((nodes.num_nodes, nodes.num_nodes))
    weights = found["weight"] if weighted else np.ones(len(found["src"]))
    dst, src = (original[np.array(found[end], np.int64)] for end in ("dst", "src"))
    np.add.at(matrix, (dst, src), weights)
    return matrix


def normalised(matrix: Any, sym: bool) -> Any:
    """1 / in-degree, or the root of both degrees; rows and columns of degree 0 stay zeros."""
    into, out = np.asarray(matrix.sum(1)).ravel(), np.asarray(matrix.sum(0)).ravel()
    with np.errstate(divide="ignore"):
        if not sym:
            return scipy.sparse.diags(np.where(into > 0, 1 / into, 0)) @ matrix
        left, right = (np.where(d > 0, 1 / np.sqrt(d), 0) for d in (into, out))
    return scipy.sparse.diags(left) @ matrix @ scipy.sparse.diags(right)


def dense(kind: str, matrix: np.ndarray, loops: bool, alpha: float, t: float) -> np.ndarray:
    """The operator in closed form, float64."""
    one = np.eye(matrix.shape[0])
    walk = np.asarray(normalised(matrix + one * loops, kind != "row"))
    if kind == "ppr":
        return alpha * np.linalg.inv(one - (1 - alpha) * walk)
    return scipy.linalg.expm(-t * (one - walk)) if kind == "heat" else walk


def original_rows(store: Store, hops: HopSet, array: RowArray) -> np.ndarray:
    """Rows of a hop in the order of original ids, where all nodes are kept; float64."""
    out = np.full((array.num_rows, array.row_items), np.nan)
    out[read_rows(store, hops.nodes)] = held_rows(store, array)
    return out


@st.composite
def graphs(draw: Any) -> Graph:
    """Directed, with self-loops, parallel edges, hubs and nodes without edges; labels, splits."""
    num_nodes, seed = draw(st.integers(1, 30)), draw(st.integers(0, 2**16))
    width = draw(st.sampled_from([1, 3, 16, 21]))
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        "x": rng.standard_normal((num_nodes, width)).astype(np.float32),
        "y": rng.integers(0, 4, num_nodes),
        "train": rng.permutation(num_nodes)[: num_nodes // 2 + 1],
    }
    graph = Graph().add_type("n", num_nodes, **arrays)
    count = draw(st.integers(0, 120))
    pairs = (rng.random((count, 2)) ** 2 * num_nodes).astype(np.int64)
    return graph.add_relation("n", "to", "n", pairs, weight=rng.random(count) * 3)


@settings(max_examples=tries(3, 6))
@given(graph=graphs(), loops=st.booleans(), weighted=st.booleans(), hops=st.integers(1, 3),
       alpha=st.sampled_from([0.1, 0.5]), t=st.sampled_from([0.5, 3.0]))  # fmt: skip
def test_hops_are_powers_of_dense_matrices(
    tmp_path_factory, graph: Graph, loops: bool, weighted: bool, hops: int, alpha: float, t: float
):
    path = tmp_path_factory.mktemp("hops") / "store"
    ingest(graph, path, OPTIONS, QUIET)
    asked = replace(EVERY, hops=hops, hop_loops=loops, weighted=weighted, hop_alpha=alpha, t=t)
    result = make_hops(path, asked, QUIET)
    verify_store(path)
    store = open_store(path)
    assert store.manifest == result.manifest
    found = store.manifest.types[0].hops["all"]
    tail = "+loops" * loops + "+weights" * weighted
    assert list(found.operators) == [f"{k}{tail}" for k in ("sym", "row", f"ppr:{alpha:g}",
                                                            f"heat:{t:g}")]  # fmt: skip
    matrix = adjacency(store, weighted)
    assert result.without_edges == (matrix.sum(1) == 0).sum()
    for kind, chain in zip(ALL, found.operators.values(), strict=True):
        expected = graph.arrays["n.x"].astype(np.float64)
        assert np.array_equal(original_rows(store, found, chain[0]), expected)
        operator, size = dense(kind, matrix, loops, alpha, t), np.abs(expected)
        # float32 sums of so many terms, each of which goes into 1 / alpha further products
        terms = adjacency(store, weighted=False).sum(1).max() + loops + 1
        rounding = terms * 2**-24 / alpha if kind == "ppr" else 0
        for hop, array in enumerate(chain[1:], 1):
            expected, size = operator @ expected, np.abs(operator) @ size  # before terms cancel
            error = np.abs(original_rows(store, found, array) - expected).max()
            assert error <= max(1e-5, hop * rounding) * size.max(), (kind, array.path)


def test_nodes_without_edges_are_as_documented(tmp_path: Path):
    """Without self-loops: zeros of sym and row, alpha x of ppr, exp(-t) x of heat; else x."""
    graph = Graph().add_type("n", 3, x=np.array([[1], [2], [4]], np.float32))
    graph.add_relation("n", "to", "n", [(0, 1)])
    ingest(graph, tmp_path / "store", OPTIONS, QUIET)
    for loops, factors in ((False, (0, 0, 0.1, np.exp(-3))), (True, (1, 1, 1, 1))):
        make_hops(tmp_path / "store", replace(EVERY, hop_loops=loops, hops=1), QUIET)
        store = open_store(tmp_path / "store")
        found = store.manifest.types[0].hops["all"]
        chains = list(found.operators.values())[-4:]
        for (_, array), factor in zip(chains, factors, strict=True):
            assert original_rows(store, found, array)[2, 0] == pytest.approx(4 * factor, rel=1e-6)


def large(num_nodes: int = 3000, width: int = 40) -> Graph:
    """Blocks of 4 KiB have columns that go on over several."""
    rng = np.random.default_rng(5)
    splits = np.split(rng.permutation(num_nodes), [num_nodes // 2, num_nodes // 4 * 3])
    graph = Graph().add_type(
        "n", num_nodes, x=rng.standard_normal((num_nodes, width)).astype(np.float32),
        y=rng.integers(-1, 4, num_nodes),
        **dict(zip(("train", "valid", "test"), splits, strict=True)),
    )  # fmt: skip
    pairs = rng.integers(0, num_nodes, (12_000, 2))
    pairs[:5000, 1] = rng.integers(0, 2, 5000)
    return graph.add_relation("n", "to", "n", pairs, weight=rng.random(12_000))


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ingested once; to be copied."""
    path = tmp_path_factory.mktemp("hops") / "store"
    ingest(large(), path, OPTIONS, QUIET)
    return path


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little memory that there are many slices."""
    monkeypatch.setattr(hops_plan, "_FIXED_BYTES", 0)
    monkeypatch.setattr(hops_plan, "_MIN_PIECE", 1 << 10)
    monkeypatch.setattr(hops_plan, "_INTERPRETER_BYTES", 0)


def minimum(path: Path, asked: HopsRequest, threads: int) -> int:
    """The least memory that a refusal names."""
    with pytest.raises(BudgetTooSmall) as caught:
        make_hops(path, asked, QUIET, 1000, threads)
    return int(str(caught.value).split("--mem ")[2].split("M")[0]) << 20


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of slices of 8 columns, with the graph read for each, and small pieces."""

    def planned(*arguments: Any) -> HopsPlan:
        return replace(
            plan_hops(*arguments), width=8, num_slices=-(-arguments[1].feature.row_items // 8),
            resident=False, scan_bytes=3 * 4096, piece_bytes=3000, copy_bytes=20_000, buffer=40_000,
        )  # fmt: skip

    monkeypatch.setattr(hops_module, "plan_hops", planned)


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.long), "int8"])
def test_neither_memory_nor_threads_change_a_byte(
    large_store: Path, tmp_path: Path, dtype: Any, request: pytest.FixtureRequest
):
    asked = HopsRequest(ALL, hops=1, dtype=dtype, weighted=True, hop_alpha=0.7, t=0.5)
    shutil.copytree(large_store, tmp_path / "whole")
    shutil.copytree(large_store, tmp_path / "slices")
    whole = make_hops(tmp_path / "whole", asked, QUIET, threads=3)
    assert (whole.plan.num_slices, whole.plan.resident) == (1, True)
    request.getfixturevalue("slices")
    result = make_hops(tmp_path / "slices", asked, QUIET, threads=1)
    assert result.plan.num_slices == 5
    assert tree(tmp_path / "slices") == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slices", "whole"]
    verify_store(tmp_path / "slices")


@pytest.mark.usefixtures("tight")
def test_the_least_memory_does(tmp_path: Path):
    """A refusal says what would do; that does, and gives the same bytes."""
    rng, count = np.random.default_rng(3), 100_000
    x = rng.random((count, 9)).astype(np.float32)
    graph = Graph().add_type("n", count, x=x, y=rng.integers(0, 3, count), train=np.arange(99))
    graph.add_relation("n", "to", "n", rng.integers(0, count, (200_000, 2)))
    ingest(graph, tmp_path / "whole", replace(OPTIONS, block_bytes=65536), QUIET)
    shutil.copytree(tmp_path / "whole", tmp_path / "least")
    asked = HopsRequest(("row", "heat"), hops=1, t=0.1)
    smallest = minimum(tmp_path / "least", asked, 2)
    result = make_hops(tmp_path / "least", asked, QUIET, smallest, threads=2)
    assert (result.plan.width, result.plan.num_slices, result.plan.resident) == (1, 9, False)
    make_hops(tmp_path / "whole", asked, QUIET)
    assert tree(tmp_path / "least") == tree(tmp_path / "whole")


def test_rows_are_those_with_labels_in_one_seeded_order(large_store: Path, tmp_path: Path):
    graph, path = large(), tmp_path / "store"
    shutil.copytree(large_store, path)
    result = make_hops(path, HopsRequest(("row",), seed=3), QUIET)
    store = open_store(path)
    sets = store.manifest.types[0].hops
    assert list(sets) == ["train", "valid", "test"]
    for split, found in sets.items():
        ids, y = graph.arrays[f"n.{split}"], graph.arrays["n.y"]
        kept = ids[y[ids] != -1]
        nodes = read_rows(store, found.nodes)
        assert sorted(nodes.tolist()) == sorted(kept.tolist())
        assert nodes.tolist() != kept.tolist()
        places = {node: place for place, node in enumerate(kept.tolist())}
        moved = np.corrcoef([places[node] for node in nodes.tolist()], np.arange(nodes.size))
        assert abs(moved[0, 1]) < 5 / np.sqrt(nodes.size)  # five standard deviations
        assert found.label is not None
        assert np.array_equal(read_rows(store, found.label), y[nodes])
        zero = next(iter(found.operators.values()))[0]
        assert np.array_equal(read_rows(store, zero), graph.arrays["n.x"][nodes])
        assert result.rows[split] == kept.size
        assert result.without_label[split] == ids.size - kept.size
        assert (found.split, found.feature, found.seed) == (split, "x", 3)


def test_rows_are_adjacent_bytes_and_no_more(large_store: Path, tmp_path: Path):
    """rows * columns * bytes * (hops * operators + 1), and one block that is not full, at most."""
    path = tmp_path / "store"
    shutil.copytree(large_store, path)
    result = make_hops(path, HopsRequest(("sym", "row"), hops=3), QUIET)
    store = open_store(path)
    data = 0
    for found in store.manifest.types[0].hops.values():
        arrays = {a.path: a for chain in found.operators.values() for a in chain}
        assert len(arrays) == 7
        data += sum(a.num_rows * a.row_bytes for a in arrays.values())
        for array in arrays.values():
            file = store.rows(array)
            raw = np.fromfile(file.shards[0], np.float32)
            rows = read_rows(store, array)
            assert np.array_equal(raw[: rows.size], rows.reshape(-1))
            stored = file.geometry.num_blocks * file.geometry.slot_bytes
            assert stored - rows.nbytes < file.geometry.slot_bytes
    assert result.array_bytes == data


def test_operators_and_hops_are_added_to_those_there(large_store: Path, tmp_path: Path):
    """As if all had been asked for at once; nothing that was there is written again."""
    for name in ("once", "later"):
        shutil.copytree(large_store, tmp_path / name)
    make_hops(tmp_path / "once", HopsRequest(("row", "sym"), hops=2, dtype="float16"), QUIET)
    later = tmp_path / "later"
    make_hops(later, HopsRequest(("row",), hops=1, dtype="float16"), QUIET)
    zero = next((later / "nodes/n/hops/train/0").rglob("c/0/0"))
    before = zero.stat().st_mtime_ns, zero.stat().st_ino
    make_hops(later, HopsRequest(("sym",), hops=2, dtype="float16"), QUIET)
    make_hops(later, HopsRequest(("row",), hops=2, dtype="float16"), QUIET)
    assert (zero.stat().st_mtime_ns, zero.stat().st_ino) == before
    assert tree(later) == tree(tmp_path / "once")


@pytest.fixture(scope="module")
def wide(large_store: Path) -> Store:
    """It with hops in float32."""
    path = large_store.with_name("wide")
    shutil.copytree(large_store, path)
    make_hops(path, HopsRequest(dtype="float32"), QUIET)
    return open_store(path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrow_dtypes_round_once(large_store: Path, wide: Store, tmp_path: Path, dtype: Any):
    """Sums are float32 throughout: each hop is off by its own rounding alone."""
    shutil.copytree(large_store, tmp_path / "narrow")
    make_hops(tmp_path / "narrow", HopsRequest(dtype=dtype), QUIET)
    narrow = open_store(tmp_path / "narrow")
    for split in ("train", "test"):
        chains = [s.manifest.types[0].hops[split].operators["sym+loops"] for s in (wide, narrow)]
        for one, other in zip(*chains, strict=True):
            exact, found = held_rows(wide, one), held_rows(narrow, other)
            off = np.abs(found - exact)
            if dtype == "int8":
                assert (off <= np.abs(exact).max() / 127 * 1.5).all()
            else:
                bits = {"float16": 11, "bfloat16": 8}[dtype]
                assert (off <= np.abs(exact) * 2.0**-bits + 2**-24).all()


def test_labels_of_several_numbers_and_wide_rows(tmp_path: Path):
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, (50, 7)).astype(np.float32)
    y[3] = np.nan
    graph = Graph().add_type("n", 50, x=rng.random((50, 2, 900)), y=y, train=np.arange(40))
    graph.add_relation("n", "to", "n", rng.integers(0, 50, (90, 2)))
    ingest(graph, tmp_path / "store", OPTIONS, QUIET)
    result = make_hops(tmp_path / "store", HopsRequest(), QUIET)
    assert (result.rows, result.without_label) == ({"train": 39}, {"train": 1})
    store = open_store(tmp_path / "store")
    found = store.manifest.types[0].hops["train"]
    assert found.label is not None
    assert found.label.row_shape == (7,)
    nodes = read_rows(store, found.nodes)
    assert np.array_equal(read_rows(store, found.label), graph.arrays["n.y"][nodes])
    assert found.operators["sym+loops"][2].row_shape == (2, 900)
    verify_store(tmp_path / "store")


def test_one_of_several_types_and_relations(tmp_path: Path):
    rng = np.random.default_rng(1)
    graph = Graph().add_type("a", 7, x=rng.random((7, 3)))
    graph.add_type("b", 20, x=rng.random((20, 3)).astype(np.float32), z=rng.random((20, 2)))
    for name in ("likes", "knows"):
        graph.add_relation("b", name, "b", rng.integers(0, 20, (60, 2)))
    graph.add_relation("a", "to", "b", [(1, 2)])
    path = tmp_path / "store"
    ingest(graph, path, OPTIONS, QUIET)
    asked = HopsRequest(("row",), relation="knows", rows="all", hops=1, hop_loops=False)
    make_hops(path, asked, QUIET)
    store = open_store(path)
    nodes, found = store.manifest.types[1], store.manifest.types[1].hops["all"]
    assert list(found.operators) == ["row@knows"]
    matrix = np.zeros((20, 20))
    np.add.at(matrix, tuple(graph.pairs[graph.relations[1]].T[::-1]), 1)
    expected = np.asarray(normalised(matrix, False)) @ graph.arrays["b.x"]
    one = original_rows(store, found, found.operators["row@knows"][1])
    assert np.abs(one - expected).max() < 1e-6
    assert nodes.first == 7
    verify_store(path)


@pytest.mark.usefixtures("slices")
def test_six_kills_at_any_moment_change_nothing(large_store: Path, tmp_path: Path):
    """Each kill is of the run that goes on; the store is as it was until the last."""
    asked, path = HopsRequest(("row", "heat"), hops=1, dtype="bfloat16", t=0.1), tmp_path / "store"
    shutil.copytree(large_store, path)
    before = tree(path)
    shutil.copytree(large_store, tmp_path / "whole")
    begun = time.monotonic()
    make_hops(tmp_path / "whole", asked, QUIET, threads=2)
    whole_s, expected = time.monotonic() - begun, tree(tmp_path / "whole")
    moments, kills, resumed, journal = random.Random(7), 0, 0, tmp_path / ".store.hops.work"
    for _ in range(200):
        run = partial(make_hops, path, asked, QUIET, threads=2)
        ended = run_and_kill(run, moments.uniform(0, whole_s * 0.4))
        kills += not ended
        if open_store(path).manifest.types[0].hops:
            assert tree_of_store(path) == expected
            shutil.rmtree(path)
            shutil.copytree(large_store, path)
        else:
            assert tree_of_store(path) == before
            resumed += (journal / "journal.json").exists()
        if kills >= 6:
            break
    assert kills == 6
    assert resumed > 1
    result = make_hops(path, asked, QUIET, threads=1)
    assert tree(path) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "whole"]
    assert sum(result.rows.values()) > 1000


def tree_of_store(path: Path) -> dict[str, str]:
    """All of a store but what a dead run may have left, which the next one removes."""
    return {name: digest for name, digest in tree(path).items() if not name.startswith(".extend")}


def test_what_is_there_already_is_not_done_again(large_store: Path, tmp_path: Path, monkeypatch):
    """A stage that fails for want of room leaves those before it."""
    path, asked = tmp_path / "store", HopsRequest(("row",))
    shutil.copytree(large_store, path)

    def full(*_: Any) -> Any:
        raise OutOfSpace("no room")

    with monkeypatch.context() as patch:
        patch.setattr(hops_module.HopStages, "_write", full)
        with pytest.raises(OutOfSpace):
            make_hops(path, asked, QUIET)
    result = make_hops(path, asked, QUIET)
    assert sum(s.resumed for s in result.stages) == 5
    verify_store(path)


def same_node(start: int, stop: int, size: int, key: Any, out: np.ndarray) -> None:
    out[:] = 0


def other_labels(*arguments: Any) -> None:
    *others, emit = arguments
    columns.copy_labels(*others, lambda rows: emit(rows ^ (np.arange(rows.size) == 0)))


@pytest.mark.parametrize(
    ("where", "name", "bad", "message"),
    [(columns, "permute_range", same_node, "occurs twice, expected each once"),
     (hops_module, "copy_labels", other_labels, r"label\[0\]: another row than nodes/n/label")],
)  # fmt: skip
def test_verify_finds_what_checksums_do_not(
    large_store: Path, tmp_path: Path, monkeypatch, where: Any, name: str, bad: Callable[..., Any],
    message: str,
):  # fmt: skip
    path = tmp_path / "store"
    shutil.copytree(large_store, path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, bad)
        make_hops(path, HopsRequest(("row",), hops=1), QUIET)
    with pytest.raises(CorruptBlock, match=message):
        verify_store(path)


def test_series_are_long_enough_and_add_up():
    """Shares of all terms add up to 1, but for what the rest of the series is."""
    for kind, parameter in (
        ("ppr", 0.1),
        ("ppr", 0.9),
        ("heat", 0.01),
        ("heat", 3.0),
        ("heat", 20),
    ):
        operator = Operator(kind, True, parameter, False, "")  # type: ignore[arg-type]
        value = 1.0
        for scale, share in operator.steps():
            value = scale * value + share
        assert value == pytest.approx(1, abs=1e-6)
        assert np.prod([scale for scale, _ in operator.steps()]) < 1e-6


@pytest.mark.parametrize("columns", [1, 5, 16, 100, 128, 1433, 5000])
@pytest.mark.parametrize("mem", [140, 200, 300, 800, 4000, 64000])
def test_plans_stay_within_memory(large_store: Path, columns: int, mem: int):
    manifest = open_store(large_store).manifest
    resolved = resolve_hops(manifest, HopsRequest(ALL), "store")
    feature = RowArray("x", "float32", 1_000_000, (columns,))
    nodes = resolved.nodes
    resolved = resolved._replace(
        feature=feature, sizes={"train": 500_000}, nodes=type(nodes)(
            "n", 0, 1_000_000, nodes.original_id, nodes.store_id, nodes.label
        ),
    )  # fmt: skip
    plan = plan_hops(manifest, resolved, mem << 20, 4)
    held = 4 * 1_000_000 * plan.width * plan.arrays + 8 * 1_000_000
    assert held < mem << 20
    assert (plan.num_slices - 1) * plan.width < columns <= plan.num_slices * plan.width
    assert plan.width % 16 == 0 or plan.width in (1, 2, 4, 8)
    assert plan.columns(plan.num_slices - 1, columns) >= 1


def apply(kind: str, walk: Any, x: np.ndarray) -> np.ndarray:
    """An operator on some columns, by its series, float64, until nothing is left of it."""
    if kind in ("sym", "row"):
        return walk @ x
    total, term, share = np.zeros(x.shape), x, 0.5 if kind == "ppr" else np.exp(-3.0)
    for k in range(1, 36):
        total += share * term
        term = walk @ term
        share *= 0.5 if kind == "ppr" else 3.0 / k
    return total


GRAPHS = (
    "planetoid-cora",
    *(pytest.param(n, marks=pytest.mark.long) for n in ("amazon-computers", "arxiv-cs-coauthor")),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_hops_of_real_graphs_equal_float64(name: str, dataset, tmp_path: Path):
    """Two hops of each operator on the first columns; relative to the largest value of a hop."""
    (tmp_path / "graph").mkdir()
    for path in dataset(name).iterdir():
        (tmp_path / "graph" / path.name).symlink_to(path)
    few = np.load(dataset(name) / "node_feat.npy", mmap_mode="r")[:, :3]
    (tmp_path / "graph" / "node_feat.npy").unlink()
    np.save(tmp_path / "graph" / "node_feat.npy", few)
    ingest(open_source(tmp_path / "graph").source, tmp_path / "store", IngestOptions(), QUIET)
    asked = HopsRequest(("sym", "row", "ppr", "heat"), hops=2, splits=("train",), hop_alpha=0.5)
    make_hops(tmp_path / "store", asked, QUIET)
    store = open_store(tmp_path / "store")
    (nodes,) = store.manifest.types
    found = nodes.hops["train"]
    listed = stored_blocks(store, store.manifest.relations[0])
    dst, src = np.array(listed["dst"]), np.array(listed["src"])
    shape = (nodes.num_nodes, nodes.num_nodes)
    edges = (np.ones(src.size), (dst, src))
    matrix = scipy.sparse.csr_array(edges, shape=shape) + scipy.sparse.eye_array(shape[0])
    places = read_rows(store, nodes.store_id)[read_rows(store, found.nodes)]
    for kind, chain in zip(ALL, found.operators.values(), strict=True):
        walk = scipy.sparse.csr_array(normalised(matrix, kind != "row"))
        expected = read_rows(store, nodes.features["x"]).astype(np.float64)
        for array in chain[1:]:
            expected = apply(kind, walk, expected)
            off = np.abs(read_rows(store, array) - expected[places])
            assert off.max() <= 1e-5 * np.abs(expected).max(), (kind, array.path)


def test_info_names_the_hops(small_graph: Path, tmp_path: Path):
    ingest(open_source(small_graph).source, tmp_path / "store", IngestOptions(), QUIET)
    make_hops(tmp_path / "store", HopsRequest(("sym", "row"), 2), QUIET)
    text = info_text(open_store(tmp_path / "store"))
    (line,) = [line for line in text.splitlines() if "hops, train" in line]
    said = "hops, train float32 1,200 rows of 24 from x: sym+loops, 2 hops; row+loops, 2 hops"
    assert " ".join(line.split()) == said
