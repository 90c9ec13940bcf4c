"""The budget, held by the kernel: a small graph in a control group of --mem + 256 MiB."""

import signal
import subprocess

import numpy as np
import pytest

from tools import memory, rmat
from tools.group import group


@pytest.fixture
def groups():
    """Control groups can be made."""
    try:
        with group(1 << 30):
            pass
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


@pytest.mark.usefixtures("groups")
def test_a_group_ends_those_who_stay():
    with group(1 << 30) as limits:
        process = subprocess.Popen(["sleep", "60"], preexec_fn=limits.join)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.usefixtures("groups")
def test_an_ingest_holds_any_memory_and_makes_the_same_bytes(tmp_path):
    """256 MB of rows: more than half of what 400 MiB leave, so that they pass the disk twice."""
    source = tmp_path / "graph"
    rmat.generate(source, 400_000, 1_000_000, 160, 0)
    words = ["ingest", str(source), "--mem", "400M", "900M", "--", "--undirected", "--edge-ids"]
    tight, roomy = memory.main(words)
    assert tight["kills"] == roomy["kills"] == 0
    assert tight["peak_bytes"] <= 400 << 20
    assert roomy["peak_bytes"] > max(tight["peak_bytes"], 400_000 * 640)
    assert tight["sha256"] == roomy["sha256"]
    assert [p.name for p in tmp_path.iterdir()] == ["graph"]


@pytest.mark.usefixtures("groups")
def test_a_run_that_takes_too_much_fails(tmp_path, monkeypatch):
    """Peaks are compared with --mem: one that is nothing is exceeded."""
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 0]]))
    monkeypatch.setattr(memory, "parse_bytes", lambda text: 1 << 20)
    with pytest.raises(SystemExit, match=r"--mem 64M: 0 kills, a peak of [0-9]{8,} bytes"):
        memory.main(["ingest", str(tmp_path), "--folder", str(tmp_path), "--mem", "64M"])


@pytest.mark.parametrize(
    ("changes", "other", "words"),
    [({"kills": 1}, [], "1 kills"), ({"peak_bytes": 11}, [], "a peak of 11"), ({}, ["b"], "in b")],
)
def test_a_run_beyond_its_memory_fails(changes, other, words):
    line = {"mem": "10", "mem_bytes": 10, "peak_bytes": 10, "kills": 0}
    memory.check_run(line, [])
    with pytest.raises(SystemExit, match=words):
        memory.check_run(line | changes, other)


@pytest.mark.usefixtures("groups")
def test_clients_that_ask_for_too_much_are_served_or_refused_inside_a_group(tmp_path):
    """One of each kind, times among them, but the one that keeps its numbers back for seconds."""
    words = ["attach", "--folder", str(tmp_path), "--mem", "48M", "--times", "1"]
    found = memory.main([*words, "--attempts", "8"])
    assert found["kills"] == 0
    assert set(found["ends"]) <= {"served", "refused", "odd"}
    assert found["ends"]["odd"] == 3
    assert found["beside"] > 0
