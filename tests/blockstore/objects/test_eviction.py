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
from blockstore.objects.expected import MAX_READERS

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
        for _ in range(5)
        for p in rng.permutation(PAGES // each).tolist()
    ]
    assert share(made, trace) <= 1.15


def test_ascending_passes_are_near_the_optimum(made: Any) -> None:
    rng = np.random.default_rng(3)
    trace = []
    for _ in range(5):  # each wants most of the pages
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
        rng.choice(PAGES // BLOCK, 2000, p=chance / chance.sum())
    ]
    trace = [list(range(b * BLOCK, (b + 1) * BLOCK)) for b in blocks.tolist()]
    recent, fetched = OrderedDict[int, None](), 0  # least recently used, block by block
    for block in blocks.tolist():
        fetched += block not in recent
        recent[block] = recent.pop(block, None)
        if len(recent) > LIMIT // BLOCK:
            recent.popitem(last=False)
    assert share(made, trace) * optimum(trace) <= 1.05 * fetched * BLOCK


def rounds(fresh: int, again: int) -> list[np.ndarray]:
    """Ascending passes: fresh pages, and some of those that were fresh in the pass before.

    Which of them come again no interval says; the others come when all pages have been fresh.
    """
    rng, found, before = np.random.default_rng(6), list[np.ndarray](), np.empty(0, np.int64)
    order = np.concatenate([rng.permutation(PAGES) for _ in range(3)])
    for low in range(0, order.size - fresh, fresh):
        now = order[low : low + fresh]
        found.append(np.union1d(now, rng.choice(before, again) if before.size else before))
        before = now
    return found


def test_announced_passes_are_near_the_optimum(made: Any) -> None:
    bucket, pages, crcs = made
    trace, passes = list[list[int]](), rounds(1000, 500)
    for i, wanted in enumerate(passes):
        pages.forget("reader")
        pages.expect("reader", "a", wanted, False)
        for later in passes[i + 1 : i + 2]:
            pages.expect("reader", "a", later, True)
        for part in np.array_split(wanted, 32):
            trace.append(part.tolist())
            with pages.hold("a", part, crcs, False):
                pages.had("reader", "a", part)
            assert pages.present <= LIMIT
    assert bucket.bytes_read / PAGE_BYTES <= 1.15 * optimum(trace)


def test_without_a_word_such_passes_are_far_from_it(made: Any) -> None:
    """So the test before this one can fail."""
    parts = [part.tolist() for wanted in rounds(1000, 500) for part in np.array_split(wanted, 32)]
    assert share(made, parts) > 1.25


def evicted(pages: CachedPages, count: int) -> set[int]:
    """Which of the first pages leave."""
    pages.evict(count)
    return set(np.flatnonzero(pages._state[:LIMIT] == 0).tolist())


@pytest.fixture
def full(made: tuple[Memory, CachedPages, np.ndarray]) -> CachedPages:
    """All pages below LIMIT are there, and none else."""
    _, pages, crcs = made
    with pages.hold("a", np.arange(LIMIT), crcs, False):
        pass
    return pages


def test_pages_that_are_expected_leave_last_and_the_farthest_first(full: CachedPages) -> None:
    now, later = np.arange(100, 300), np.arange(250, 400)
    full.expect("reader", "a", now, False)
    full.expect("reader", "a", later, True)
    rest = set(range(LIMIT)) - set(range(100, 400))
    assert evicted(full, len(rest)) == rest
    assert evicted(full, 50) == rest | set(range(350, 400))  # only wanted later, the last ones
    full.had("reader", "a", np.arange(100, 110))
    assert evicted(full, 10) <= rest | set(range(340, 400)) | set(range(100, 110))
    assert evicted(full, 1 << 20) == set(range(LIMIT))  # all may leave in the end


def test_what_is_forgotten_leaves_as_any_other(full: CachedPages) -> None:
    full.expect("reader", "a", np.arange(LIMIT), False)
    full.expect("other", "a", np.arange(10), True)
    full.forget("reader")
    assert not evicted(full, LIMIT - 10) & set(range(10))
    full.forget("other")
    assert not full._expected.bits.any()
    full.forget("other")  # once more does no harm


def test_readers_do_not_take_back_what_others_have_said(full: CachedPages) -> None:
    for reader in range(MAX_READERS):
        full.expect(reader, "a", np.arange(200), False)
    full.expect("one more", "a", np.arange(200, LIMIT), False)  # there are no bits for it
    for reader in range(1, MAX_READERS):
        full.had(reader, "a", np.arange(200))
    full.had("one more", "a", np.arange(200))
    full.forget(1)
    assert evicted(full, LIMIT - 200) == set(range(200, LIMIT))
    full.expect("one more", "a", np.arange(5), True)  # it has the bits of the one that left
    full.forget(0)
    assert evicted(full, 195) == set(range(5, LIMIT))


def test_an_array_that_is_not_of_the_store_is_an_error(full: CachedPages) -> None:
    with pytest.raises(KeyError):
        full.expect("reader", "b", np.arange(3), False)
    with pytest.raises(IndexError):
        full.expect("reader", "a", np.array([PAGES]), False)


def test_what_readers_say_is_counted_as_memory(full: CachedPages) -> None:
    arrays = full._state.nbytes + full._pins.nbytes + full._expected.bits.nbytes
    flight = (64 << 20) + (64 << 20) // 4  # on their way; came and not copied yet
    assert full.memory_bytes == arrays + full._uses.memory_bytes + flight


def test_whatever_is_held_has_its_bytes_and_the_size_holds(
    made: tuple[Memory, CachedPages, np.ndarray], tmp_path: Path
) -> None:
    bucket, pages, crcs = made
    shard, faults = tmp_path / "shard", list[str]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with shard.open("rb", buffering=0) as file:
            for _ in range(60):
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
