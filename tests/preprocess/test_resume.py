"""Runs that are killed anywhere: the same call goes on and gives the same bytes."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from blockstore.errors import StoreBusy
from blockstore.verify import verify_store
from preprocess.ingest import plan
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Rendering
from preprocess.pipeline.result import StageResult
from preprocess.pipeline.work import StageRecord, WorkFolder
from preprocess.sources.plain import PlainSource
from tests.effort import tries
from tests.preprocess.kills import run_and_kill
from tests.preprocess.naive import ArraySource, Graph
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_hetero import citations
from tests.preprocess.test_stores import minimum, rows_for

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS = IngestOptions(block_bytes=4096, edge_ids=True, undirected=True, split=(0.5, 0.3, 0.2))


def tree(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    return {
        str(p.relative_to(folder)): hashlib.blake2b(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch):
    """So little memory that buckets, columns and rows go to disk."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 1 << 10)
    monkeypatch.setattr(plan, "_FIXED_BYTES", 0)


def papers() -> Graph:
    """`citations` without the types and relations that are read as the others are."""
    return citations({"cites", "writes"})


@pytest.mark.usefixtures("tight")
def test_kills_at_any_moment_change_nothing(tmp_path: Path):
    """Each kill is of the run that goes on; after its end another begins."""
    target, kills, resumed = tmp_path / "store", 0, 0
    smallest = minimum(papers(), tmp_path / "whole", OPTIONS)
    begun = time.monotonic()
    shutil.rmtree(tmp_path / "whole")
    ingest(papers(), tmp_path / "whole", replace(OPTIONS, mem_bytes=smallest), QUIET)
    expected, whole_s = tree(tmp_path / "whole"), time.monotonic() - begun
    moments = random.Random(7)
    for attempt in range(200):
        mem = moments.choice([smallest, 8 << 20, 1 << 30])  # goes on with other memory too
        options = replace(OPTIONS, mem_bytes=mem)
        run = partial(ingest, papers(), target, options, QUIET)
        ended = run_and_kill(run, moments.uniform(0, whole_s * 0.6))
        kills += not ended
        if target.exists():
            assert tree(target) == expected, f"attempt {attempt}"
            shutil.rmtree(target)
        if kills == tries(3, 6):
            break
        resumed += (tmp_path / ".store.work" / "journal.json").exists()
    assert kills == tries(3, 6)
    assert resumed > 0
    result = ingest(papers(), target, OPTIONS, QUIET)
    assert tree(target) == expected
    assert len(result.stages) > 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "whole"]


def test_a_kill_as_the_store_has_taken_its_name_leaves_nothing_to_go_on_with(tmp_path, monkeypatch):
    """The journal is still there, what it vouches for has gone with the store."""
    target = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", lambda work: None)
        ingest(papers(), target, OPTIONS, QUIET)
    assert (tmp_path / ".store.work" / "journal.json").exists()
    expected = tree(target)
    shutil.rmtree(target)
    ingest(papers(), target, OPTIONS, QUIET)
    assert tree(target) == expected


def test_the_command_goes_on_after_kills(small_graph: Path, tmp_path: Path):
    """A real command, killed when it has said that some stages are over."""
    words = [sys.executable, "-m", "preprocess", "ingest", small_graph, tmp_path / "store"]
    options = ["--block-size", "4K", "--edge-ids", "--mem", "32M"]
    for lines in (1, 2):
        process = subprocess.Popen(
            [*map(str, words), *options], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for _ in range(lines):
            process.stderr.readline()
        process.kill()
        process.communicate(timeout=60)
    done = subprocess.run(
        [*map(str, words), *options], cwd=ROOT, capture_output=True, check=True, timeout=120
    )
    assert b"fingerprint" in done.stdout
    verify_store(tmp_path / "store")
    whole = IngestOptions(block_bytes=4096, edge_ids=True)
    ingest(PlainSource(small_graph), tmp_path / "whole", whole, QUIET)
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "whole"]


class Stop(Progress):
    """Progress that stops the run when a stage begins."""

    def __init__(self, at: str) -> None:
        super().__init__(rendering=Rendering())
        self.at = at
        self.begun: list[str] = []

    def stage(self, name, total, unit):
        self.begun.append(name)
        if name == self.at:
            raise KeyboardInterrupt
        return super().stage(name, total, unit)


def stopped(source, target: Path, at: str, options: IngestOptions = OPTIONS) -> None:
    """A run that is stopped when a stage begins."""
    with pytest.raises(KeyboardInterrupt):
        ingest(source, target, options, Stop(at))


def folder_of(path: Path) -> PlainSource:
    """A plain folder with features and labels."""
    rng = np.random.default_rng(2)
    path.mkdir(exist_ok=True)
    np.save(path / "edge_index.npy", rng.integers(0, 300, (2, 2000)))
    np.save(path / "node_feat.npy", rng.random((300, 20)).astype(np.float32))
    np.save(path / "node_label.npy", rng.integers(0, 3, 300))
    return PlainSource(path)


def test_a_stopped_run_goes_on_behind_its_last_stage(tmp_path: Path):
    source, target = folder_of(tmp_path / "in"), tmp_path / "store"
    stopped(source, target, "nodes/node/features/x")
    watch = Stop("")
    result = ingest(source, target, OPTIONS, watch)
    assert watch.begun == ["nodes/node/features/x", "nodes/node/label"]
    kept = [s.name for s in result.stages if s.resumed]
    assert kept[-1] == "ids of node"
    assert not [s.name for s in result.stages if not s.resumed and s.name in kept]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The store of `folder_of`, file by file."""
    folder = tmp_path_factory.mktemp("whole")
    ingest(folder_of(folder / "in"), folder / "store", OPTIONS, QUIET)
    return tree(folder / "store")


@pytest.mark.parametrize("change", ["options", "content", "time", "fresh", "journal", "file"])
def test_other_inputs_begin_from_scratch(tmp_path: Path, whole: dict[str, str], change: str):
    source, target = folder_of(tmp_path / "in"), tmp_path / "store"
    stopped(source, target, "nodes/node/features/x")
    options, work = OPTIONS, tmp_path / ".store.work"
    features = tmp_path / "in" / "node_feat.npy"
    if change == "options":
        options = replace(OPTIONS, seed=9)
    elif change == "content":
        stat = features.stat()
        np.save(features, np.zeros((300, 20), np.float32))
        os.utime(features, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        os.utime(features, ns=(1, 1))
    elif change == "journal":
        (work / "journal.json").write_text('{"signature": 3')
    elif change == "file":
        (work / "rank").write_bytes(b"cut")
    result = ingest(PlainSource(tmp_path / "in"), target, options, QUIET, fresh=change == "fresh")
    assert not any(s.resumed for s in result.stages)
    if change in ("options", "content"):
        ingest(PlainSource(tmp_path / "in"), tmp_path / "whole", options, QUIET)
        whole = tree(tmp_path / "whole")
    assert tree(target) == whole


def test_more_memory_may_go_on(tmp_path: Path):
    source, target = folder_of(tmp_path / "in"), tmp_path / "store"
    stopped(source, target, "nodes/node/features/x", replace(OPTIONS, mem_bytes=16 << 20))
    assert any(s.resumed for s in ingest(source, target, OPTIONS, QUIET).stages)


def test_two_runs_do_not_meet(tmp_path: Path):
    """The second one is told; what the first is doing is left alone."""
    target = tmp_path / "store"
    outer = ArraySource(9, [(0, 1)], rows_for(9, 1))

    class Meeting(ArraySource):
        def rows(self, rows, count, span=None):
            with pytest.raises(StoreBusy, match="another process is writing it"):
                ingest(outer, target, IngestOptions(), QUIET)
            yield from super().rows(rows, count)

    ingest(Meeting(9, [(0, 1)], rows_for(9, 1)), target, IngestOptions(), QUIET)
    verify_store(target)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_a_stage_that_could_not_be_recorded_did_not_happen(tmp_path: Path, monkeypatch):
    """Its record is written while the next stage runs: the error is raised by the one after."""
    with WorkFolder(tmp_path / "store", "signature", False) as work:
        work.finish(StageRecord(StageResult("first", 0, 0, 0.0)), (), ())
        work.finish(StageRecord(StageResult("second", 0, 0, 0.0)), (), ())

        def full(self: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

        work._settle()
        monkeypatch.setattr(Path, "rename", full)
        work.finish(StageRecord(StageResult("third", 0, 0, 0.0)), (), ())
        with pytest.raises(OSError, match="No space"):
            work.finish(StageRecord(StageResult("fourth", 0, 0, 0.0)), (), ())
        assert [s.name for s in work.stages] == ["first", "second"]
        monkeypatch.undo()
        work.finish(StageRecord(StageResult("third", 0, 0, 0.0)), (), ())
        assert [s.name for s in work.stages] == ["first", "second", "third"]
    assert list(tmp_path.iterdir()) == []
