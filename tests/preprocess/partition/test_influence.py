"""Hubs and halos against dense walks, for any memory; what is said about them, by enumeration."""

import random
import shutil
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock
from blockstore.format import Kept
from blockstore.store import Store, open_store, read_rows
from blockstore.verify import verify_store
from preprocess.cli.info import info_text
from preprocess.errors import BadInput
from preprocess.ingest import plan
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.partition import influence_stages
from preprocess.partition.influence_stages import top_scores
from preprocess.partition.partition import InfluenceOptions, PartitionOptions, parse_hubs
from preprocess.sources.plain import PlainSource
from preprocess.stages import walk as walk_module
from preprocess.stages.slots import SlotCopies
from preprocess.stages.walk import LANE_BYTES, LazyWalk, plan_lanes, top_nodes, training_marks
from tests.effort import tries
from tests.preprocess.ingest.test_plan import plan_ingest
from tests.preprocess.kills import run_and_kill
from tests.preprocess.naive import Graph
from tests.preprocess.partitions import ingest_parts
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_commands import run as run_command
from tests.preprocess.test_hetero import citations, edge_arrays, stored_blocks
from tests.preprocess.test_resume import stopped, tree
from tests.preprocess.test_stores import minimum

HALOS = InfluenceOptions(hubs=0.1, halo=0.4)
OPTIONS = IngestOptions(block_bytes=4096, influence=HALOS)


@st.composite
def graphs(draw: Any, weighted: bool = True) -> Graph:
    """Up to three types with training nodes or without, up to four relations."""
    graph, sizes = Graph(), draw(st.lists(st.integers(1, 25), min_size=1, max_size=3))
    for t, size in enumerate(sizes):
        rng = np.random.default_rng(size)
        arrays = {"x": rng.standard_normal((size, 3)), "y": rng.integers(0, 3, size)}
        if draw(st.booleans()):
            train = draw(st.sets(st.integers(0, size - 1), max_size=size))
            arrays["train"] = np.array(sorted(train), np.int64)
        graph.add_type(f"t{t}", size, **arrays)
    for r in range(draw(st.integers(1, 4))):
        src, dst = (draw(st.integers(0, len(sizes) - 1)) for _ in range(2))
        node = st.tuples(st.integers(0, sizes[src] - 1), st.integers(0, sizes[dst] - 1))
        pairs = draw(st.lists(node, max_size=60))
        names = {"weight", "time"} if weighted and draw(st.booleans()) else set()
        arrays = edge_arrays(names, len(pairs))
        graph.add_relation(f"t{src}", f"r{r}", f"t{dst}", pairs, **arrays)
    return graph


def parts_of(graph: Graph, count: int, seed: int) -> np.ndarray:
    """A random partition; every part has a node of some type."""
    total = sum(graph.num_nodes.values())
    found = np.random.default_rng(seed).integers(0, count, total).astype(np.uint32)
    found[: min(count, total)] = np.arange(min(count, total))
    found[0] = count - 1
    return found


def made(tmp_path_factory: Any, graph: Graph, options: IngestOptions, count: int) -> Store:
    """The store of a graph in random partitions."""
    path = tmp_path_factory.mktemp("stores") / "store"
    ingest_parts(parts_of(graph, count, 3), graph, path, options)
    return open_store(path)


class Dense:
    """A store's walks as one matrix."""

    def __init__(self, store: Store) -> None:
        types = store.manifest.types
        size = store.manifest.num_nodes
        self.offsets = np.stack([
            store.side(t.partition_offsets_path, np.uint64, t.num_partitions + 1) for t in types
        ]).astype(np.int64)  # fmt: skip
        self.edges = []
        for r in store.manifest.relations:
            held = stored_blocks(store, r)
            self.edges += list(zip(held["src"], held["dst"], strict=True))
        degrees = np.zeros(size)
        for _, v in self.edges:
            degrees[v] += 1
        self.degrees = degrees
        self.train = np.zeros(size)
        for t in types:
            if "train" in t.splits:
                ranks = read_rows(store, t.store_id)
                self.train[ranks[read_rows(store, t.splits["train"])]] = 1

    @cached_property
    def step(self) -> np.ndarray:
        """Of all nodes to all nodes."""
        found = np.diag(np.where(self.degrees > 0, 0.5, 1.0))
        for u, v in self.edges:
            found[u, v] += 0.5 / self.degrees[v]
        return found

    def walk(self, start: np.ndarray) -> np.ndarray:
        """Scores after three steps."""
        return self.step @ self.step @ self.step @ start

    def inside(self, part: int) -> np.ndarray:
        """Whether each node is in a partition."""
        mask = np.zeros(self.degrees.size, bool)
        for row in self.offsets:
            mask[row[part] : row[part + 1]] = True
        return mask


def check_top(scores: np.ndarray, chosen: list[int], count: int, allowed: np.ndarray) -> None:
    """`chosen` are `count` of the highest positive scores that are allowed, but for rounding."""
    held = scores * allowed
    slack = 1e-5 * (held.max(initial=0) + 1e-30)
    assert len(chosen) == min(count, int((held > 0).sum()))
    if len(chosen):
        others = np.delete(held, chosen)
        assert held[chosen].min() > 0
        assert held[chosen].min() >= others.max(initial=0) - slack


def hubs_of(store: Store) -> list[int]:
    """Of all types."""
    return [v for t in store.manifest.types if t.hubs for v in read_rows(store, t.hubs).tolist()]


def halos_of(store: Store) -> list[list[int]]:
    """Nodes of each group, ascending, of all types; the last are the hubs."""
    found: list[list[int]] = []
    for t in store.manifest.types:
        assert t.halo is not None
        nodes = read_rows(store, t.halo.nodes)
        offsets = store.side(t.halo.offsets_path, np.uint64, t.num_partitions + 2).tolist()
        found = found or [[] for _ in offsets[1:]]
        for group, (low, high) in enumerate(pairwise(offsets)):
            found[group] += nodes[low:high].tolist()
    return found


@settings(max_examples=tries(4, 8))
@given(graph=graphs(), edge_ids=st.booleans(), count=st.integers(1, 5))
def test_hubs_and_halos_are_those_of_a_dense_walk(tmp_path_factory, graph, edge_ids, count):
    store = made(tmp_path_factory, graph, replace(OPTIONS, edge_ids=edge_ids), count)
    dense, groups = Dense(store), halos_of(store)
    size = store.manifest.num_nodes
    train = dense.train if dense.train.any() else np.ones(size)
    scores = dense.walk(train) if dense.train.any() else dense.degrees
    hubs = hubs_of(store)
    check_top(scores, hubs, int(0.1 * size + 0.5), np.ones(size))
    assert groups[-1] == sorted(hubs)
    for part in range(count):
        inside = dense.inside(part)
        allowed = ~inside
        allowed[hubs] = False
        wanted = int(0.4 * inside.sum() + 0.5)
        check_top(dense.walk(train * inside), groups[part], wanted, allowed)
        assert groups[part] == sorted(groups[part])
    check_copies(store)
    verify_store(store.path)


def check_copies(store: Store) -> None:
    """Rows and columns of slots are those of their nodes."""
    for t in store.manifest.types:
        nodes = read_rows(store, t.halo.nodes).astype(np.int64)
        for name, copy in [*t.halo.features.items()]:
            rows = read_rows(store, t.features[name])
            assert np.array_equal(read_rows(store, copy), rows[nodes - t.first])
        assert np.array_equal(
            read_rows(store, t.halo.label), read_rows(store, t.label)[nodes - t.first]
        )
        for r in (r for r in store.manifest.relations if r.dst == t.name):
            whole, copies = stored_blocks(store, r), stored_blocks(store, r.halo)
            assert r.halo.num_edges == len(copies["dst"])
            expected: dict[str, list[Any]] = {name: [] for name in copies}
            for slot, node in enumerate(nodes.tolist()):
                where = [i for i, v in enumerate(whole["dst"]) if v == node]
                expected["dst"] += [slot] * len(where)
                for name in ("src", "id", "weight", "time"):
                    expected[name] += [whole[name][i] for i in where] if whole[name] else []
            assert copies == expected


def enumerated(store: Store, dense: Dense, hubs: bool, halos: bool, drawn: int) -> tuple[Any, ...]:
    """(mean over training nodes, over edges, nodes loaded), over all draws of partitions."""
    groups, count = halos_of(store), dense.offsets.shape[1] - 1
    held = []
    for part in range(count):
        mask = dense.inside(part)
        mask[groups[part] if halos else []] = True
        held.append(mask)
    pinned = np.zeros(dense.degrees.size, bool)
    pinned[groups[-1] if hubs else []] = True
    draws = list(combinations(range(count), drawn))
    loaded = {d: np.any([held[p] for p in d], axis=0) | pinned for d in draws}
    train = dense.train if dense.train.any() else np.ones(dense.degrees.size)
    shares, edges = [], []
    columns: dict[tuple[int, int], list[int]] = {}
    for number, r in enumerate(store.manifest.relations):
        blocks = stored_blocks(store, r)
        for u, v in zip(blocks["src"], blocks["dst"], strict=True):
            if train[v]:
                columns.setdefault((number, v), []).append(u)
    for (_, v), sources in columns.items():
        mine = [d for d in draws if any(dense.inside(p)[v] for p in d)]
        kept = [np.mean([loaded[d][u] for d in mine]) for u in sources]
        shares.append(np.mean(kept))
        edges += kept
    mean = [float(np.mean(x)) if len(x) else 0.0 for x in (shares, edges)]
    return (*mean, float(np.mean([m.mean() for m in loaded.values()])))


@settings(max_examples=8)
@given(graph=graphs())
@pytest.mark.long
def test_what_is_kept_is_the_mean_over_all_draws(tmp_path_factory, graph):
    with pytest.MonkeyPatch.context() as patch:  # few draws to enumerate: 3 of 6, 2 of 6
        patch.setattr(walk_module, "SHARES", (2, 3))
        store = made(tmp_path_factory, graph, OPTIONS, 6)
    dense, found = Dense(store), store.manifest.influence
    for kept, drawn in zip(found.kept, (3, 2), strict=True):
        assert kept.num_partitions == drawn
        for i, (hubs, halos) in enumerate(((False, False), (True, False), (True, True))):
            shares = (kept.nodes[i], kept.edges[i], kept.loaded[i])
            assert shares == pytest.approx(enumerated(store, dense, hubs, halos, drawn))
        rows = drawn / 6 * (store.manifest.num_nodes + found.num_slots) + found.num_hubs
        assert kept.rows == pytest.approx(rows / store.manifest.num_nodes)


@given(
    scores=st.lists(st.sampled_from([0, 1e-30, 0.25, 0.5, 0.5000001, 3, 1e9]), max_size=120),
    width=st.sampled_from([1, 2, 16]),
    quota=st.integers(0, 9),
)
def test_top_nodes_are_those_of_a_sort(scores, width, quota):
    lanes = np.array(scores[: len(scores) // width * width], np.float32).reshape(-1, width)
    quotas = (np.arange(width) + quota) % 10
    found = top_nodes(np.ascontiguousarray(lanes).reshape(-1), width, quotas)
    for lane in range(width):
        order = sorted(range(lanes.shape[0]), key=lambda v: (-lanes[v, lane], v))
        best = [v for v in order if lanes[v, lane] > 0][: quotas[lane]]
        assert found[lane].tolist() == sorted(best)


@given(
    scores=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=40), count=st.integers(0, 50)
)
def test_hubs_come_in_the_order_of_their_scores(scores, count):
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    expected = [v for v in order if scores[v] > 0][:count]
    assert top_scores(np.array(scores, np.float64), count).tolist() == expected


@given(nodes=st.integers(1, 10**9), walks=st.integers(1, 5000), room=st.integers(0, 10**12))
def test_lanes_fit_their_room(nodes, walks, room):
    lanes = plan_lanes(nodes, walks, room)
    assert lanes.num_walks == 1 or lanes.num_walks * nodes * LANE_BYTES <= room
    assert lanes.width in (1, 2, 4, 8, 16)
    assert (lanes.groups - 1) * lanes.width < walks


@pytest.mark.parametrize("dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_rows_are_copied_as_they_are_stored(tmp_path: Path, dtype: str):
    graph = star(train=np.arange(2, 12))
    graph.arrays["node.x"][:] = np.linspace(-1, 1, 48).reshape(12, 4)
    options = IngestOptions(dtype=dtype, influence=InfluenceOptions(hubs=0.2, halo=0.4))
    node = ingest_parts(PARTS, graph, tmp_path / "store", options).types[0]
    store, copy = verified(tmp_path / "store"), node.halo.features["x"]
    assert (copy.dtype, copy.scale_path) == (dtype, node.features["x"].scale_path)
    rows = read_rows(store, node.features["x"])
    assert np.array_equal(read_rows(store, copy), rows[read_rows(store, node.halo.nodes)])


def verified(path: Path) -> Store:
    """A store that is good."""
    verify_store(path)
    return open_store(path)


def papers() -> Graph:
    """`citations` without what is no other for hubs and halos: two types, two relations."""
    return citations({"cites", "writes"})


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch):
    """Small graphs with so little memory that everything goes to disk."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 1 << 10)
    monkeypatch.setattr(plan, "_FIXED_BYTES", 0)


@pytest.mark.usefixtures("tight")
def test_memory_does_not_show(tmp_path: Path):
    options = IngestOptions(
        block_bytes=1 << 14, edge_ids=True, undirected=True, split=(0.5, 0.3, 0.2),
        partition=PartitionOptions(20, "random"), influence=InfluenceOptions(hubs=0.02, halo=0.5),
    )  # fmt: skip
    minimum(papers(), tmp_path / "least", options)
    found = {open_store(tmp_path / "least").manifest.fingerprint}
    options = replace(options, mem_bytes=1 << 30)
    found.add(ingest(papers(), tmp_path / "roomy", options, QUIET).manifest.fingerprint)
    assert len(found) == 1
    verify_store(tmp_path / "least")


@pytest.mark.parametrize("edge_ids", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.usefixtures("tight")
def test_columns_longer_than_blocks_and_empty_ones_are_copied(tmp_path: Path, edge_ids: bool):
    """Those who matter have thousands of in-edges each; others have none for blocks on end."""
    rng = np.random.default_rng(5)
    size = 6000
    pairs = [*zip(rng.integers(0, 40, 9000), rng.integers(0, 400, 9000), strict=True)]
    pairs += [*zip(rng.integers(0, size, 30_000), rng.integers(0, 12, 30_000), strict=True)]
    graph = Graph().add_type("node", size, train=np.arange(0, 400, 3))
    graph.add_relation("node", "to", "node", pairs, **edge_arrays({"weight", "time"}, len(pairs)))
    partition = (np.arange(size) % 7).astype(np.uint32)
    options = IngestOptions(
        block_bytes=4096, order="source", edge_ids=edge_ids,
        influence=InfluenceOptions(hubs=0.0005, halo=0.01),
    )  # fmt: skip
    found = set()
    for i, mem in enumerate((3 << 20, 1 << 30)):
        asked = replace(options, mem_bytes=mem)
        manifest = ingest_parts(partition, graph, tmp_path / str(i), asked)
        found.add(manifest.fingerprint)
        verify_store(tmp_path / str(i))
        halo = manifest.relations[0].halo
        assert halo.num_edges > 30_000
        assert halo.num_blocks > 150
    assert len(found) == 1


def test_any_lanes_choose_the_same(tmp_path: Path):
    """One walk at a time, full lines, several threads: to the last bit."""
    options = IngestOptions(block_bytes=4096, split=(0.5, 0.3, 0.2), partition=PartitionOptions(21))
    ingest(papers(), tmp_path / "store", options, QUIET)
    store = open_store(tmp_path / "store")
    walk = LazyWalk(store, 1 << 16, QUIET)
    marks, offsets = training_marks(store, store.manifest.types, "train"), Dense(store).offsets
    wanted = np.full(21, 30)
    chosen = []
    for room in (0, 4, 16, 70):
        lanes = plan_lanes(walk.num_nodes, 21, room * walk.num_nodes * LANE_BYTES)
        found = walk.top_of_parts(marks, offsets, wanted, np.array([5, 9]), lanes)
        chosen.append([nodes.tolist() for nodes in found])
    assert all(c == chosen[0] for c in chosen)
    assert {len(nodes) for nodes in chosen[0]} == {30}
    assert not {5, 9} & {v for nodes in chosen[0] for v in nodes}


def test_a_dry_run_names_the_stages(tmp_path: Path):
    options = IngestOptions(
        split=(0.5, 0.3, 0.2), partition=PartitionOptions(8), influence=HALOS, block_bytes=4096
    )
    planned = plan_ingest(papers(), options)
    result = ingest(papers(), tmp_path / "store", options, QUIET)
    assert [s.name for s in result.stages] == [s.name for s in planned.stages]
    size = sum(p.stat().st_size for p in (tmp_path / "store").rglob("*") if p.is_file())
    assert 0.4 * planned.store_bytes < size < 1.3 * planned.store_bytes + (1 << 20)


STAGES = ("count in-edges", "walk", "nodes/paper/halo/features/x",
          "edges/author___writes___paper/blocks: degrees of slots", "neighbors kept")  # fmt: skip


def test_a_run_goes_on_behind_any_of_the_stages(tmp_path: Path):
    options = replace(OPTIONS, split=(0.5, 0.3, 0.2), partition=PartitionOptions(8))
    ingest(papers(), tmp_path / "whole", options, QUIET)
    for at in STAGES:
        stopped(papers(), tmp_path / "store", at, options)
    result = ingest(papers(), tmp_path / "store", options, QUIET)
    assert [s.name for s in result.stages if not s.resumed] == ["neighbors kept"]
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "whole"]


def test_kills_while_hubs_and_halos_are_made_change_nothing(tmp_path: Path):
    """Each kill is of the run that goes on, from the first of these stages to the last."""
    options = replace(OPTIONS, split=(0.5, 0.3, 0.2), partition=PartitionOptions(8, passes=1))
    target, kills, moments = tmp_path / "store", 0, random.Random(5)
    result = ingest(papers(), tmp_path / "whole", options, QUIET)
    names = [s.name for s in result.stages]
    spent_s = sum(s.elapsed_s for s in result.stages[names.index("find hubs") :])
    run = partial(ingest, papers(), target, options, QUIET)
    for _ in range(60):
        if not (tmp_path / ".store.work").exists():
            stopped(papers(), target, STAGES[0], options)
        kills += not run_and_kill(run, moments.uniform(0.02, 0.1 + spent_s * 0.6))
        if target.exists():
            assert tree(target) == tree(tmp_path / "whole")
            shutil.rmtree(target)
        if kills == tries(3, 5):
            break
    assert kills == tries(3, 5)
    ingest(papers(), target, options, QUIET)
    assert tree(target) == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "whole"]


def star(**arrays: Any) -> Graph:
    """Ten nodes that all have node 0, and a few node 1, as in-neighbors."""
    graph = Graph().add_type("node", 12, x=np.zeros((12, 4), np.float32), **arrays)
    pairs = [(0, v) for v in range(2, 12)] + [(1, v) for v in range(2, 5)] + [(2, 0), (3, 0)]
    return graph.add_relation("node", "to", "node", pairs)


PARTS = (np.arange(12) // 3).astype(np.uint32)


@pytest.mark.parametrize(
    ("options", "train", "expected", "score"),
    [
        pytest.param(InfluenceOptions(hubs=0.08), True, [0], "walk", marks=pytest.mark.long),
        (InfluenceOptions(hubs=0.17), True, [0, 1], "walk"),
        (InfluenceOptions(hubs=0.08, hub_score="degree"), True, [0], "degree"),
        (InfluenceOptions(hubs=0.08), False, [0], "degree"),
        (InfluenceOptions(hub_bytes=16 + 4 + 2 * 4), True, [0], "walk"),
        (InfluenceOptions(hub_bytes=16 + 4 + 2 * 4 - 1), True, [], "walk"),
        (InfluenceOptions(hubs=0, halo=0.4), True, [], ""),
    ],
)
def test_hubs_as_asked_for(tmp_path: Path, options, train, expected, score):
    graph = star(train=np.arange(2, 12)) if train else star()
    asked = IngestOptions(order="source", influence=options)
    manifest = ingest_parts(PARTS, graph, tmp_path / "store", asked)
    store = open_store(tmp_path / "store")
    ids = read_rows(store, manifest.types[0].original_id)
    assert ids[hubs_of(store)].tolist() == expected
    assert (manifest.influence.hub_score, manifest.influence.num_hubs) == (score, len(expected))
    verify_store(tmp_path / "store")


def test_nothing_is_asked_for(tmp_path: Path):
    none = IngestOptions(influence=InfluenceOptions(hubs=0))
    found = [
        ingest_parts(PARTS, star(), tmp_path / "none", none),
        ingest(star(), tmp_path / "whole", IngestOptions(), QUIET).manifest,
    ]
    for manifest in found:
        assert manifest.influence is None
        assert (manifest.types[0].hubs, manifest.types[0].halo) == (None, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (InfluenceOptions(hubs=1.5), "--hubs: found 1.5, expected a share of all nodes, 0 to 1"),
        (InfluenceOptions(hubs=float("nan")), "--hubs: found nan"),
        (InfluenceOptions(halo=-0.1), "--halo: found -0.1, expected a share"),
        (InfluenceOptions(halo=0.3), "--halo: found 0.3 without --partitions"),
        (InfluenceOptions(hubs=0.01), "--hubs: found 0.01 without --partitions"),
        (InfluenceOptions(hub_bytes=1 << 20), "without --partitions, expected partitions"),
    ],
)
def test_wishes_that_cannot_be_met(tmp_path: Path, options, words):
    with pytest.raises(BadInput, match=words):
        ingest(star(), tmp_path / "store", IngestOptions(influence=options), QUIET)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_is_wrong(tmp_path: Path):
    np.save(tmp_path / "edge_index.npy", np.zeros((2, 1), np.int64))
    for more, expected in (
        (["--halo", "0.3"], "--halo: found 0.3 without --partitions, expected partitions"),
        (["--hubs", "many"], "--hubs: found many, expected a share of all nodes, 0 to 1, or a"),
    ):
        done = run_command("ingest", tmp_path, tmp_path / "store", *more)
        assert done.exit_code == 2
        assert "error: " + expected in done.stderr


def test_hubs_as_people_write_them():
    assert parse_hubs("") == (None, 0)
    assert parse_hubs("0") == (0, 0)
    assert parse_hubs("0.02") == (0.02, 0)
    assert parse_hubs("64M") == (None, 64 << 20)
    for text in ("many", "-3M", "1 %"):
        with pytest.raises(BadInput, match="--hubs: found"):
            parse_hubs(text)


def _shifted(self: SlotCopies, some: slice) -> np.ndarray:
    return np.roll(self._order, 1)[some].astype(np.uint32)


def _within(*_: Any) -> Any:
    yield from (np.array([3 * p], np.uint64) for p in range(4))


@pytest.mark.parametrize(
    ("target", "name", "wrong", "words"),
    [
        (SlotCopies, "_places", _shifted, "halo/features/x.*another row than"),
        (LazyWalk, "top_of_parts", _within, "is in partition 0 itself"),
        (influence_stages, "top_scores", lambda *_: np.array([4, 4]), "hub 4 occurs twice"),
    ],
)
def test_copies_that_are_none_are_found(tmp_path: Path, monkeypatch, target, name, wrong, words):
    graph = star(train=np.arange(2, 12))
    graph.arrays["node.x"][:] = np.arange(48).reshape(12, 4)
    monkeypatch.setattr(target, name, wrong)
    options = IngestOptions(order="source", influence=InfluenceOptions(hubs=0.2, halo=0.4))
    ingest_parts(PARTS, graph, tmp_path / "store", options)
    with pytest.raises(CorruptBlock, match=words):
        verify_store(tmp_path / "store")


def test_columns_that_are_no_copies_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        SlotCopies, "_degrees", lambda self, relation: _degrees(self, relation)[::-1].copy()
    )
    options = IngestOptions(order="source", influence=InfluenceOptions(hubs=0.2))
    graph = star(train=np.arange(2, 12))
    ingest_parts(PARTS, graph, tmp_path / "store", options)
    with pytest.raises(CorruptBlock, match="column of slot 0: other edges than node"):
        verify_store(tmp_path / "store")


_degrees = SlotCopies._degrees


def test_a_real_graph_keeps_its_neighbors(tmp_path: Path, small_graph: Path):
    """Halos keep more than hubs, hubs more than nothing; the sums are those of the partitioning."""
    options = IngestOptions(
        partition=PartitionOptions(16), influence=InfluenceOptions(halo=0.3), undirected=True
    )
    manifest = ingest(PlainSource(small_graph), tmp_path / "store", options, QUIET).manifest
    assert manifest.influence is not None
    for kept in manifest.influence.kept:
        assert isinstance(kept, Kept)
        assert kept.nodes[0] < kept.nodes[1] < kept.nodes[2]
        assert kept.edges[0] < kept.edges[1] < kept.edges[2]
        assert kept.loaded[0] < kept.loaded[1] < kept.loaded[2] <= kept.rows
    text = info_text(open_store(tmp_path / "store"))
    assert "40 hubs by 3 lazy steps back from training nodes; 1,200 nodes in halos" in text
    assert f"2 partitions keep {manifest.influence.kept[0].nodes[0]:.3f}, with hubs" in text
    assert manifest.partitioning is not None
    assert manifest.influence.kept[0].edges[0] == pytest.approx(manifest.partitioning.kept_8)
