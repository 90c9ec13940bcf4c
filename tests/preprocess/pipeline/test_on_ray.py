"""Tasks on a real Ray, where it is installed; what is refused without one."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from preprocess.__main__ import app
from preprocess.errors import BadInput, ExecutorLost
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline import on_ray, tasks
from preprocess.pipeline.on_ray import ray_executor
from preprocess.pipeline.progress import Progress
from preprocess.sources.layouts import open_source
from tests.preprocess.quiet import QUIET
from tools.tree import file_digests

ROOT = Path(__file__).resolve().parent.parent.parent.parent
INSTALLED = find_spec("ray") is not None
MEM = 256 << 20


@pytest.fixture(scope="module")
def executor():
    """Two workers of a Ray of our own."""
    if not INSTALLED:
        pytest.skip("Ray is not installed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))  # workers import tasks of tests too
        with ray_executor("local:2", MEM) as made:
            yield made


class Deadly(NamedTuple):
    """Ends its process, unless a run of it has done that before."""

    marker: Path
    always: bool = False

    def run(self, _: Progress) -> int:
        if self.always or not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


class Wrong(NamedTuple):
    """Finds something wrong with its input."""

    def run(self, _: Progress) -> None:
        raise BadInput.at("edge_index.npy[0, 7]", "node id 9", "0 to 8", "correct it")


def refused(*words: str) -> str:
    """The line that the command ends with."""
    result = CliRunner().invoke(app, ["ingest", *words])
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    folder = tmp_path / "graph"
    folder.mkdir()
    rng = np.random.default_rng(1)
    np.save(folder / "edge_index.npy", rng.integers(0, 5000, (2, 100_000)))
    np.save(folder / "node_feat.npy", rng.random((5000, 16), np.float32))
    return folder


@pytest.mark.parametrize("address", ["local:0", "local:x", "local", "ray://host", "somewhere"])
def test_what_is_no_address_is_refused(graph: Path, tmp_path: Path, address: str):
    line = refused(str(graph), str(tmp_path / "store"), "--ray", address)
    assert line.startswith(f"error: --ray: found {address}, expected auto, local:N")


def test_a_missing_or_old_ray_is_refused(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = [str(graph), str(tmp_path / "store"), "--ray", "local:2"]
    with monkeypatch.context() as patched:
        patched.setattr(on_ray, "find_spec", lambda name: None)
        line = refused(*words)
        assert line.startswith("error: --ray local:2: found no Ray, expected it to be installed")
        assert 'pip install "blockstore[ray]"' in line
    monkeypatch.setattr(on_ray, "find_spec", lambda name: object())
    monkeypatch.setattr(on_ray, "version", lambda name: "1.13.0")
    assert "found Ray 1.13.0, expected 2.60 or newer" in refused(*words)
    assert [p.name for p in tmp_path.iterdir()] == ["graph"]


def test_the_store_is_that_of_one_process(
    graph: Path, tmp_path: Path, executor: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks, "_MIN_SPAN", 1000)
    options = IngestOptions(mem_bytes=MEM, block_bytes=4096, edge_ids=True)
    ingest(open_source(graph).source, tmp_path / "one", options, QUIET)
    source = open_source(graph).source
    found = ingest(source, tmp_path / "two", options, QUIET, executor=executor)
    assert file_digests(tmp_path / "two") == file_digests(tmp_path / "one")
    assert all(stage.peak_bytes > 0 for stage in found.stages)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph", "one", "two"]


def test_a_worker_that_dies_costs_its_tasks_only(
    tmp_path: Path, executor: Any, monkeypatch: pytest.MonkeyPatch
):
    deadly = [Deadly(tmp_path / str(number)) for number in range(2)]
    found = dict(executor.run(deadly))
    assert sorted(found) == [0, 1]
    assert os.getpid() not in {result.value for result in found.values()}
    monkeypatch.setattr(on_ray, "_RETRIES", 0)
    few = on_ray.RayExecutor(executor._ray, "local:2", MEM)
    with pytest.raises(ExecutorLost, match=r"lost 1 times.*; the same command goes on"):
        list(few.run([Deadly(tmp_path / "again", always=True)]))


def test_what_a_task_finds_wrong_is_said_as_if_there_were_one_process(executor: Any):
    with pytest.raises(BadInput, match=r"^edge_index\.npy\[0, 7\]: found node id 9, expected 0"):
        list(executor.run([Wrong()]))


def test_a_task_of_more_memory_than_there_is_is_refused(executor: Any):
    with pytest.raises(BadInput, match=r"found nodes of at most .* expected one with a processor"):
        on_ray.RayExecutor(executor._ray, "local:2", 1 << 50)
