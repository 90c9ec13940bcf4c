"""Stores from a real S3 server: the same batches, whatever fails, however small the cache."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockstore.objects.push import push
from blockstore.store import open_store
from loaderd.server.transport import ask_status, parse_either
from tests.buckets import BUCKET, KEY, SECRET, Proxy, proxied
from tests.daemons import daemon
from tests.golden_cases import (
    FILE,
    HETERO,
    PLAIN,
    STORES,
    Case,
    epoch_digest,
    made,
    make_store,
)
from tests.test_bad_input import command, refused

RECORDED = json.loads(FILE.read_text())
URL = f"s3://{BUCKET}/stores"
KINDS = ("refuse", "reset", "cut", "changed")
# each way of sampling, edges that have rows, and hops; `--long`: all that are recorded
SOME = ("edge-features", "hyperbatch", "macrobatch", "hops-rows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[Proxy]:
    """A server with the stores of the golden cases."""
    with proxied() as found:
        for name in ("plain", "hetero"):
            kind, options = STORES[name]
            store = make_store(made(folder, kind), folder / f"{name}.store", options)
            push(open_store(store), f"{URL}/{name}", 20, lambda _: None)
        yield found


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives a daemon that begins later a cache."""

    def give(size: str) -> None:
        monkeypatch.setenv("LOADERD_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("LOADERD_CACHE_SIZE", size)

    return give


def faulty(share: float) -> Callable[[str, str], str]:
    """Such a share of all requests for ranges fails, each kind in turn."""
    kinds, rng = itertools.cycle(KINDS), random.Random(1)
    shard = re.compile(r"/c/\d+/\d")

    def fault(method: str, path: str) -> str:
        wanted = method == "GET" and shard.search(path) and rng.random() < share
        return next(kinds) if wanted else ""

    return fault


def digests(name: str, cases: dict[str, Case]) -> tuple[dict[str, str], dict[str, int]]:
    """Of epochs, by case; and what the daemon has counted."""
    with daemon(Path(f"{URL}/{name}"), "64M") as endpoint:
        found = {case: epoch_digest(endpoint, how) for case, how in cases.items()}
        counters = ask_status(parse_either(endpoint)).counters
    assert counters["object_cache_bytes"] > 0
    return found, counters


@pytest.mark.slow
def test_a_restart_on_a_warm_cache_reads_no_object(
    proxy: Proxy, cached: Callable[[str], None]
) -> None:
    cached("64M")
    cases = {case: PLAIN[case] for case in SOME}
    expected = {case: RECORDED[f"plain/{case}"] for case in cases}
    found, counters = digests("plain", cases)
    assert found == expected
    asked = [(path, span) for path, span in proxy.gets if span]
    assert counters["object_bytes_read"] > 0
    assert len(set(asked)) == len(asked)
    found, counters = digests("plain", cases)
    assert found == expected
    assert counters["object_bytes_read"] == 0


@pytest.mark.slow
def test_faults_change_no_batch(proxy: Proxy, cached: Callable[[str], None]) -> None:
    cached("700K")
    cases = {case: PLAIN[case] for case in ("new", "macrobatch", "hops-chunks")}
    injected = []
    with daemon(Path(f"{URL}/plain"), "64M") as endpoint:
        proxy.fault = faulty(0.55)
        try:
            for case, how in cases.items():
                before = len(proxy.injected)
                assert epoch_digest(endpoint, how) == RECORDED[f"plain/{case}"]
                injected.append(len(proxy.injected) - before)
        finally:
            proxy.fault = lambda _method, _path: ""
        counters = ask_status(parse_either(endpoint)).counters
    assert counters["object_pages_evicted"] > 0
    assert counters["object_retries"] >= sum(injected)
    assert sum(injected) >= 100, injected


@pytest.mark.long
@pytest.mark.parametrize(("name", "cases"), [("plain", PLAIN), ("hetero", HETERO)])
def test_epochs_are_those_that_were_recorded(
    proxy: Proxy, cached: Callable[[str], None], name: str, cases: dict[str, Case]
) -> None:
    cached("1M")
    found, _ = digests(name, cases)
    assert found == {case: RECORDED[f"{name}/{case}"] for case in cases}


def serve(url: object, *options: object) -> "object":
    return command("loaderd", "serve", url, "--endpoint", "ipc:///tmp/none.sock", *options)


def test_bad_input_is_one_line(
    proxy: Proxy, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ("--cache", tmp_path / "cache", "--cache-size", "64M", "--object-wait", "6")
    url = f"{URL}/plain"
    refused(serve(url), "expected --cache FOLDER and --cache-size SIZE")
    refused(serve(f"s3://nobody/{BUCKET}", *cache), "there is no such bucket")
    refused(serve(f"s3://{BUCKET}/nothing", *cache), "there is no such object", "zarr.json")
    refused(serve(url, *cache[:3], "64K", *cache[4:]), "--cache-size 64K", "expected at least")
    for fault, words in (("denied", "access is refused"), ("region", "AWS_REGION")):
        proxy.fault = lambda _method, _path, fault=fault: fault
        answer = serve(url, *cache)
        proxy.fault = lambda _method, _path: ""
        refused(answer, words)
        assert KEY not in answer.stderr + answer.stdout
        assert SECRET not in answer.stderr + answer.stdout
    refused(command("preprocess", "push", folder / "plain.store", tmp_path), "a URL such as")
    refused(command("preprocess", "pull", tmp_path, tmp_path / "x"), "a URL such as")
    refused(command("preprocess", "ingest", folder / "plain", url), "no --work")
    # the folder belongs to a daemon
    monkeypatch.setenv("LOADERD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOADERD_CACHE_SIZE", "64M")
    with daemon(Path(url), "64M"):
        refused(serve(f"{URL}/hetero"), "--cache", "another daemon")


def test_an_ingest_to_a_url_leaves_nothing_here(proxy: Proxy, folder: Path, tmp_path: Path) -> None:
    url = f"{URL}/fresh"
    made_there = command(
        "preprocess", "ingest", folder / "plain", url, "--work", tmp_path, "--block-size", "16K"
    )
    assert made_there.returncode == 0, made_there.stderr
    assert list(tmp_path.iterdir()) == []
    assert command("preprocess", "pull", url, tmp_path / "back").returncode == 0
    local = tmp_path / "local"
    command("preprocess", "ingest", folder / "plain", local, "--block-size", "16K")
    assert open_store(tmp_path / "back").manifest == open_store(local).manifest
