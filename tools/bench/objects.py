"""Rows of a store in object storage, read into a cold cache, against a plain obstore loop.

`into the cache`: a daemon's reader streams an array of which nothing is cached: each range is
fetched, verified, written to the cache's disk, read from there with O_DIRECT and verified again.

`plain obstore`: as many threads fetch the same ranges of the same object, and drop the bytes.

The server is a process in the place of a bucket, and shares the cores: with `--rate 0` both sides
are bound by these, and the cache by its disk.
"""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import numpy as np

from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader, make_transit
from blockstore.objects.cache import IN_FLIGHT
from blockstore.objects.remote import ObjectStores
from blockstore.store import BlockedFile, open_store
from tools.bench.harness import CONTEXT, BenchPlan, GraphOptions, Ratio, Run, Side
from tools.bench.setup import free_port, rate

CACHED, PLAIN = "into the cache", "plain obstore"
RANGE_PAGES, BUFFERS = 256, 16
MEM, CACHE = 1 << 30, 64 << 30
_HEAD = re.compile(rb"(\w+) /graphs(/[^ ]*) HTTP", re.ASCII)
_RANGE = re.compile(rb"range: bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class ObjectsOptions(GraphOptions):
    nodes: int = 400_000
    degree: int = 2
    features: Annotated[int, "of 4 bytes each"] = 256
    latency: Annotated[float, "seconds before each answer"] = 0.03
    rate: Annotated[float, "MB/s of all requests on their way; 0: as fast as it can"] = 200
    rounds: int = 5


def answer_files(folder: Path, port: int, latency: float, rate: float) -> None:
    """Serve the files of a folder as objects of the bucket `graphs`, until it is killed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            asked, span = _HEAD.match(head), _RANGE.search(head)
            assert asked is not None
            path = folder / unquote(asked[2].decode()).lstrip("/")
            size = path.stat().st_size
            first, stop = (int(span[1]), int(span[2]) + 1) if span else (0, size)
            slow = (stop - first) * IN_FLIGHT / (rate * 1e6) if span and rate else 0
            await asyncio.sleep(latency + slow)
            status = f"206 Partial\r\nContent-Range: bytes {first}-{stop - 1}/{size}"
            writer.write(
                f"HTTP/1.1 {status if span else '200 OK'}\r\nContent-Length: {stop - first}\r\n"
                'ETag: "one"\r\nLast-Modified: Mon, 23 Nov 2026 00:00:00 GMT\r\n\r\n'.encode()
            )
            if asked[1] != b"HEAD":
                with path.open("rb") as file:
                    writer.write(os.pread(file.fileno(), stop - first, first))
            await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=256)
        await server.serve_forever()

    asyncio.run(serve())


def array_runs(file: BlockedFile) -> np.ndarray:
    """All pages of an array as ranges of objects, (ranges, 3): shard, first page, pages."""
    geometry, found = file.geometry, []
    each = geometry.blocks_per_shard * geometry.pages_per_block
    for first in range(0, geometry.num_pages, RANGE_PAGES):
        shard, page = divmod(first, each)
        found.append((shard, page, min(RANGE_PAGES, geometry.num_pages - first, each - page)))
    return np.array(found, np.int64)


def features(folder: Path | ObjectStores, url: str = "") -> BlockedFile:
    store = open_store(folder) if isinstance(folder, Path) else folder.open(url)
    return store.rows(next(iter(store.manifest.types[0].features.values())))


def open_cached(given: ObjectsOptions, url: str) -> Iterator[Run]:
    """Our reader, with a cold cache in every round."""
    folder = given.folder / "objects-cache"
    memory = aligned_buffer(BUFFERS * RANGE_PAGES * PAGE_BYTES)
    transit = make_transit(np.split(memory, BUFFERS))

    def read() -> Mapping[str, float]:
        shutil.rmtree(folder, ignore_errors=True)
        with ObjectStores(folder, CACHE, MEM, 60.0) as stores:
            file = features(stores, url)
            assert file.pages is not None
            runs = array_runs(file)
            with BlockReader([file], memory, PAGE_BYTES, 8) as reader:
                stream = partial(reader.stream, 0, runs, transit, lambda _low, _high, _pages: None)
                found = rate(file.geometry.num_pages * PAGE_BYTES, lambda: stream().wait())
            return {**found, "requests": file.pages.counters()["object_requests"]}

    yield read
    shutil.rmtree(folder, ignore_errors=True)


def open_plain(given: ObjectsOptions, url: str) -> Iterator[Run]:
    """The same ranges, by as many threads as the cache has requests in flight."""
    from obstore.store import from_url

    store, bucket = open_store(given.store()), from_url(url, client_options={"allow_http": True})
    file = features(given.store())
    names = [str(path.relative_to(store.path.resolve())) for path in file.shards]

    def fetch(run: np.ndarray) -> None:
        shard, page, pages = run.tolist()
        start, stop = page * PAGE_BYTES, (page + pages) * PAGE_BYTES
        bucket.get_range(names[shard], start=start, end=stop)

    def loop() -> Mapping[str, float]:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            num_bytes = file.geometry.num_pages * PAGE_BYTES
            return rate(num_bytes, lambda: list(pool.map(fetch, array_runs(file))))

    yield loop


def objects(given: ObjectsOptions) -> Iterator[BenchPlan]:
    """Both sides against one server."""
    if find_spec("obstore") is None:
        sys.exit('bench objects needs obstore, found none: pip install "blockstore[objects]"')
    port = free_port()
    server = CONTEXT.Process(
        target=answer_files, args=(given.store(), port, given.latency, given.rate)
    )
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench",
    }  # fmt: skip
    try:
        url = "s3://graphs"
        sides = [Side(CACHED, open_cached, (given, url)), Side(PLAIN, open_plain, (given, url))]
        yield BenchPlan(sides, ratios=[Ratio("over_plain", CACHED, "GB_per_s", PLAIN)])
    finally:
        server.kill()
        server.join()
