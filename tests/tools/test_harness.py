"""The harness: rounds in turn, processes apart, memory and reads of a whole process tree."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.tools import peers
from tools.bench.harness import Found, Peer, measure, report, spread
from tools.bench.resources import bytes_read, descendants, proportional_bytes, resident_bytes


def test_rounds_go_in_turn_after_one_that_warms_up(tmp_path):
    log = tmp_path / "log"
    found = measure([Peer(n, peers.logging, (log, n)) for n in "AB"], 3, before=log.touch)
    lines = log.read_text().splitlines()
    assert lines[:4] == ["open A", "A", "open B", "B"]
    assert lines[4:10] == ["A", "B"] * 3
    assert sorted(lines[10:]) == ["close A", "close B"]
    assert [len(found[n].figures["bytes"]) for n in "AB"] == [3, 3]
    pids = {pid for n in "AB" for pid in found[n].figures["pid"]}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_peak_memory_is_that_of_the_peer(tmp_path):
    sizes = {"small": 0, "large": 256 << 20}
    arguments = [(tmp_path / "log", name, size) for name, size in sizes.items()]
    found = measure([Peer(a[1], peers.logging, a) for a in arguments], 1)
    assert found["large"].figures["bytes"] == [float(256 << 20)]
    assert found["large"].peak_bytes > 0
    assert found["small"].peak_bytes < 256 << 20


def test_a_peer_that_cannot_take_part_says_why(tmp_path, capsys):
    found = measure(
        [Peer("gone", peers.missing), Peer("A", peers.logging, (tmp_path / "l", "A"))], 1
    )
    assert found["gone"].skipped == "not here"
    gone, there = report("bench", {}, found, "")
    assert gone["skipped"] == "not here"
    assert "bytes" in there
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("when", "message"), [("open", "no luck"), ("run", "no luck"), ("exit", "its process ended")]
)
def test_a_peer_that_fails_ends_the_bench(when, message):
    with pytest.raises(RuntimeError, match=message):
        measure([Peer("bad", peers.failing, (when,))], 1)


def test_spread_is_median_and_range():
    assert spread([3.0, 1.0, 123456.0]) == {"median": 3.0, "min": 1.0, "max": 123460.0}


def test_lines_are_json_with_machine_and_date_and_are_appended(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    found = {"ours": Found({"rate": [1.0, 2.0, 4.0]}, [0, 0, 4096], 77)}
    for _ in range(2):
        lines = report("name", {"nodes": 5}, found, str(out))
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines * 2
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines * 2
    (line,) = lines
    assert {"date", "machine"} <= line.keys()
    assert line["rounds"] == 3
    assert line["rate"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert line["bytes_read"]["max"] == 4096
    assert (line["bench"], line["peer"], line["nodes"], line["peak_bytes"]) == (
        "name",
        "ours",
        5,
        77,
    )


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
