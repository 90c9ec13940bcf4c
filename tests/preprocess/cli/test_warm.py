"""`blockstore warm`, and commands that need no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import blockstore, loaderd.cli.commands, preprocess.__main__
print(sorted(n for n in sys.modules if n.split(".")[0] == "torch"))
"""
NOWHERE = """
import preprocess.__main__, preprocess.cli.warm
preprocess.cli.warm.cache_folder = lambda kernel: None
preprocess.__main__.main()
"""


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_commands_and_daemon_are_imported_without_torch():
    done = run("-c", WITHOUT_TORCH)
    assert (done.stdout, done.stderr) == ("['torch']\n", "")


def test_where_nothing_can_be_kept_warm_says_so():
    done = run("-c", NOWHERE, "warm")
    assert done.returncode == 2
    assert done.stderr.startswith("error: warm: compiled kernels can be kept nowhere, expected ")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_after_warm_nothing_is_compiled_again():
    done = run("-m", "preprocess", "warm")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.removesuffix(": compiled kernels are there\n"))
    before = sorted(folder.glob("*.nbc"))
    assert before
    assert run("-m", "preprocess", "warm").returncode == 0
    assert sorted(folder.glob("*.nbc")) == before
