"""Derived features against plain Python: the same bytes for any memory, or one line of refusal."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall, OutOfSpace
from blockstore.format import RowArray
from blockstore.store import Store, open_store, read_rows
from blockstore.verify import verify_store
from preprocess.derive import plan as plans
from preprocess.derive.derive import DeriveResult, DeriveStages, derive
from preprocess.derive.plan import Derivation, plan_derivation, resolve
from preprocess.errors import BadInput
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Rendering
from preprocess.pipeline.stage import temporary_bytes
from preprocess.pipeline.work import WorkFolder
from tests.daemons import daemon
from tests.effort import tries
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_commands import good, refused
from tests.preprocess.test_hetero import citations, stored_blocks
from tests.preprocess.test_resume import tree

OPTIONS = IngestOptions(block_bytes=4096)
FEATURES = ["float32", "float16", "bfloat16", "int8", "integers"]
RESULTS = st.sampled_from([None, "float32", "float16", "bfloat16", "int8"])
OPS = st.sampled_from(["mean", "sum", "max"])


def floats(values: np.ndarray, array: RowArray, scale: Any) -> np.ndarray:
    """What stored rows mean."""
    if array.dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) * (np.float32(1) if scale is None else scale)


def held_rows(store: Store, array: RowArray) -> np.ndarray:
    """All rows of an array as float32 (rows, columns)."""
    scale = None
    if array.scale_path:
        scale = store.side(array.scale_path, np.float32, array.row_items)
    rows = read_rows(store, array).reshape(array.num_rows, array.row_items)
    return floats(rows, array, scale)


def naive_rows(store: Store, asked: Derivation) -> np.ndarray:
    """The definition: neighbors' rows, one after the other in the order of their ids."""
    manifest = store.manifest
    types = {t.name: t for t in manifest.types}
    target, origin = types[asked.node_type], types[asked.origin]
    relation = next(r for r in manifest.relations if asked.relation in (r.name, r.path))
    rows = held_rows(store, origin.features[asked.feature or "x"])
    found = stored_blocks(store, relation)
    ends = list(zip(found["dst"], found["src"], strict=True))
    if relation.src == asked.node_type != relation.dst:
        ends = [(src, dst) for dst, src in ends]
    neighbors: list[list[int]] = [[] for _ in range(target.num_nodes)]
    for node, other in ends:
        neighbors[node - target.first].append(other - origin.first)
    result = np.zeros((target.num_nodes, rows.shape[1]), np.float32)
    for node, others in enumerate(neighbors):
        for number, other in enumerate(sorted(others)):
            if asked.op == "max":
                result[node] = np.maximum(result[node], rows[other]) if number else rows[other]
            else:
                result[node] += rows[other]
        if asked.op == "mean" and others:
            result[node] /= np.float32(len(others))
    return result


def check(store: Store, asked: Derivation, result: DeriveResult) -> None:
    """The new array is that of the definition, in its dtype."""
    expected = naive_rows(store, asked)
    array = result.resolved.array
    found = held_rows(store, array)
    if array.dtype == "int8":
        scale = np.abs(expected).max(0, initial=0) / np.float32(127)
        assert np.array_equal(store.side(array.scale_path, np.float32, array.row_items), scale)
        assert (np.abs(found - expected) <= scale * 0.5001).all()
    elif array.dtype == "bfloat16":
        assert np.allclose(found, expected, rtol=2**-8, atol=0)
    else:
        narrow = expected.astype(array.dtype).astype(np.float32)
        assert np.array_equal(found, narrow)


@st.composite
def graphs(draw: Any, width: int = 5) -> tuple[Graph, str]:
    """Authors and papers in either direction, with hubs, duplicates and nodes without edges."""
    kind = draw(st.sampled_from(FEATURES))
    papers, authors = draw(st.integers(1, 30)), draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    x = rng.standard_normal((papers, width)).astype(np.float32)
    graph = Graph()
    if kind == "integers":
        graph.add_type("paper", papers, year=rng.integers(-9, 9, (papers, width), np.int16))
    else:
        graph.add_type("paper", papers, x=x)
    graph.add_type("author", authors)
    count = draw(st.integers(0, 80)) if authors else 0
    ends = rng.random((count, 2)) ** 2 * (authors, papers)
    graph.add_relation("author", "writes", "paper", ends.astype(np.int64))
    ends = rng.random((count // 2, 2)) ** 2 * (papers, authors)
    graph.add_relation("paper", "thanks", "author", ends.astype(np.int64))
    return graph, kind


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little memory that ranges and files are needed."""
    monkeypatch.setattr(plans, "_MIN_SHARE", 1 << 10)
    monkeypatch.setattr(plans, "_FIXED_BYTES", 0)


def minimum(path: Path, asked: Derivation) -> int:
    """The least memory that a refusal names."""
    with pytest.raises(BudgetTooSmall) as caught:
        derive(path, asked, QUIET, 1000)
    return int(str(caught.value).split("--mem ")[2].split("M")[0]) << 20


@settings(max_examples=tries(9, 20))
@given(graph=graphs(), op=OPS, dtype=RESULTS, writes=st.booleans())
def test_a_derived_array_is_what_the_definition_says(
    tmp_path_factory, graph, op: str, dtype: str | None, writes: bool
):
    source, kind = graph
    path = tmp_path_factory.mktemp("derive") / "store"
    stored = "float32" if kind == "integers" else kind
    ingest(source, path, replace(OPTIONS, dtype=stored), QUIET)
    relation = "writes" if writes else "thanks"
    asked = Derivation("author", "paper", relation, op, dtype=dtype)
    if kind == "integers":
        asked = replace(asked, name="mean year", feature="year")
    result = derive(path, asked, QUIET)
    verify_store(path)
    store = open_store(path)
    assert store.manifest == result.manifest
    array = store.manifest.types[1].features[asked.name]
    assert array.dtype == (dtype or stored)
    assert array.row_shape == (5,)
    check(store, asked, result)
    zeros = (naive_counts(store, relation) == 0).sum()
    assert result.without_neighbors == zeros


def naive_counts(store: Store, relation: str) -> np.ndarray:
    """Edges of each author."""
    author = store.manifest.types[1]
    found = stored_blocks(store, next(r for r in store.manifest.relations if r.name == relation))
    ends = found["src" if relation == "writes" else "dst"]
    places = np.array(ends, np.int64) - author.first
    return np.bincount(places, minlength=author.num_nodes)


@pytest.fixture(scope="module")
def cited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Papers in float16 and who wrote them, thanked and cited; to be copied."""
    graph = citations({"cites", "writes"})
    pairs = np.random.default_rng(3).integers(0, 1490, (9000, 2))
    graph.add_relation("paper", "thanks", "author", pairs)
    path = tmp_path_factory.mktemp("derive") / "cited"
    ingest(graph, path, replace(OPTIONS, dtype="float16"), QUIET)
    return path


def many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with so little memory that columns are taken in three slices."""
    whole = plan_derivation

    def planned(*arguments: Any) -> Any:
        plan = whole(*arguments)
        width = -(-arguments[1].feature.row_items // 3)
        return replace(
            plan, width=width, num_slices=3, piece_rows=11, piece_edges=37, sort_bytes=20_000
        )

    monkeypatch.setattr("preprocess.derive.derive.plan_derivation", planned)


@pytest.mark.parametrize(
    ("target", "relation", "dtype"),
    [pytest.param("author", "writes", None, marks=pytest.mark.long), ("author", "writes", "int8"),
     ("author", "thanks", "float16"), ("paper", "cites", "bfloat16")],
)  # fmt: skip
def test_memory_changes_no_byte(
    cited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, relation: str,
    dtype: Any,
):  # fmt: skip
    for name in ("whole", "slices"):
        shutil.copytree(cited, tmp_path / name)
    asked = Derivation(target, "paper", relation, name="z", feature="x", dtype=dtype)
    result = derive(tmp_path / "whole", asked, QUIET, threads=1)
    assert result.plan.num_slices == 1
    many_slices(monkeypatch)
    result = derive(tmp_path / "slices", asked, QUIET)
    assert result.plan.num_slices == 3
    assert tree(tmp_path / "slices") == tree(tmp_path / "whole")
    check(open_store(tmp_path / "slices"), asked, result)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("relation", ["writes", "thanks"])
def test_the_least_memory_does(tmp_path: Path, relation: str):
    """A refusal says what would do; that does, and gives the same bytes."""
    rng = np.random.default_rng(3)
    graph = Graph().add_type("paper", 3000, x=rng.random((3000, 20)).astype(np.float32))
    graph.add_type("author", 20_000)
    graph.add_relation("author", "writes", "paper", rng.integers(0, (20_000, 3000), (30_000, 2)))
    graph.add_relation("paper", "thanks", "author", rng.integers(0, 3000, (30_000, 2)))
    ingest(graph, tmp_path / "whole", OPTIONS, QUIET)
    shutil.copytree(tmp_path / "whole", tmp_path / "least")
    asked = Derivation("author", "paper", relation, "sum")
    smallest = minimum(tmp_path / "least", asked)
    result = derive(tmp_path / "least", asked, QUIET, smallest)
    derive(tmp_path / "whole", asked, QUIET)
    assert tree(tmp_path / "least") == tree(tmp_path / "whole")
    assert result.plan.num_slices > 1


def test_a_chain_of_types(tmp_path: Path):
    """Institutions out of authors, which have theirs out of papers; the daemon serves both."""
    graph = citations({"writes"})
    graph.add_type("institution", 30)
    pairs = np.random.default_rng(1).integers(0, (1490, 29), (2000, 2))
    graph.add_relation("author", "at", "institution", pairs)
    path = tmp_path / "store"
    before = ingest(graph, path, OPTIONS, QUIET).manifest
    derive(path, Derivation("author", "paper", "writes", feature="x"), QUIET)
    asked = Derivation("institution", "author", "at")
    result = derive(path, asked, QUIET)
    verify_store(path)
    check(open_store(path), asked, result)
    assert result.manifest.fingerprint != before.fingerprint
    assert sorted(p.name for p in path.iterdir()) == ["edges", "nodes", "zarr.json"]
    with daemon(path):
        pass


class Kill(Progress):
    """Progress that ends the process by SIGKILL when a step begins.

    What the journal is to say of the step before is on disk by then.
    """

    def __init__(self, at: str) -> None:
        super().__init__(rendering=Rendering())
        self.at = at

    def stage(self, name, total, unit):
        if name == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().stage(name, total, unit)


WROTE = Derivation("author", "paper", "writes", feature="x")


@pytest.fixture(scope="module")
def uncut(cited: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Files of `cited`, and with what authors get of papers' features."""
    path = cited.with_name("uncut")
    shutil.copytree(cited, path)
    derive(path, WROTE, QUIET)
    return tree(cited), tree(path)


@pytest.mark.parametrize(
    ("at", "resumed"),
    [("count edges", 0), ("cut columns", 1), ("add rows, slice 2 of 3", 3), ("write rows", 5)],
)
def test_a_kill_leaves_the_old_store_and_the_next_run_goes_on(
    cited: Path, uncut: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, resumed: int
):
    shutil.copytree(cited, tmp_path / "killed")
    before, whole = uncut
    many_slices(monkeypatch)
    child = os.fork()
    if child == 0:
        finish = WorkFolder.finish

        def finish_and_wait(work: WorkFolder, *arguments: Any) -> None:
            finish(work, *arguments)
            work._settle()

        WorkFolder.finish = finish_and_wait
        try:
            derive(tmp_path / "killed", WROTE, Kill(at))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = tree(tmp_path / "killed")
    assert {name: left[name] for name in left if not name.startswith(".extend/")} == before
    assert len(left) > len(before)
    verify_store(tmp_path / "killed")
    result = derive(tmp_path / "killed", WROTE, QUIET)
    assert sum(s.resumed for s in result.stages) == resumed
    assert [p.name for p in tmp_path.iterdir()] == ["killed"]
    assert tree(tmp_path / "killed") == whole


def test_halos_have_copies_of_the_new_rows(tmp_path: Path):
    options = replace(
        OPTIONS, split=(0.5, 0.3, 0.2), partition=PartitionOptions(5),
        influence=InfluenceOptions(hubs=0.02, halo=0.5),
    )  # fmt: skip
    path = tmp_path / "store"
    ingest(citations({"cites", "writes"}), path, options, QUIET)
    for name, dtype in (("x", None), ("narrow", "int8")):
        derive(path, replace(WROTE, name=name, dtype=dtype), QUIET)
    store = open_store(path)
    author = store.manifest.types[1]
    assert author.halo is not None
    slots = read_rows(store, author.halo.nodes).astype(np.int64) - author.first
    assert slots.size > 500
    for name in ("x", "narrow"):
        rows = read_rows(store, author.features[name])
        assert np.array_equal(read_rows(store, author.halo.features[name]), rows[slots])
        assert author.halo.features[name].scale_path == author.features[name].scale_path
    verify_store(path)


def test_rows_longer_than_a_block(tmp_path: Path):
    rng = np.random.default_rng(0)
    graph = Graph().add_type("p", 40, x=rng.random((40, 3, 500)).astype(np.float32))
    graph.add_type("a", 30)
    graph.add_relation("a", "to", "p", rng.integers(0, (30, 40), (100, 2)))
    path = tmp_path / "store"
    ingest(graph, path, OPTIONS, QUIET)
    asked = Derivation("a", "p", "to")
    result = derive(path, asked, QUIET)
    assert result.resolved.array.row_shape == (3, 500)
    check(open_store(path), asked, result)
    verify_store(path)


def test_nan_stays_and_wins(tmp_path: Path):
    x = np.array([[1, np.nan], [3, 4], [np.inf, 5]], np.float32)
    graph = Graph().add_type("p", 3, x=x)
    graph.add_type("a", 2)
    graph.add_relation("a", "to", "p", [(0, 0), (0, 1), (1, 1), (1, 2)])
    path = tmp_path / "store"
    ingest(graph, path, replace(OPTIONS, order="source", allow_nan=True), QUIET)
    derive(path, Derivation("a", "p", "to", "max", name="m"), QUIET)
    found = read_rows(open_store(path), open_store(path).manifest.types[1].features["m"])
    assert np.array_equal(found, [[3, np.nan], [np.inf, 5]], equal_nan=True)
    with pytest.raises(BadInput, match=r"nodes/a/features/i\[0\]: found nan, expected finite"):
        derive(path, Derivation("a", "p", "to", name="i", dtype="int8"), QUIET)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For refusals: nothing may change in it."""
    path = tmp_path_factory.mktemp("derive") / "store"
    graph = citations()
    graph.add_relation("paper", "writes", "author", [(1, 2)])
    graph.add_relation("author", "meets", "venue", [(1, 2)])
    x = np.full((2500, 1), 60_000, np.float32)
    graph.arrays["paper.x"][:, :1] = x
    ingest(graph, path, OPTIONS, QUIET)
    return path


@pytest.fixture(scope="module")
def as_made(store: Path) -> dict[str, str]:
    """Its files."""
    return tree(store)


GOOD = Derivation("author", "paper", "author-writes-paper", feature="x")
TITLE = "author-writes-paper"
REFUSED = [
    (replace(GOOD, node_type="autor"), "--type: found type 'autor', expected one of paper, author"),
    (replace(GOOD, origin="x"), "--from: found type 'x', expected one of paper, author, venue"),
    (replace(GOOD, relation="wrote"), "found relation 'wrote', expected a relation between author "
     "and paper: author-writes-paper, paper-writes-author"),
    (replace(GOOD, relation="cites"), "found paper-cites-paper, expected a relation between"),
    (replace(GOOD, relation="writes"), "found author-writes-paper and paper-writes-author"),
    (replace(GOOD, node_type="venue", origin="venue", relation="appears"),
     "found paper-appears-venue, expected a relation between venue and venue: venue-knows-venue"),
    (Derivation("venue", "author", "meets"), "type 'author' without features"),
    (replace(GOOD, feature="z"), "--feature: found feature 'z', expected one of x, year of paper"),
    (Derivation("paper", "venue", "appears"), "--name: found name 'x', which paper has already"),
    (Derivation("paper", "venue", "appears", name="x.crc"), "expected a name that is free"),
    (replace(GOOD, name=""), "--name: found no name"),
    (replace(GOOD, op="sum", dtype="float16"), "expected less than 65520 for float16; --dtype bf"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_is_refused_leaves_the_store_as_it_was(
    store: Path, as_made: dict[str, str], asked, message: str
):
    with pytest.raises(BadInput) as caught:
        derive(store, asked, QUIET)
    assert message in str(caught.value)
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert tree(store) == as_made


def test_no_relation_at_all(tmp_path: Path):
    graph = Graph().add_type("p", 3, x=np.ones((3, 1), np.float32))
    graph.add_type("a", 2)
    graph.add_relation("p", "to", "p", [(0, 1)])
    ingest(graph, tmp_path / "store", OPTIONS, QUIET)
    with pytest.raises(BadInput, match="no relation joins them"):
        derive(tmp_path / "store", Derivation("a", "p", "to"), QUIET)


def test_a_full_disk_is_seen_first(store: Path, monkeypatch: pytest.MonkeyPatch):
    before, full = tree(store), shutil.disk_usage(store)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OutOfSpace, match=r"found 97.7K free, expected .* for the result and"):
        derive(store, GOOD, QUIET)
    assert tree(store) == before


def test_the_command(tmp_path: Path):
    graph = Graph().add_type("paper", 3, x=np.array([[1, 2], [3, 5], [9, 9]], np.float32))
    graph.add_type("author", 3)
    graph.add_relation("author", "writes", "paper", [(0, 0), (0, 1), (2, 1), (2, 1)])
    path = tmp_path / "store"
    ingest(graph, path, replace(OPTIONS, order="source"), QUIET)
    words = ("derive", path, "--type", "author", "--from", "paper", "--relation", "writes")
    said = good(*words, "--op", "mean", "--mem", "64M")
    fingerprint = open_store(path).manifest.fingerprint
    assert f"nodes/author/features/x, float32 3x2: mean of the paper rows over {TITLE}" in said
    assert f"fingerprint {fingerprint}" in said
    assert "1 of 3 author nodes have no neighbor" in said
    x = read_rows(open_store(path), open_store(path).manifest.types[1].features["x"])
    assert x.tolist() == [[2, 3.5], [0, 0], [3, 5]]
    assert "good: " in good("verify", path)
    assert "off by" in good(*words, "--op", "max", "--name", "m", "--dtype", "int8")
    assert "which author has already, expected a name that is free" in refused(*words)
    assert "expected at least --mem" in refused(*words, "--name", "z", "--mem", "1M")


def test_the_least_that_sorting_needs(store: Path):
    manifest = open_store(store).manifest
    resolved = resolve(manifest, replace(GOOD, relation="paper-writes-author"), "here")
    plan_derivation(manifest, resolved, 1 << 30, 10_000)
    with pytest.raises(BudgetTooSmall, match="sorting the 80,000,000 edges of one node"):
        plan_derivation(manifest, resolved, 1 << 30, 80_000_000)


def test_a_graph_far_beyond_memory_moves_its_rows_a_few_times(store: Path):
    """MAG240M's authors: a column takes 0.5 GB, all papers 187 GB in float16."""
    manifest = open_store(store).manifest
    mag = resolve(manifest, GOOD, "here")
    mag = mag._replace(
        target=msgspec.structs.replace(mag.target, num_nodes=122_383_112),
        origin=msgspec.structs.replace(mag.origin, num_nodes=121_751_666),
        relation=msgspec.structs.replace(mag.relation, num_edges=386_022_720),
        feature=RowArray("nodes/paper/features/x", "float16", 121_751_666, (768,)),
        array=RowArray("nodes/author/features/z", "float16", 122_383_112, (768,)),
    )
    little, much = (plan_derivation(manifest, mag, gib << 30) for gib in (16, 1024))
    assert (little.num_slices, much.num_slices) == (48, 1)
    stages = DeriveStages(manifest, mag, little, "mean").stages()
    moved = sum(s.cost.read + s.cost.written for s in stages)
    assert 1.8e12 < moved < 2.1e12  # papers, then twice as float32, twice all sums, the array
    assert 370e9 < temporary_bytes(stages) < 400e9
    assert temporary_bytes(DeriveStages(manifest, mag, much, "mean").stages()) < 1e9
