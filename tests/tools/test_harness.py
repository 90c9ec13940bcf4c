"""The harness: rounds in turn, processes apart, memory and reads of a whole process tree."""

import json
import os
import subprocess
import sys
from concurrent.futures import BrokenExecutor

import numpy as np
import pytest

from tests.tools import peers
from tools.bench.harness import BenchPlan, Found, Ratio, Side, measure, report, spread
from tools.bench.resources import bytes_read, descendants, proportional_bytes, resident_bytes


def note(log, text):
    with log.open("a") as f:
        f.write(f"{text}\n")


def test_rounds_go_in_turn_after_one_that_warms_up(tmp_path):
    log = tmp_path / "log"
    sides = [Side(n, peers.logging, (log, n)) for n in "AB"]
    found = measure(BenchPlan(sides, before=lambda: note(log, "before")), 3)
    lines = log.read_text().splitlines()
    assert lines[:4] == ["open A", "A", "open B", "B"]
    assert lines[4:16] == ["before", "A", "before", "B"] * 3
    assert sorted(lines[16:]) == ["close A", "close B"]
    assert [len(found[n].figures["bytes"]) for n in "AB"] == [3, 3]
    pids = {pid for n in "AB" for pid in found[n].figures["pid"]}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_peak_memory_is_that_of_the_side(tmp_path):
    sizes = {"small": 0, "large": 256 << 20}
    arguments = [(tmp_path / "log", name, size) for name, size in sizes.items()]
    found = measure(BenchPlan([Side(a[1], peers.logging, a) for a in arguments]), 1)
    assert found["large"].figures["bytes"] == [float(256 << 20)]
    assert found["large"].peak_bytes > 0
    assert found["small"].peak_bytes < 256 << 20


def test_a_side_that_cannot_take_part_says_why(tmp_path, capsys):
    sides = [Side("gone", peers.missing), Side("A", peers.logging, (tmp_path / "l", "A"))]
    found = measure(BenchPlan(sides, ratios=[Ratio("over", "A", "bytes", "gone")]), 1)
    assert found["gone"].skipped == "not here"
    gone, there = report("bench", {"gone": {}, "A": {}}, found, None)
    assert gone["skipped"] == "not here"
    assert "bytes" in there
    assert "over" not in there
    assert capsys.readouterr().out.splitlines()[-1] == "gone: not here"


def test_a_run_that_is_not_warmed_up_is_timed_from_the_first_round(tmp_path):
    log = tmp_path / "log"
    found = measure(BenchPlan([Side("A", peers.logging, (log, "A"))], warm=False), 1)
    assert log.read_text().splitlines() == ["open A", "A", "close A"]
    assert found["A"].peak_bytes == 0


def test_ratios_are_taken_round_by_round(tmp_path):
    sides = [Side(n, peers.counting, (first,)) for n, first in (("A", 2), ("B", 1))]
    ratios = [Ratio("over", "A", "round", "B")]
    found = measure(BenchPlan(sides, ratios=ratios), 2)
    assert found["A"].figures["over"] == [3 / 2, 4 / 3]  # the first round of each is warm-up
    assert "over" not in found["B"].figures


@pytest.mark.parametrize(
    ("when", "error", "message"),
    [("open", ValueError, "no luck"), ("run", ValueError, "no luck"),
     ("exit", BrokenExecutor, "terminated abruptly")],
)  # fmt: skip
def test_a_side_that_fails_ends_the_bench(when, error, message):
    with pytest.raises(error, match=message):
        measure(BenchPlan([Side("bad", peers.failing, (when,))]), 1)


def test_spread_is_median_and_range():
    assert spread([3.0, 1.0, 123456.0]) == {"median": 3.0, "min": 1.0, "max": 123460.0}


def test_a_table_is_printed_and_lines_of_json_are_appended(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    figures = {"rate": [1.0, 2.0, 4.0], "load": [0.5] * 3}
    found = {"ours": Found(figures, 77_000_000)}
    for _ in range(2):
        lines = report("name", {"ours": {"nodes": 5}}, found, out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines * 2
    assert capsys.readouterr().out.splitlines()[:5] == [
        "| name | ours |", "| --- | --- |", "| rate | 2 (1 - 4) |", "| load | 0.5 |",
        "| peak MB | 77 |",
    ]  # fmt: skip
    (line,) = lines
    assert {"date", "machine"} <= line.keys()
    assert line["rounds"] == 3
    assert line["rate"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert (line["bench"], line["side"], line["nodes"]) == ("name", "ours", 5)
    assert line["peak_bytes"] == 77_000_000


def test_memory_and_reads_are_summed_over_a_process_tree():
    script = "import sys; held = bytearray(b'x' * (64 << 20)); print('up', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    tree = descendants(os.getpid())
    assert child.pid in tree
    for measure_bytes in (resident_bytes, proportional_bytes):
        assert measure_bytes([child.pid]) >= 64 << 20
        assert measure_bytes(tree) > measure_bytes([child.pid])
    assert bytes_read(tree) >= 0
    child.communicate(b"\n")
    assert resident_bytes([child.pid]) == proportional_bytes([child.pid]) == 0


def test_pages_that_a_child_shares_are_counted_once():
    held = np.ones(128 << 20, np.uint8)
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        os._exit(int(held[0]) - 1)
    os.read(ready[0], 1)
    pids = [os.getpid(), child]
    together, alone = proportional_bytes(pids), resident_bytes(pids)
    os.write(wait[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert together + held.nbytes <= alone
    for fd in (*ready, *wait):
        os.close(fd)
