"""A signal at any moment of a start ends it: exit code 0, no output of Python, no file."""

import re
import signal
import subprocess
import sys
from collections import Counter
from random import Random

import numpy as np
import pytest

from tests.daemons import ROOT
from tests.effort import tries
from tests.graphs import make_csc
from tests.stores import write_store

END_S = 60
SERVES = re.compile(r" INFO +(serving|draining|compiling kernels|kernels compiled)\b")
# `loaderd serve` that tells, in its standard output, of the first module of ours that it imports
TELLING = """
import sys
from loaderd import __main__
sys.argv = ["loaderd", *sys.argv[1:]]
class Telling:
    def find_spec(self, name, path=None, target=None):
        if name == "loaderd.cli.commands":
            print("importing", flush=True)
            sys.stdin.readline()  # the signal comes here
sys.meta_path.insert(0, Telling())
__main__.main()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("startup") / "store"
    write_store(path, make_csc(np.full(500, 5), 1), np.arange(500))
    return path


def start(store, folder, *begin: str) -> "subprocess.Popen[str]":
    words = ["serve", str(store), "--endpoint", f"ipc://{folder}/d.sock", "--mem", "32M"]
    return subprocess.Popen(
        [sys.executable, *(begin or ("-m", "loaderd")), *words], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_modules_are_imported_is_a_clean_end(store, tmp_path, number):
    process = start(store, tmp_path, "-c", TELLING)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=END_S)
    assert (process.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
def test_a_signal_at_a_random_moment_of_a_start_is_a_clean_end(store, tmp_path):
    """Before Python has read our first line the kernel ends the process: -SIGTERM."""
    draw, ends = Random(3), Counter[int]()
    for _ in range(tries(2, 8)):
        process = start(store, tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.05, 3))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=END_S)
        # on a fast machine it may serve already, and its log says so
        assert all(SERVES.search(line) for line in errors.splitlines()), errors
        assert list(tmp_path.iterdir()) == []
        ends[process.returncode] += 1
    assert set(ends) <= {0, -signal.SIGTERM}


LEAVES = """
import signal, sys
from loaderd.cli import commands
class Stores:
    def __init__(self, *words):
        signal.raise_signal(signal.SIGTERM)  # while memory is taken, and in a finalizer
commands.Stores = Stores
class Finalized:
    def __del__(self):
        Stores()
class Worse(Stores):
    def __init__(self, *words):
        Finalized()
        print("went on", flush=True)
        sys.exit(3)
commands.Stores = Worse
commands.app(sys.argv[1:])
"""


@pytest.mark.usefixtures("fresh_processes")
def test_a_signal_in_a_finalizer_while_memory_is_taken_is_not_swallowed(store, tmp_path):
    process = start(store, tmp_path, "-c", LEAVES)
    out, errors = process.communicate(timeout=END_S)
    assert (process.returncode, out, errors) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
