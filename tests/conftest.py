"""Fixtures shared by all tests: real graphs, unpacked once, and a small generated one."""

import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from numba import config

from preprocess.pipeline.progress import Progress
from preprocess.sources.generate import GraphRecipe, generate
from tests import effort, processes

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and torch would spin

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
CACHE = Path(tempfile.gettempdir()) / "blockstore-test-data"

# A property that fails is told at once, by the example that was found.  To make that one small may
# take minutes: pytest --hypothesis-profile=shrink does it.  First calls of kernels compile them, so
# that no example has a deadline; without the compiler there are few.
settings.register_profile(
    "shrink", deadline=None, max_examples=10 if config.DISABLE_JIT else 25, phases=tuple(Phase)
)
settings.register_profile(
    "at once", settings.get_profile("shrink"), report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)  # fmt: skip
settings.load_profile("at once")


SLOW_S = 600  # for a test that is marked `slow`; the others have `timeout` of pyproject.toml


def pytest_configure(config: pytest.Config) -> None:
    effort.is_long = config.getoption("--long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not effort.is_long:
            item.add_marker(pytest.mark.skip(reason="runs with --long only"))
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The first of several workers collects alone.

    In a fresh checkout it compiles what all files import, and rewrites their assertions; each of
    the others would do the same at the same time, and finds the results instead.
    """
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(folder, fcntl.LOCK_SH)
        return (yield)
    finally:
        os.close(folder)


def pytest_collection_finish() -> None:
    """All modules are there now, and stay: no collection of garbage walks through them again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--schedules 10000`: the long form of `tests/loaderd/test_schedules.py`."""
    parser.addoption(
        "--long", action="store_true", help="run tests that are marked `long` too; try more"
    )
    parser.addoption("--schedules", type=int, default=30, help="of threads, tried at random")
    parser.addoption("--first-schedule", type=int, default=0, help="the seed to begin with")


@pytest.fixture(scope="session", autouse=True)
def _forked_commands() -> Iterator[None]:
    """Our commands begin as forks: see tests/processes.py."""
    # A shell starts what runs in the background with SIGINT ignored, and children would inherit it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", processes.Popen)
        yield


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """Our commands begin as any other, and import what they need."""
    with processes.fresh():
        yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's, but what a test leaves is deleted when all have passed, not after each.

    ext4 gives no inode again for minutes: each new file looks at all that were deleted since, and
    that took a fifth of the system time.
    """
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture(scope="session")
def dataset() -> Callable[[str], Path]:
    """The folder of a real graph by name; skips where the archives are not beside the checkout."""

    def find(name: str) -> Path:
        folder = CACHE / name
        if not folder.exists():
            if not (SHARED / f"{name}.tar.xz").exists():
                pytest.skip(f"{name}: no archive in {SHARED}")
            with tempfile.TemporaryDirectory(dir=CACHE.parent) as fresh:
                script = [sys.executable, str(SHARED / "unpack.py"), fresh, name]
                subprocess.run(script, check=True, capture_output=True)
                CACHE.mkdir(exist_ok=True)
                (Path(fresh) / name).rename(folder)
        return folder

    return find


@pytest.fixture(scope="session")
def small_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated graph in the plain layout: 4,000 nodes, 40,000 edges, 24 features, 5 classes."""
    folder = tmp_path_factory.mktemp("graphs") / "small"
    recipe = GraphRecipe(4000, 10, 24, 5, train=0.3, valid=0.1, test=0.2, seed=7)
    with (folder.parent / "progress.txt").open("w") as stream:
        generate(folder, recipe, Progress(stream))
    return folder
