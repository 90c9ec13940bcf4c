"""The budget, held by the kernel: a small graph in a control group of --mem + 256 MiB."""

import signal

import pytest

from tools import memory


def test_a_group_ends_those_who_stay():
    try:
        with memory.group(1 << 30) as limits:
            process = memory.inside(limits, "http.server", "--bind", "127.0.0.1", "0")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_ingest_and_serve_stay_inside_their_group(tmp_path):
    try:
        with memory.group(1 << 30):
            pass
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    words = ["--folder", str(tmp_path), "--nodes", "60000", "--features", "64", "--degree", "6"]
    found = memory.main([*words, "--mem", "48M", "--steps", "3"])
    assert found["kills"] == 0
    assert found["seeds"] == 3000
    arena = 48 << 20
    assert found["serve_idle_bytes"] - arena < 200 << 20
