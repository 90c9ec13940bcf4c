"""Stores that go to a bucket and come back, however often the command is killed."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from blockstore.errors import StoreError
from blockstore.make_part import make_part, plan_part
from blockstore.objects import push as pushing
from blockstore.objects.push import pull, push
from blockstore.owners import write_owners
from blockstore.store import open_store
from tests.buckets import BUCKET, Proxy, proxied
from tests.daemons import ROOT
from tests.effort import tries
from tests.loaderd.parts import partition_owners, write_whole

KILLS = tries(6, 12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole") / "graph")


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with proxied() as found:
        yield found


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Killer:
    """Kills a command when it makes its n-th request."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy, self._left, self._lock = proxy, 0, threading.Lock()
        self.command: subprocess.Popen[bytes] | None = None
        self._begun = threading.Event()

    def run(self, after: int, *words: object) -> int:
        """The exit code of a command that is killed after so many requests."""
        self._left = after
        self._begun.clear()
        self._proxy.fault = self._look
        self.command = subprocess.Popen(
            [sys.executable, "-m", "preprocess", *map(str, words)],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._begun.set()
        code = self.command.wait(60)
        self._proxy.fault = lambda _method, _path: ""
        return code

    def _look(self, method: str, path: str) -> str:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                assert self._begun.wait(60)
                assert self.command is not None
                os.kill(self.command.pid, signal.SIGKILL)
        return ""


@pytest.mark.slow
def test_a_push_and_a_pull_that_are_killed_go_on(proxy: Proxy, whole: Path, tmp_path: Path) -> None:
    killer, url = Killer(proxy), f"s3://{BUCKET}/killed/graph"
    codes = []
    for i in range(KILLS):
        codes.append(killer.run(3 + 6 * i, "push", whole, url))
        if codes[-1] == 0:
            break
        # without a manifest there is no store
        with pytest.raises(StoreError, match="there is no such object"):
            pull(url, tmp_path / "early", 20, lambda _: nullcontext())
    assert codes.count(-signal.SIGKILL) == KILLS, codes
    assert killer.run(-1, "push", whole, url) == 0
    target, codes = tmp_path / "pulled", []
    for i in range(KILLS):
        codes.append(killer.run(3 + 2 * i, "pull", url, target))
        if codes[-1] == 0:
            break
        assert not target.exists()
    assert codes.count(-signal.SIGKILL) == KILLS, codes
    assert killer.run(-1, "pull", url, target) == 0
    assert files(target) == files(whole)
    assert [p.name for p in tmp_path.iterdir()] == ["pulled"]


def test_a_large_object_goes_in_parts(
    proxy: Proxy, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "PART_BYTES", 64 << 10)  # larger ones are given as a stream
    url, sent = f"s3://{BUCKET}/parts/graph", []
    push(open_store(whole), url, 20, sent.append)
    assert sum(sent) == pushing.store_bytes(open_store(whole))
    count = len(proxy.gets)
    push(open_store(whole), url, 20, lambda _: None)
    assert all(span == "bytes=0-0" for path, span in proxy.gets[count:] if "/c/" in path)


def test_a_damaged_store_is_not_pushed(proxy: Proxy, whole: Path, tmp_path: Path) -> None:
    damaged = write_whole(tmp_path / "graph")
    store = open_store(damaged)
    with store.rows(store.manifest.types[0].features["x"]).shards[0].open("r+b") as file:
        file.write(b"x")
    with pytest.raises(StoreError, match="crc32c of the page"):
        push(store, f"s3://{BUCKET}/damaged/graph", 20, lambda _: None)


def test_a_part_is_not_pushed(proxy: Proxy, tmp_path: Path) -> None:
    store = open_store(write_whole(tmp_path / "graph"))
    write_owners(store, "o", partition_owners(store, 2), 2, {})
    make_part(store, tmp_path / "part", plan_part(store, "o", 0), lambda _: None)
    with pytest.raises(StoreError, match="blockstore push expects a whole store"):
        push(open_store(tmp_path / "part"), f"s3://{BUCKET}/part/graph", 20, lambda _: None)
