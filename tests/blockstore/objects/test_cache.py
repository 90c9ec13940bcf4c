"""Pages of a store in a bucket: within a size, over restarts, and whatever fails on the way."""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from blockstore.errors import OutOfSpace, StoreBusy, StoreError, StoreExists
from blockstore.io import files
from blockstore.objects import bucket as bucket_module
from blockstore.objects.bucket import Bucket, ObjectError, Transfer, parse_url
from blockstore.objects.push import push
from blockstore.objects.remote import ObjectStores
from blockstore.store import Store, open_store, scan_blocks
from tests.buckets import BUCKET, KEY, SECRET, Proxy, proxied
from tests.graphs import make_csc
from tests.loaderd.parts import write_whole
from tests.stores import write_store

URL = f"s3://{BUCKET}/graph"
MEM = 64 << 20
SMALL = 540 << 10  # of 650 KiB; a run and the tables take 530
SHARDS = re.compile(r"/c/\d+/\d")  # of blocks: side arrays have one number


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole") / "graph")


@pytest.fixture(scope="module")
def server(whole: Path) -> Iterator[Proxy]:
    """A server with the store."""
    with proxied() as proxy:
        push(open_store(whole), URL, 20, lambda _: None)
        yield proxy


@pytest.fixture
def proxy(server: Proxy) -> Iterator[Proxy]:
    """The same, before anything fails."""
    server.gets.clear()
    server.injected.clear()
    yield server
    server.fault = lambda _method, _path: ""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ObjectStores]]:
    """Caches in one folder, one after the other."""
    found: list[ObjectStores] = []

    def make(size: int = 16 << 20, wait_s: float = 20, folder: str = "cache") -> ObjectStores:
        close()
        found.append(ObjectStores(tmp_path / folder, size, MEM, wait_s))
        return found[-1]

    def close() -> None:
        for one in found:
            one.close()
        found.clear()

    yield make
    close()


def content(store: Store) -> list[bytes]:
    """All blocks."""
    files = [store.graph(columns) for columns in store.manifest.graphs()]
    files += [store.rows(array) for array in store.manifest.row_arrays()]
    return [b"".join(blocks.tobytes() for _, blocks in scan_blocks(file)) for file in files]


def ranges(proxy: Proxy) -> list[tuple[str, str]]:
    """What was asked for of shards."""
    return [(path, span) for path, span in proxy.gets if span]


def some(kinds: list[str], every: int) -> Callable[[str, str], str]:
    """A fault in place of every so many GETs of shards, of these kinds in turn."""
    count = iter(range(1 << 30))

    def fault(method: str, path: str) -> str:
        if method != "GET" or not SHARDS.search(path):
            return ""
        number = next(count)
        return kinds[number // every % len(kinds)] if number % every == 0 else ""

    return fault


def test_a_warm_cache_reads_no_object_bytes_twice(
    proxy: Proxy, whole: Path, opened: Callable[..., ObjectStores]
) -> None:
    expected = content(open_store(whole))
    store = opened().open(URL)
    assert content(store) == expected
    assert store.pages is not None
    assert store.pages.counters()["object_bytes_read"] > sum(map(len, expected))  # with the tables
    asked = ranges(proxy)
    assert len(set(asked)) == len(asked)
    proxy.gets.clear()
    assert content(store) == expected
    again = opened().open(URL)
    assert content(again) == expected
    assert again.pages is not None
    assert again.pages.counters()["object_bytes_read"] == 0
    assert not proxy.gets


def test_a_small_cache_holds_its_size(
    proxy: Proxy, whole: Path, opened: Callable[..., ObjectStores], tmp_path: Path
) -> None:
    expected = content(open_store(whole))
    size = SMALL
    stores = opened(size)
    store, errors = stores.open(URL), list[object]()

    def work() -> None:
        errors.append(content(store) == expected)
        held = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*/c/*") if f.is_file())
        errors.append(held <= size)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [True] * 8
    assert store.pages is not None
    counters = store.pages.counters()
    assert counters["object_pages_evicted"] > 0
    assert counters["object_cache_bytes"] <= size
    assert stores.cache.held == 0


def test_pages_that_a_crash_has_torn_come_again(
    proxy: Proxy, whole: Path, opened: Callable[..., ObjectStores]
) -> None:
    expected = content(open_store(whole))
    store = opened().open(URL)
    content(store)
    for array in store.manifest.row_arrays():
        shard = store.rows(array).shards[0]
        with shard.open("r+b") as file:
            file.seek(100)
            file.write(b"torn")
    proxy.gets.clear()
    again = opened().open(URL)
    assert content(again) == expected
    assert again.pages is not None
    assert again.pages.counters()["object_pages_torn"] > 0
    assert ranges(proxy)


@pytest.mark.parametrize(
    "kind", ["refuse", pytest.param("reset", marks=pytest.mark.long), "cut", "changed"]
)
def test_what_fails_now_and_then_is_tried_again(
    proxy: Proxy, whole: Path, opened: Callable[..., ObjectStores], kind: str
) -> None:
    proxy.fault = some([kind], 2)
    store = opened(SMALL).open(URL)
    assert content(store) == content(open_store(whole))
    assert len(proxy.injected) > 5
    assert store.pages is not None
    assert store.pages.counters()["object_retries"] >= len(proxy.injected)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("refuse", "503 Service Unavailable, SlowDown"),
        ("reset", "connection"),
        pytest.param("cut", "connection", marks=pytest.mark.long),  # as of a reset
        ("changed", "has another checksum"),
        ("silent", "no answer in time"),
        ("denied", "access is refused (403 Forbidden, AccessDenied)"),
        ("region", "refused (301"),
    ],
)
def test_what_fails_for_good_is_one_line(
    proxy: Proxy, opened: Callable[..., ObjectStores], kind: str, words: str
) -> None:
    opened().open(URL)  # brings the tables, however slow the machine is
    store = opened(wait_s=0.6).open(URL)
    proxy.fault = some([kind], 1)
    with pytest.raises(ObjectError) as caught:
        content(store)
    text = str(caught.value)
    assert text.startswith(f"{URL}/"), text
    assert re.search(r"/c/\d+/\d+, bytes \d+ to \d+: ", text), text
    assert words in text, text
    assert "\n" not in text
    assert KEY not in text
    assert SECRET not in text
    proxy.fault = lambda _method, _path: ""
    assert content(store)  # later it comes


def test_an_object_that_was_replaced_is_named(
    server: Proxy, whole: Path, opened: Callable[..., ObjectStores]
) -> None:
    url = f"s3://{BUCKET}/replaced/graph"
    push(open_store(whole), url, 20, lambda _: None)
    store = opened().open(url)
    name = store.rows(store.manifest.types[0].features["x"]).shards[0].relative_to(store.path)
    size = store.path.joinpath(name).stat().st_size
    Bucket(url).write(str(name), lambda: bytes(size), "")
    with pytest.raises(ObjectError, match=r"was replaced since the store was opened \(412"):
        content(store)


def test_a_full_disk_is_one_line(
    proxy: Proxy, opened: Callable[..., ObjectStores], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened().open(URL)

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", full)
        with pytest.raises(OutOfSpace, match=r"No space left on device.*or give less --cache-size"):
            content(store)
    assert content(store)


def test_a_folder_has_one_daemon_and_one_store(
    proxy: Proxy, opened: Callable[..., ObjectStores], tmp_path: Path
) -> None:
    stores = opened()
    store = stores.open(URL)
    with pytest.raises(StoreBusy, match=r"--cache .*: another daemon"):
        ObjectStores(tmp_path / "cache", 1 << 30, MEM, 1)
    assert stores.open(URL) is store
    stores.seal()
    with pytest.raises(StoreError, match="was not served when this daemon began"):
        stores.open(f"s3://{BUCKET}/other")


def test_another_store_under_the_url_is_refused(
    server: Proxy, whole: Path, opened: Callable[..., ObjectStores], tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/changed/graph"
    push(open_store(whole), url, 20, lambda _: None)
    opened().open(url)
    write_store(tmp_path / "other", make_csc([3] * 50, 1), np.arange(9))
    other = (tmp_path / "other" / "zarr.json").read_bytes()
    Bucket(url).write("zarr.json", lambda: other, "")
    with pytest.raises(StoreError, match=r"fingerprint .* the pages in .* are of a store with"):
        opened().open(url)
    with pytest.raises(StoreExists, match="another store is there"):
        push(open_store(whole), url, 20, lambda _: None)


def test_a_cache_that_is_too_small_says_the_least(
    proxy: Proxy, opened: Callable[..., ObjectStores]
) -> None:
    with pytest.raises(StoreError, match=r"--cache-size 64K: the tables of .* expected at least"):
        opened(64 << 10).open(URL)


def test_urls() -> None:
    assert parse_url(str(Path("s3://bucket/a/b/"))) == "s3://bucket/a/b"
    assert parse_url("gs://bucket/x") == "gs://bucket/x"
    assert [parse_url(text) for text in ("/tmp/x", "s3", "x:/y", "stores/s3:/a")] == [""] * 4
    with pytest.raises(ObjectError, match="not the URL of a store"):
        Bucket("s3:///x")


def test_times_are_fitted_by_a_line() -> None:
    found, rng = Transfer(), np.random.default_rng(1)
    for size in rng.integers(4096, 1 << 20, 500).tolist():
        found = found.seen(size, 0.03 + size / 80e6 + rng.normal(0, 0.002))
    seconds, per_byte = found.fit()
    assert seconds == pytest.approx(0.03, rel=0.05)
    assert per_byte == pytest.approx(1 / 80e6, rel=0.05)


def test_without_obstore_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "find_spec", lambda _name: None)
    with pytest.raises(ObjectError, match=r'not installed.*pip install "blockstore\[objects\]"'):
        Bucket(URL)
