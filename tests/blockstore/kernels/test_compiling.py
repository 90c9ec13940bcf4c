"""Kernels compiled by a child: a process that has it compiles nothing itself."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from numba import int64

ROOT = Path(__file__).resolve().parents[3]
KERNEL = """
from blockstore.kernels.jit import njit

@njit(nogil=True, cache=True)
def twice(x):
    return 2 * x

def made():
    @njit(nogil=True, cache=True)
    def thrice(x):
        return 3 * x
    return thrice
"""
ASKS = """
import os
from blockstore.kernels.compiling import awaited_kernel, use_child
from doubling import made, twice
from numba.core import event
told, own = [], []

class Compiled(event.Listener):
    def on_start(self, e):
        own.append(e.data["dispatcher"].py_func.__name__)
    def on_end(self, e):
        pass

use_child(lambda event, **fields: told.append((event, fields.get("first"), awaited_kernel())))
{also}
with event.install_listener("numba:compile", Compiled()):
    print(twice(4), {call}, own, told)
"""


def run(folder: Path, also: str, call: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    (folder / "doubling.py").write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, "-c", ASKS.format(also=also, call=call)], cwd=folder, check=True,
        env=kept | {"PYTHONPATH": f"{folder}:{ROOT}"}, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_child_compiles_what_is_not_in_the_cache(tmp_path):
    told = [("compiling kernels", "doubling.twice", "doubling.twice")]
    assert run(tmp_path, "", "0") == f"8 0 [] {told}"
    assert run(tmp_path, "", "0") == "8 0 [] []"  # it is there now


def test_what_a_child_cannot_find_is_compiled_here(tmp_path):
    assert "12 ['thrice']" in run(tmp_path, "", "made()(4)")


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_without_a_child_this_process_compiles(tmp_path, program):
    assert "['twice']" in run(tmp_path, f"import sys; sys.executable = {program!r}", "0")


@pytest.mark.parametrize("name", ["twice", "absent"])
def test_a_child_whose_parent_was_killed_ends_without_a_word(tmp_path, name):
    (tmp_path / "doubling.py").write_text(KERNEL)
    asked = pickle.dumps(("doubling", name, (int64,)))
    with subprocess.Popen(
        [sys.executable, "-m", "blockstore.kernels.compiling"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    ) as child:  # fmt: skip
        child.stdout.close()
        child.stdin.write(asked)
        child.stdin.close()
        said = child.stderr.read().decode()
    assert child.returncode == 0
    assert "Traceback" not in said
    assert len(said.splitlines()) == (name == "absent")
