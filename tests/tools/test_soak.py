"""What a soak sees: growth, ends that should not be, and batches that are not the same."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tools.faults import trainers
from tools.faults.growth import ProcessSample, judge
from tools.faults.runner import Scene
from tools.faults.trainers import PLANS, Work, read_epoch, read_every_plan
from tools.soak import find_bounds, main

MB = 1 << 20


class Stop:
    """Is set after so many looks."""

    def __init__(self, looks):
        self.left = looks

    def is_set(self):
        self.left -= 1
        return self.left < 0


class Batches(list):
    """A dataset of numbers."""

    def close(self):
        self.closed = True


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Batches are numbers, and their own digests."""
    monkeypatch.setattr(trainers, "digest", str)
    return Work("ipc:///nowhere", tmp_path, 10, 1)


def test_growth_is_said_and_the_rest_is_flat(capsys):
    samples = [
        ProcessSample(float(i), 100 * MB + i * MB // 10, MB, 9, 3, 50, 0) for i in range(100)
    ]
    found = judge({"daemon": samples}, 0.2)
    assert found["grows"] == ["daemon: anon_bytes"]
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert ["GROWS" in line for line in lines] == [True] + [False] * 5
    assert "grows" not in judge({"daemon": [s._replace(anon_bytes=MB) for s in samples]}, 0.2)


def test_what_clients_may_have_is_no_growth_and_one_more_is(tmp_path):
    """Four clients, of two sockets each, come one after the other; a file is open for a moment."""

    def beyond(kept=0, arenas=1):
        daemon = [
            ProcessSample(float(i), MB, 20 * MB, 50 + 2 * min(i // 20, 4) + (i == 90) + kept, 9, 3,
                          0, 1)
            for i in range(100)
        ]  # fmt: skip
        daemon[0] = daemon[0]._replace(descriptors=50)
        trainer = [
            ProcessSample(float(i), MB, i * MB // 5, 17, 3, 50, 0, arenas) for i in range(100)
        ]
        series = {"daemon": daemon, "trainer 0": trainer}
        made = Scene(tmp_path, tmp_path, {}, series=series)
        return judge(series, 0.2, bounds=find_bounds(made)).get("grows", [])

    assert beyond() == []
    assert beyond(kept=1) == ["daemon: descriptors"]
    assert beyond(arenas=2) == ["trainer 0: arenas"]


def test_every_plan_is_read_and_counted(work, monkeypatch):
    seen = []

    def dataset(self, plan):
        seen.append((plan, Batches(range(3))))
        return seen[-1][1]

    monkeypatch.setattr(Work, "dataset", dataset)
    read_every_plan(work, "t", Stop(2 + 6 * len(PLANS) + 1))
    assert [plan for plan, _ in seen][: len(PLANS)] == list(PLANS)
    assert all(data.closed for _, data in seen)
    assert '"epochs"' in (work.folder / "t.json").read_text()


def test_another_epoch_0_is_an_error(work, monkeypatch):
    turns = iter(range(100))
    monkeypatch.setattr(Work, "dataset", lambda self, plan: Batches([next(turns)]))
    with pytest.raises(SystemExit, match="epoch 0 is not what it was the first time"):
        read_every_plan(work, "t", Stop(1000))


def test_a_part_of_an_epoch_is_read(work):
    counts = Counter()
    assert read_epoch(Batches(range(9)), "rows", counts, maximum=4) == ["0", "1", "2", "3"]
    assert counts == {"rows batches": 4, "epochs": 1}


def test_a_daemon_that_ended_is_seen(tmp_path):
    daemon = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    daemon.wait()
    made = Scene(tmp_path, tmp_path, {"daemon": SimpleNamespace(process=daemon)})
    with pytest.raises(SystemExit, match="daemon ended with 3"):
        made.watch()


def test_a_short_soak_ends_as_it_began(tmp_path):
    words = ["--minutes", "0.1", "--every", "0.2", "--mem", "16M", "--times", "1"]
    line = main([*words, "--folder", str(tmp_path), "--out", str(tmp_path / "lines")])
    assert line["epochs"] > 0
    assert line["batches"] > 0
    assert set(line) > {"daemon", "trainer 0", "trainer 1"}
    assert line["trainer 0"]["arenas"]["last"] <= 1
    assert [p.name for p in tmp_path.iterdir()] == ["lines"]
