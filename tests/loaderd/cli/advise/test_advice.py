"""Advice: plans are served for a short time, and the command says which to take."""

import json
import re
import shutil
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
from loaderd.api.protocol import Attach
from loaderd.cli.advise.report import Line, Report, choose, report_on
from loaderd.cli.advise.trial import BatchMoment, PlanTrial, steady
from loaderd.cli.commands import app
from loaderd.memory.ledger import EngineSettings
from loaderd.sessions.engine import Engine
from preprocess.hops.hops import make_hops
from preprocess.ingest.options import HopsRequest
from tests.graphs import make_csc
from tests.preprocess.quiet import QUIET
from tests.stores import write_store

NODES, BLOCK = 40_000, 4096
OFFSETS = tuple(range(0, NODES + 1, NODES // 16))
HUBS = tuple(range(7, NODES, 997))
HALOS = [sorted({(p * 3001 + 17 * i) % NODES for i in range(300)}) for p in range(16)]
REQUEST = Attach(token=0, request=0, num_neighbors=(4, 3), batch_size=100)
TRIED_S = 0.6
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
    return {mem: report_on(store, settings(mem), REQUEST, TRIED_S) for mem in (SMALL, LARGE)}


def settings(mem: str) -> EngineSettings:
    return EngineSettings(parse_bytes(mem), workers=2, readers=4)


def size_of(store: Store) -> int:
    return sum(p.stat().st_size for p in store.path.rglob("*") if p.is_file())


# -- the pace -----------------------------------------------------------------------------------


@given(
    st.integers(1, 12), st.floats(0.01, 2), st.floats(1e-4, 1e-3), st.integers(3, 9),
    st.integers(0, 11),
)  # fmt: skip
def test_the_pace_of_bursts_is_that_of_whole_bursts(size, wait, within, bursts, rest):
    """`size` batches at a time, and the trial ends somewhere in a burst."""
    arrivals, at = list[BatchMoment](), 5.0
    for number in range(bursts * size + rest % size):
        at += wait if number % size == 0 else within
        arrivals.append(BatchMoment(at, 1000 * (number // size + 1), at * 2))
    if len(arrivals) < 4:
        return
    count, first, last = steady(arrivals)
    assert count > 0
    if bursts >= 4 and size > 1:
        assert count % size == 0
        period = wait + within * (size - 1)
        assert (last.at - first.at) / count == pytest.approx(period / size)
        assert last.num_bytes - first.num_bytes == 1000 * (count // size)


# -- which plan ---------------------------------------------------------------------------------


def line(plan: str, seconds: float, runs: bool = True, kept: float = -1.0) -> Line:
    batches = "others" if plan == "macrobatch" else "equal"
    if not runs:
        return Line(plan, "", batches, refused="serve with at least --mem 1M")
    trial = PlanTrial(plan, 100, 10, seconds / 10, 1 << 20, 0.1, 0.1)
    return Line(plan, "", batches, trial=trial, kept=kept)


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
    plan, _, reason = choose(lines)
    assert plan == advised
    assert ("--mem 1M" in reason) == (not advised)


def test_of_macro_batches_those_that_keep_most_are_advised():
    many = replace(line("macrobatch", 3, kept=0.95), options="halos")
    few = replace(line("macrobatch", 2, kept=0.85), options="hubs")
    assert choose([line("minibatch", 9), few, many])[:2] == ("macrobatch", "halos")


# -- what is served -----------------------------------------------------------------------------


@pytest.mark.parametrize("mem", [SMALL, LARGE])
def test_every_plan_is_tried(store, reports, mem):
    assert (size_of(store) > parse_bytes(mem)) == (mem == SMALL)
    lines = reports[mem].lines
    assert [p.name for p in lines] == [
        "minibatch", "hyperbatch", "macrobatch, hubs + halos", "macrobatch, hubs",
    ]  # fmt: skip
    for found in lines:
        assert found.trial is not None, found.refused
        assert found.trial.plan == found.plan
        assert found.trial.num_steps >= 16
        assert found.trial.epoch_s > 0 < found.trial.cores
    for found, other in zip(lines[:2], reports[SMALL].lines, strict=False):
        if mem == LARGE:  # what comes into memory in the second half is read once
            assert found.trial.epoch_bytes < other.trial.epoch_bytes


@pytest.mark.parametrize("mem", [SMALL, LARGE])
def test_auto_and_advice_agree(store, reports, mem):
    with Engine(store, settings(mem)) as engine:
        assert engine.attach(REQUEST, None).plan == reports[mem].auto


# -- the command --------------------------------------------------------------------------------


def run(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["advise", *map(str, words), "--seconds", str(TRIED_S)])
    return found.exit_code, found.output


def test_the_command_says_it_all_in_a_table(store):
    words = ("--mem", LARGE, "--workers", 2, "--num-neighbors", 4, 3)
    code, text = run(store.path, *words, "--batch-size", 100)
    assert code == 0, text
    rows = [row.split("  ")[0] for row in text.splitlines()]
    assert {"plan", "minibatch", "hyperbatch", "macrobatch, hubs", "macrobatch, hubs + halos"} <= {
        *rows
    }
    assert "each plan served for 0.6 s within --mem 64M" in text
    assert "plan auto takes minibatch" in text
    assert "advice: minibatch:" in text or "advice: hyperbatch:" in text


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
    assert (made["auto"], made["mem_bytes"]) == ("minibatch", 64 << 20)
    first = made["lines"][0]
    assert (first["plan"], first["batches"], first["refused"]) == ("minibatch", "equal", "")
    assert first["trial"]["num_steps"] == 16
    trial = first["trial"]
    assert first["epoch_s"] == pytest.approx(16 * trial["seconds"] / trial["batches"])


def test_too_little_memory_names_what_would_do(store):
    words = ("--workers", 1, "--readers", 2, "--num-neighbors", "4,3", "--batch-size", 100)
    code, text = run(store.path, "--mem", "300K", *words)
    assert code == 2
    assert "cannot run" in text
    enough = re.findall(r"--mem (\w+)", text)[-1]
    code, text = run(store.path, "--mem", enough, *words)
    assert code == 0, text
    assert "plan auto takes hyperbatch" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--split", "nowhere"), "split 'nowhere' is not in the store: it has train, all"),
        (("--num-neighbors", "15,x"), "--num-neighbors '15,x': expected numbers such as 15 10 5"),
        (("--num-neighbors", "0"), "fanout 0 at hop 0"),
        (("--sampler", "labour"), "--sampler 'labour': expected neighbor or labor"),
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


@pytest.mark.parametrize(
    ("mem", "held"), [("3M", False), pytest.param("64M", True, marks=pytest.mark.long)]
)
def test_hop_wise_batches_have_lines_of_their_own(hop_store, mem, held):
    request = structs.replace(REQUEST, split="all", batch_size=2000, num_neighbors=(1,))
    tried_s = (5 if held else 2) * TRIED_S  # of what is held the first batch reads all
    report = report_on(hop_store, settings(mem), request, tried_s)
    lines = {p.plan: p for p in report.lines if p.batches == "hops"}
    assert list(lines) == ["chunks", "rows"]
    assert report.plan not in lines
    hops = report.hops
    assert hops is not None
    assert hops.place == ("host" if held else "storage")
    assert hops.facts.num_bytes == 8 * NODES * 14
    assert (hops.facts.chunks_s, hops.facts.rows_s) == tuple(
        p.trial.epoch_s for p in lines.values()
    )
    for found in lines.values():
        assert (found.trial.epoch_bytes < hops.facts.num_bytes / 10) == held
