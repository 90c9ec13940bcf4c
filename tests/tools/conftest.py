import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tools.bench import harness
from tools.compare import pairs

PRELOAD = [
    *(f"tools.bench.{name}" for name in ("epochs", "hops", "ranks", "trainers")),
    "tools.faults.trainers", "tests.tools.peers",
]  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _forked_peers() -> Iterator[None]:
    """Processes of tools begin as forks of one that has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "CONTEXT", context)
        patch.setattr(pairs, "CONTEXT", context)
        patch.setattr(context, "set_forkserver_preload", lambda names: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where benches keep graphs and stores."""
    return tmp_path_factory.mktemp("bench")
