"""Which pages leave a cache, against the optimum (Belady), and what must hold in any order."""

import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.format import PAGE_BYTES, graph_geometry
from blockstore.kernels.crc import page_crcs
from blockstore.make_part import make_hole
from blockstore.objects.cache import CachedPages, CachedShard, PageCache

PAGES, BLOCK = 4096, 16  # of the array; of a block: 16 MiB in all
LIMIT = PAGES // 4


class Memory:
    """An object in memory, in place of a bucket."""

    url = "memory"

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.requests, self.retries, self.bytes_read = data, 0, 0, 0
        self._lock = threading.Lock()

    def cost(self) -> tuple[float, float]:
        return 1e-3, 1.0  # no gap is worth its bytes

    def hurry(self) -> None:
        pass

    def read(
        self, name: str, start: int, stop: int, etag: str, check: Callable[[Any], str]
    ) -> memoryview:
        body = memoryview(self.data[start:stop])
        assert check(body) == ""
        with self._lock:
            self.requests += 1
            self.bytes_read += len(body)
        return body


@pytest.fixture(scope="module")
def array() -> tuple[np.ndarray, np.ndarray]:
    """Random pages and their checksums."""
    data = np.random.default_rng(1).integers(0, 256, PAGES * PAGE_BYTES, dtype=np.uint8)
    crcs = np.empty(PAGES, np.uint32)
    page_crcs(data, PAGES, crcs)
    return data, crcs


@pytest.fixture
def made(
    array: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> Iterator[tuple[Memory, CachedPages, np.ndarray]]:
    """A cache of a quarter of the array."""
    geometry = graph_geometry(PAGES // BLOCK, BLOCK * PAGE_BYTES)
    make_hole(tmp_path / "shard", geometry, 0)
    bucket = Memory(array[0])
    with ExitStack() as stack:
        cache = stack.enter_context(PageCache(tmp_path / "cache", LIMIT * PAGE_BYTES))
        shards = [CachedShard("shard", tmp_path / "shard", "")]
        pages = CachedPages(bucket, cache, {"a": (geometry, shards)}, 0, 64 << 20)  # type: ignore[arg-type]
        stack.enter_context(closing(pages))
        yield bucket, pages, array[1]


def optimum(trace: list[list[int]]) -> int:
    """Pages that the best cache fetches that keeps all it fetches: the farthest next use leaves."""
    flat = [page for pages in trace for page in pages]
    following, last = [1 << 60] * len(flat), dict[int, int]()
    for i in range(len(flat) - 1, -1, -1):
        following[i] = last.get(flat[i], 1 << 60)
        last[flat[i]] = i
    held, heap, fetched = dict[int, int](), list[tuple[int, int]](), 0
    for i, page in enumerate(flat):
        if page not in held:
            fetched += 1
            while len(held) >= LIMIT:
                use, out = heapq.heappop(heap)
                if held.get(out) == -use:
                    del held[out]
        held[page] = following[i]
        heapq.heappush(heap, (-following[i], page))
    return fetched


def share(made: tuple[Memory, CachedPages, np.ndarray], trace: list[list[int]]) -> float:
    """Pages fetched, over the optimum."""
    bucket, pages, crcs = made
    for run in trace:
        with pages.hold("a", np.array(run), crcs, False):
            pass
        assert pages.present <= LIMIT
    return bucket.bytes_read / PAGE_BYTES / optimum(trace)


def test_epochs_in_a_new_order_are_near_the_optimum(made: Any) -> None:
    rng, each = np.random.default_rng(2), 64
    trace = [
        list(range(p * each, (p + 1) * each))
        for _ in range(8)
        for p in rng.permutation(PAGES // each).tolist()
    ]
    assert share(made, trace) <= 1.15


def test_ascending_passes_are_near_the_optimum(made: Any) -> None:
    rng = np.random.default_rng(3)
    trace = []
    for _ in range(8):  # each wants most of the pages
        wanted = np.flatnonzero(rng.random(PAGES) < 0.8)
        trace += [part.tolist() for part in np.array_split(wanted, 64)]
    assert share(made, trace) <= 1.15


def test_blocks_of_minibatches_are_near_the_optimum(made: Any) -> None:
    """Each batch wants most of the blocks; two workers are at them, one shortly after the other."""
    rng, blocks, lag = np.random.default_rng(5), PAGES // BLOCK, 6
    wanted = [b for _ in range(20) for b in np.flatnonzero(rng.random(blocks) < 0.75).tolist()]
    order = [b for pair in zip(wanted[lag:], wanted, strict=False) for b in pair]
    trace = [list(range(b * BLOCK, (b + 1) * BLOCK)) for b in order]
    assert share(made, trace) <= 1.15


def test_blocks_stay_by_heat(made: Any) -> None:
    rng = np.random.default_rng(4)
    chance = 1 / np.arange(1, PAGES // BLOCK + 1)
    blocks = rng.permutation(PAGES // BLOCK)[
        rng.choice(PAGES // BLOCK, 4000, p=chance / chance.sum())
    ]
    trace = [list(range(b * BLOCK, (b + 1) * BLOCK)) for b in blocks.tolist()]
    recent, fetched = OrderedDict[int, None](), 0  # least recently used, block by block
    for block in blocks.tolist():
        fetched += block not in recent
        recent[block] = recent.pop(block, None)
        if len(recent) > LIMIT // BLOCK:
            recent.popitem(last=False)
    assert share(made, trace) * optimum(trace) <= 1.05 * fetched * BLOCK


def test_whatever_is_held_has_its_bytes_and_the_size_holds(
    made: tuple[Memory, CachedPages, np.ndarray], tmp_path: Path
) -> None:
    bucket, pages, crcs = made
    shard, faults = tmp_path / "shard", list[str]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with shard.open("rb", buffering=0) as file:
            for _ in range(150):
                first, count = int(rng.integers(PAGES - 300)), int(rng.integers(1, 300))
                some = np.unique(first + rng.integers(0, count, count))
                with pages.hold("a", some, crcs, False):
                    if pages.present > LIMIT:
                        faults.append(f"{pages.present} pages")
                    for page in some[:: 1 + some.size // 8].tolist():
                        file.seek(page * PAGE_BYTES)
                        at = page * PAGE_BYTES
                        if file.read(PAGE_BYTES) != bucket.data[at : at + PAGE_BYTES].tobytes():
                            faults.append(f"page {page}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert shard.stat().st_blocks * 512 <= (LIMIT + 2) * PAGE_BYTES  # the index beside them
    assert pages.present == np.count_nonzero(pages._state)
    assert not pages._pins.any()
    assert pages._spare == (64 << 20) // 4  # nothing that came is kept
    present = pages.present
    assert pages.evict(PAGES) == present
    assert not pages._state.any()
