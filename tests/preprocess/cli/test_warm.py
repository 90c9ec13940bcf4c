"""`blockstore warm`, and commands that need no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from preprocess.cli import warm
from tests.preprocess.test_commands import run as run_here

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import blockstore, loaderd.cli.commands, preprocess.__main__
print(sorted(n for n in sys.modules if n.split(".")[0] == "torch"))
"""
OTHERS = """
import io, tempfile
from pathlib import Path
from blockstore.store import open_store
from blockstore.units import parse_bytes
from loaderd.api.protocol import Attach, Labor, SeedEdges
from loaderd.cli.advise.trial import try_plan
from loaderd.sessions.engine import default_settings
from preprocess.cli import warm
from preprocess.pipeline.progress import Progress

ASKED = [
    ("16M", {"plan": "minibatch"}),
    ("64M", {"plan": "hyperbatch"}),
    ("24M", {"plan": "hyperbatch", "frontier": "layer"}),
    ("256M", {"frontier": "layer", "shuffle": False, "rank": 1, "world_size": 2}),
    ("24M", {"plan": "macrobatch", "hubs": True, "halos": True}),
    ("256M", {"plan": "partitions", "frontier": "layer"}),
    ("24M", {"plan": "hyperbatch", "return_e_id": True, "edge_features": True}),
    ("24M", {"plan": "hyperbatch", "edges": SeedEdges(negatives="triplet", amount=1),
             "split": "all"}),
    ("24M", {"seed_type": "b"}),
    ("24M", {"replace": True}),
    ("24M", {"plan": "hyperbatch", "num_neighbors": (-1, 3)}),
    ("256M", {"weighted": True, "replace": True}),
    ("24M", {"labor": Labor(batch_dependency=3)}),
    ("24M", {"owners": "servers", "plan": "hyperbatch"}),
    ("24M", {"plan": "chunks", "num_neighbors": ()}),
    ("256M", {"plan": "rows", "num_neighbors": ()}),
    ("256M", {"plan": "cluster"}),
    ("256M", {"plan": "saint-node"}),
    ("256M", {"plan": "saint-edge"}),
]
with tempfile.TemporaryDirectory() as name:
    place = Path(name)
    warm._ingest(place, Progress(io.StringIO()))
    for mem, request in ASKED:
        store = place / ("typed.store" if "seed_type" in request else "plain.store")
        asked = {"num_neighbors": (5, 5), "batch_size": 200} | request
        settings = default_settings(parse_bytes(mem))
        try_plan(open_store(store), settings, Attach(token=0, request=0, **asked), 0)
"""


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_commands_and_daemon_are_imported_without_torch():
    done = run("-c", WITHOUT_TORCH)
    assert (done.stdout, done.stderr) == ("['torch']\n", "")


def test_where_nothing_can_be_kept_warm_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm, "cache_folder", lambda kernel: None)
    done = run_here("warm")
    assert done.exit_code == 2
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
    done = run("-c", OTHERS)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.glob("*.nbc")) == before
