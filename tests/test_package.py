"""What is published: an sdist, a wheel made of it, and an environment with nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

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


def run(*words: object, cwd: Path = ROOT, **env: str) -> str:
    """What a command that succeeds prints."""
    held = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=held | env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    for command, more in (("blockstore", ""), ("loaderd", ", protocol ")):
        said = run(commands / command, "--version", cwd=tmp_path)
        assert said.startswith(f"{command} {__version__}, store format 3{more}")
    env = {"NUMBA_DISABLE_JIT": "1"}  # to compile here what was compiled there takes a minute
    run(commands / "blockstore", "generate", "graph", "--nodes", "60", "--degree", "4",
        "--features", "5", cwd=tmp_path, **env)  # fmt: skip
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
    for words, count, expected in (("blockstore ing", 1, "ingest"),
                                   ("blockstore ingest --dry", 2, "--dry-run"),
                                   ("blockstore ingest --order ra", 3, "random")):  # fmt: skip
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(count)}
        found = run(
            commands / "blockstore", cwd=tmp_path, _BLOCKSTORE_COMPLETE="complete_bash", **asked
        )
        assert found.split() == [expected]
