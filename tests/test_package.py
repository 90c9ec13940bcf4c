"""What is published: an sdist, a wheel made of it, and an environment with nothing else."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from blockstore import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("blockstore", "clients", "loaderd", "preprocess")
MAKE_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
# torch takes longer to install than all the rest: it is this environment's, behind the other's own
ONE_BATCH = """
import sys
import blockstore
if __name__ == "__main__":
    store, torch = sys.argv[1:]
    with blockstore.serve(store, mem="64M") as endpoint:
        sys.path.append(torch)
        from clients.torch import NeighborDataset
        batch = next(iter(NeighborDataset(endpoint, "train", [3, 2], batch_size=4)))
        print(batch.batch_size, tuple(batch.x.shape)[1], batch.edge_index.shape[0])
"""
# commands one after the other in one process, as most of each is to import the same again
EACH_COMMAND = """
import contextlib, io, json, os, runpy, sys
for command, words, env in json.loads(sys.argv[1]):
    sys.argv, said, code = [command, *words], io.StringIO(), None
    os.environ.update(env)
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(command, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    assert not code, (command, code)
    print(json.dumps(said.getvalue()))
"""


def run(*words: object, cwd: Path = ROOT, **env: str) -> str:
    """What a command that succeeds prints."""
    # each command finds compiled what the one before it has imported, whatever the caller asks for
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    held = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=held | env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_each(commands: Path, cwd: Path, *asked: tuple[str, list[str], dict[str, str]]) -> list[str]:
    """What commands that succeed print, given by name, words and environment."""
    given = [(str(commands / name), words, env) for name, words, env in asked]
    said = run(commands / "python", "-c", EACH_COMMAND, json.dumps(given), cwd=cwd)
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sdist of a copy of the tree, which building would leave files in."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-c", MAKE_SDIST, out, cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, sdist)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel and what it asks for."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", place)
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
    run(*pip, "install", "-q", "--no-compile", wheel)
    return place / "bin"


def test_the_wheel_has_every_file_of_the_packages(wheel):
    held = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == held
    assert {f"{name}/py.typed" for name in PACKAGES} <= names


@pytest.mark.slow
def test_what_is_installed_ingests_serves_and_gives_a_batch(commands, tmp_path):
    names = ("blockstore", "loaderd")
    versions = run_each(commands, tmp_path, *((name, ["--version"], {}) for name in names))
    for name, more, said in zip(names, ("", ", protocol "), versions, strict=True):
        assert said.startswith(f"{name} {__version__}, store format 3{more}")
    env = {"NUMBA_DISABLE_JIT": "1"}  # to compile here what was compiled there takes a minute
    rng = np.random.default_rng(1)
    (tmp_path / "graph").mkdir()
    for name, array in (("edge_index", rng.integers(0, 60, (2, 240))), ("train_idx", np.arange(9)),
                        ("node_feat", rng.random((60, 5), np.float32))):  # fmt: skip
        np.save(tmp_path / "graph" / f"{name}.npy", array)
    # small blocks: checksums of whole ones are slow without a compiler
    run(commands / "blockstore", "ingest", "graph", "store", "--no-summary", "--block-size", "16K",
        cwd=tmp_path, **env)  # fmt: skip
    (tmp_path / "one.py").write_text(ONE_BATCH)
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    site = Path(torch.origin).parents[1]
    said = run(commands / "python", "one.py", "store", site, cwd=tmp_path, **env)
    assert said == "4 5 2\n"


def test_without_torch_a_trainer_says_what_to_install(commands, tmp_path):
    words = [commands / "python", "-m", "clients.train", "ipc:///nowhere"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: clients: found no torch, expected it for batches of tensors: "
        'pip install "blockstore[torch]"\n'
    )


def test_a_shell_completes_commands_and_options(commands, tmp_path):
    expected = {
        "blockstore ing": "ingest",
        "blockstore ingest --dry": "--dry-run",
        "blockstore ingest --order ra": "random",
    }
    asked = [
        {"COMP_WORDS": text, "COMP_CWORD": str(text.count(" ")),
         "_BLOCKSTORE_COMPLETE": "complete_bash"}
        for text in expected
    ]  # fmt: skip
    found = run_each(commands, tmp_path, *(("blockstore", [], env) for env in asked))
    assert [text.split() for text in found] == [[word] for word in expected.values()]
