"""Advice: the model against plain Python, bytes against epochs that are served, the command."""

import json
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from typer.testing import CliRunner

from blockstore.store import Store, open_store
from blockstore.units import parse_bytes
from loaderd.advise.measuring import Report, report_on, solve_work
from loaderd.advise.trials import Trials
from loaderd.commands import app
from loaderd.devicecost import DeviceCost
from loaderd.engine.advice import (
    Growth,
    Line,
    Reads,
    Rooms,
    Sample,
    Work,
    advise,
    block_reads,
    choose_equal,
    cpu_seconds,
    fits_in_memory,
    look_at,
    minibatch_reads,
)
from loaderd.memory.ledger import Budget, EngineSettings, served_rows
from loaderd.protocol import Attach
from loaderd.sessions.engine import Engine
from preprocess.hops.hops import make_hops
from preprocess.options import HopsRequest
from tests.graphs import make_csc
from tests.preprocess.quiet import QUIET
from tests.stores import write_store

NODES, BLOCK = 40_000, 4096
OFFSETS = tuple(range(0, NODES + 1, NODES // 16))
HUBS = tuple(range(7, NODES, 997))
HALOS = [sorted({(p * 3001 + 17 * i) % NODES for i in range(300)}) for p in range(16)]
REQUEST = Attach(token=0, request=0, num_neighbors=(4, 3), batch_size=100)
SMALL, LARGE = "2M", "64M"  # the store is larger than the one, and far smaller than the other


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """A partitioned store of some 4 MB in blocks of 4 KiB, half a million edges."""
    rng = np.random.default_rng(5)
    graph = make_csc(rng.integers(0, 26, NODES), 3)
    path = tmp_path_factory.mktemp("advice") / "store"
    train = rng.permutation(NODES)[:1600]
    write_store(path, graph, train, BLOCK, offsets=OFFSETS, hubs=HUBS, halos=HALOS)
    return open_store(path)


@pytest.fixture(scope="module")
def reports(store: Store) -> dict[str, Report]:
    """What is advised with little memory and with much."""
    return {mem: report_on(store, settings(mem), REQUEST) for mem in (SMALL, LARGE)}


def settings(mem: str) -> EngineSettings:
    return EngineSettings(parse_bytes(mem), workers=2, readers=4)


def size_of(store: Store) -> int:
    return sum(p.stat().st_size for p in store.path.rglob("*") if p.is_file())


def counted(store: Store, mem: str, line: Line) -> float:
    """Bytes read by an epoch of this plan, behind another."""
    request = structs.replace(REQUEST, plan=line.plan, halos="halos" in line.options)
    with Engine(store, settings(mem)) as engine:
        trials = Trials(engine, request)
        trials.serve(trials.num_steps)
        read = trials.serve(trials.num_steps, epoch=1).num_bytes
        trials.close()
    return float(read)


# -- the model ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 500), min_size=1, max_size=6), st.integers(0, 600))
def test_fresh_is_what_has_no_room(steps, room):
    sizes = np.cumsum(np.sort(steps)[::-1] * 2 ** np.arange(len(steps)) // 2).tolist()
    growth = Growth(tuple(sizes), 2 * max(sizes) + 1)
    found = [growth.of(n) for n in range(40)]
    assert found == sorted(found)
    assert max(found) <= growth.total
    assert growth.fresh(growth.of(200), 200) == 0
    assert growth.fresh(0, 200) == growth.of(1)
    assert growth.fresh(room, 200) >= 0


@pytest.mark.parametrize("room", [20, 60, 150, 280])
def test_fresh_is_what_a_cache_that_drops_the_longest_unused_misses(room):
    """Batches of 30 of 300 items, some of them far likelier; 400 batches, within a fifth."""
    rng = np.random.default_rng(1)
    likely = rng.pareto(1.5, 300) + 0.1
    batches = [
        rng.choice(300, 30, replace=False, p=likely / likely.sum()).tolist() for _ in range(400)
    ]
    seen: set[int] = set()
    counts = []
    for number, batch in enumerate(batches[:64], 1):
        seen |= set(batch)
        if number.bit_count() == 1:
            counts.append(len(seen))
    cache: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for number, batch in enumerate(batches):
        missed += sum(item not in cache for item in batch) * (number >= 100)
        for item in batch:
            cache.pop(item, None)
            cache[item] = None
        while len(cache) > room:
            cache.popitem(last=False)
    expected = Growth(tuple(counts), 300).fresh(room, 10_000)
    assert expected == pytest.approx(missed / 300, rel=0.2, abs=0.6)


def test_a_look_counts_what_plain_python_counts(store):
    manifest, served = store.manifest, served_rows(store.manifest)
    first_node = store.first_node(manifest.relations[0]).astype(np.int64)
    rng = np.random.default_rng(2)
    samples = [
        Sample(rng.choice(NODES, 50, replace=False).astype(np.uint32), ((0, 5), (5, 30)), 45)
        for _ in range(8)
    ]
    look = look_at(manifest, served, [first_node], samples)
    per_block = BLOCK // 8
    for i, count in enumerate((1, 2, 4, 8)):
        nodes = [v for s in samples[:count] for v in s.nodes.tolist()]
        assert look.rows[0].counts[i] == len(set(nodes))
        assert look.row_blocks.counts[i] == len({v // per_block for v in nodes})
        for hop, (low, high) in enumerate(((0, 5), (5, 30))):
            own = [v for s in samples[:count] for v in s.nodes[low:high].tolist()]
            blocks = {max(b for b in range(first_node.size - 1) if first_node[b] <= v) for v in own}
            assert look.hop_blocks[hop].counts[i] == len(blocks)
    late = {v for s in samples[6:] for v in s.nodes.tolist()}
    assert set(look.needed[0].tolist()) == {v for s in samples for v in s.nodes.tolist()}
    assert set(look.cold[0].tolist()) == late - {v for s in samples[:6] for v in s.nodes.tolist()}
    assert (look.nodes, look.edges, look.batches) == (50, 45, 8)


def test_the_more_blocks_the_fewer_runs():
    assert block_reads(10, 100, 4096) == (40960, 9)
    assert block_reads(100, 100, 4096) == (409600, 0)
    assert Reads(8192, 3).seconds(DeviceCost(1e-3, 1e-4)) == pytest.approx(3.2e-3)
    assert Reads(5, 1) + Reads(2, 3).times(2) == (9, 7)


@given(st.integers(0, 400), st.integers(0, 400))
def test_memory_never_makes_minibatches_read_more(graph, more):
    look = look_at_nothing()._replace(
        row_blocks=Growth((100, 150, 200), 400), hop_blocks=(Growth((5,), 50), Growth((40,), 50))
    )
    small, large = Rooms(graph, graph), Rooms(graph + more, graph + more)
    reads = [minibatch_reads(look, rooms, 4096, 8192, 500).num_bytes for rooms in (small, large)]
    assert reads[1] <= reads[0] + 1e-6
    assert minibatch_reads(look, Rooms(50, 400), 4096, 8192, 500).num_bytes == 0


def look_at_nothing():
    """Of no batch."""
    manifest = type("M", (), {"block_bytes": 4096, "relations": (), "types": ()})()
    return look_at(manifest, [], [], [])


@pytest.mark.parametrize(
    ("plain", "hyper", "plan"),
    [
        (0.0, None, "minibatch"),
        (9.0, None, "minibatch"),
        (0.0, 0.0, "minibatch"),
        (2.0, 1.0, "hyperbatch"),
        (1.0, 2.0, "minibatch"),
    ],
)
def test_of_equal_batches_those_are_chosen_that_are_read_faster(plain, hyper, plan):
    assert choose_equal(plain, hyper) == plan


@pytest.mark.parametrize(
    ("rows", "graph", "fits"), [(10, 5, True), (11, 5, False), (10, 21, False)]
)
def test_what_fits_needs_no_reading(rows, graph, fits):
    budget = Budget((), 1 << 20, 120, 20, 4, graph, rows)
    assert fits_in_memory(budget, 10) == fits


def line(plan: str, seconds: float, runs: bool = True, kept: float = -1.0) -> Line:
    equal = plan != "macrobatch"
    return Line(plan, "", equal, 1 << 20, runs, "h", "r", 1e9, 0, seconds, 0.1, 1.0, "", kept)


@pytest.mark.parametrize(
    ("seconds", "runs", "kept", "advised"),
    [
        ((5, 9, 8), (1, 1, 1), 0.9, "minibatch"),
        ((9, 5, 4), (1, 1, 1), 0.9, "hyperbatch"),
        ((9, 5, 3), (1, 1, 1), 0.9, "macrobatch"),
        ((9, 5, 3), (1, 1, 1), 0.5, "hyperbatch"),
        ((9, 5, 3), (1, 1, 1), -1.0, "hyperbatch"),
        ((9, 5, 8), (1, 0, 1), 0.9, "minibatch"),
        ((9, 5, 3), (0, 0, 0), 0.9, ""),
    ],
)
def test_other_batches_are_advised_where_they_are_worth_it(seconds, runs, kept, advised):
    plans = ("minibatch", "hyperbatch", "macrobatch")
    lines = [line(plan, s, bool(r), kept) for plan, s, r in zip(plans, seconds, runs, strict=True)]
    advice = advise(lines, "minibatch")
    assert advice.plan == advised
    assert ("--mem 1M" in advice.reason) == (not advised)


def test_of_macro_batches_those_that_keep_most_are_advised():
    many = replace(line("macrobatch", 3, kept=0.95), options="halos")
    few = replace(line("macrobatch", 2, kept=0.85), options="hubs")
    assert advise((line("minibatch", 9), few, many), "minibatch").options == "halos"


@given(st.floats(0.001, 1), st.floats(1e-10, 1e-8), st.integers(1, 1 << 30), st.integers(2, 16))
def test_cpu_seconds_are_told_apart(batch_s, byte_s, size, count):
    load, trial = batch_s + size * byte_s, count * batch_s
    work = solve_work(load, size, trial, 0, count)
    assert work.batch_s == pytest.approx(batch_s)
    assert work.byte_s == pytest.approx(byte_s, rel=1e-3, abs=1e-9 / size)


def test_readers_take_cores_too():
    assert cpu_seconds(Work(0.1, 0), 100, 0, 2, 4) == pytest.approx(5)
    assert cpu_seconds(Work(0.1, 0), 100, 0, 0.5, 4) == pytest.approx(20)
    assert cpu_seconds(Work(0.1, 1e-9), 100, 30e9, 4, 4) == pytest.approx(10)


# -- against what is served ---------------------------------------------------------------------


@pytest.mark.parametrize("mem", [SMALL, LARGE])
def test_bytes_of_macro_batches_are_those_that_are_read(store, reports, mem):
    assert (size_of(store) > parse_bytes(mem)) == (mem == SMALL)
    lines = [p for p in reports[mem].advice.lines if p.plan == "macrobatch"]
    assert [p.options for p in lines] == ["hubs + halos", "hubs"]
    for found in lines:
        assert 0.8 <= found.epoch_bytes / counted(store, mem, found) <= 1.25


def test_bytes_of_equal_batches_are_those_that_are_read_within_a_factor_of_two(store, reports):
    for found in reports[SMALL].advice.lines[:2]:
        assert found.runs, found.note
        assert 0.5 <= found.epoch_bytes / counted(store, SMALL, found) <= 2
    for found in reports[LARGE].advice.lines[:2]:
        assert found.epoch_bytes == 0
        new = 0.25 * found.fill_bytes  # that no batch of the epoch before needed
        assert counted(store, LARGE, found) <= new


@pytest.mark.parametrize("mem", [SMALL, LARGE])
def test_auto_and_advice_agree(store, reports, mem):
    with Engine(store, settings(mem)) as engine:
        assert engine.attach(REQUEST, None).plan == reports[mem].advice.auto


# -- the command --------------------------------------------------------------------------------


def run(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["advise", *map(str, words)])
    return found.exit_code, found.output


def test_the_command_says_it_all_in_a_table(store):
    code, text = run(store.path, "--mem", LARGE, "--workers", 2, "--num-neighbors", 4, 3)
    assert code == 0, text
    rows = [row.split("  ")[0] for row in text.splitlines()]
    assert {"plan", "minibatch", "hyperbatch", "macrobatch, hubs", "macrobatch, hubs + halos"} <= {
        *rows
    }
    assert "GB/s in order" in text
    assert "plan auto takes minibatch" in text
    assert "advice: minibatch:" in text


def test_json_has_every_number_by_name(store):
    words = (
        "--mem",
        LARGE,
        "--workers",
        2,
        "--num-neighbors",
        "4,3",
        "--batch-size",
        100,
        "--json",
    )
    code, text = run(store.path, *words)
    assert code == 0, text
    made = json.loads(text)
    assert made["steps"] == 16
    assert made["machine"]["device"]["order_s"] > 0
    first = made["advice"]["lines"][0]
    assert (first["plan"], first["equal"], first["runs"]) == ("minibatch", True, True)
    assert first["first_epoch_s"] == pytest.approx(first["epoch_s"] + first["fill_s"])
    assert first["limit"] in ("disk", "cores")


def test_too_little_memory_names_what_would_do(store):
    words = ("--workers", 1, "--readers", 2, "--num-neighbors", "4,3", "--batch-size", 100)
    code, text = run(store.path, "--mem", "300K", *words)
    assert code == 2
    assert "cannot run" in text
    enough = text.split("--mem ")[-1].split()[0]
    code, text = run(store.path, "--mem", enough, *words)
    assert code == 0, text
    assert "advice: minibatch" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--split", "nowhere"), "split 'nowhere' is not in the store: it has train, all"),
        (("--num-neighbors", "15,x"), "--num-neighbors '15,x': expected numbers such as 15 10 5"),
        (("--num-neighbors", "0"), "fanout 0 at hop 0"),
        (("--mem", "much"), "'much' is not a size"),
        (("--macro-partitions", 17), "macro_partitions is 17, expected 1 to the store's 16"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(store, words, expected):
    code, text = run(store.path, *words)
    assert code == 2
    assert text.startswith("error: ")
    assert expected in text
    assert text.count("\n") == 1


def test_no_store_and_no_partitions(tmp_path: Path):
    code, text = run(tmp_path / "none")
    assert code == 2
    assert "none" in text
    rng = np.random.default_rng(0)
    write_store(tmp_path / "plain", make_csc(rng.integers(0, 9, 500), 1), range(90))
    code, text = run(tmp_path / "plain", "--mem", "8M", "--num-neighbors", 3, 2, "--workers", 1)
    assert code == 0, text
    assert "blockstore repartition" in text
    assert "--partitions 64" in text


@pytest.fixture(scope="module")
def hop_store(store: Store, tmp_path_factory) -> Store:
    """The same store with twelve hops of every node."""
    path = tmp_path_factory.mktemp("advice") / "hops"
    shutil.copytree(store.path, path)
    make_hops(path, HopsRequest(rows="all", hops=12), QUIET)
    return open_store(path)


@pytest.mark.parametrize(("mem", "held"), [("64M", True), ("3M", False)])
def test_hop_wise_batches_have_lines_of_their_own(hop_store, mem, held):
    request = structs.replace(REQUEST, split="all", batch_size=2000, num_neighbors=(1,))
    report = report_on(hop_store, settings(mem), request)
    lines = {p.plan: p for p in report.advice.lines if not p.sampled}
    assert list(lines) == ["chunks", "rows"]
    assert report.advice.plan not in lines
    hops = report.advice.hops
    assert hops is not None
    assert hops.place == ("host" if held else "storage")
    assert hops.facts.num_bytes == 8 * NODES * 14
    assert (hops.facts.chunks_s, hops.facts.rows_s) == tuple(p.epoch_s for p in lines.values())
    whole = 8 * NODES * (12 + 1 + 1)  # hops 0 to 12 and original ids
    for found in lines.values():
        assert (found.epoch_bytes == 0) == held
        assert found.fill_bytes == 0 if not held else found.fill_bytes >= whole
    if not held:
        assert 0.9 <= lines["chunks"].epoch_bytes / whole <= 1.3
        assert lines["rows"].epoch_bytes > 2 * whole  # each page several times
