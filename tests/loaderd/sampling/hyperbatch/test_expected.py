"""What a row cache tells the page cache of a store in object storage, and when it is forgotten."""

from typing import Any

import numpy as np
import pytest

from blockstore.errors import CorruptBlock
from blockstore.kernels.rows import RowLayout
from loaderd.sampling.hyperbatch.expected import pages_of_rows
from tests.loaderd.sampling.hyperbatch.test_rowcache import Reader, check, make_cache, needs_of

WIDE = "1500"  # an array with two rows in each page


class Source:
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, bool], set[int]] = {}  # by array, and whether it is for later
        self.read = dict[str, set[int]]()
        self.before_reading: dict[tuple[str, bool], set[int]] = {}

    def expect(self, reader: object, path: str, pages: np.ndarray, later: bool) -> None:
        self.told.setdefault((path, later), set()).update(pages.tolist())

    def had(self, reader: object, path: str, pages: np.ndarray) -> None:
        self.before_reading = self.before_reading or dict(self.told)
        self.read.setdefault(path, set()).update(pages.tolist())

    def forget(self, reader: object) -> None:
        self.told.clear()


def test_pages_of_rows_of_any_width() -> None:
    narrow = RowLayout(rows_per_block=10, row_bytes=1000, block_bytes=12288, blocks_per_shard=2)
    # row 4 lies in bytes 4000 to 5000; row 10 is the first of block 1, three pages on
    assert set(pages_of_rows(np.array([0, 4, 10]), narrow).tolist()) == {0, 1, 3}
    wide = RowLayout(rows_per_block=1, row_bytes=9000, block_bytes=12288, blocks_per_shard=2)
    assert set(pages_of_rows(np.array([0, 3]), wide).tolist()) == {0, 1, 2, 9, 10, 11}
    assert pages_of_rows(np.empty(0, np.int64), wide).size == 0


def test_a_group_is_announced_before_it_is_read() -> None:
    source = Source()
    cache = make_cache(20, Reader(source))
    first, second = needs_of(0, range(10, 20)), needs_of(1, range(14, 26))
    cache.bring([first], [second], lambda known: known + 1)
    check(cache, first)
    assert source.read[WIDE] == source.before_reading[WIDE, False] == set(range(5))
    # rows 0 to 9 are read now; of the later batch only 10 to 15 are missing then
    assert source.before_reading[WIDE, True] == {5, 6, 7}
    cache.bring([second], [], lambda known: known + 1)
    check(cache, second)
    assert source.read[WIDE] == set(range(8))
    assert (WIDE, True) not in source.told


def test_no_page_is_read_that_holds_no_wanted_row() -> None:
    source = Source()
    cache = make_cache(20, Reader(source))
    far = needs_of(0, (10, 12, 16, 40))
    cache.bring([far], [], lambda known: known + 1)
    check(cache, far)
    assert source.read[WIDE] == {0, 1, 3, 15}


@pytest.mark.parametrize("error", [CorruptBlock, RuntimeError])
def test_a_pass_that_ends_early_is_forgotten(error: type[Exception]) -> None:
    source = Source()
    reader = Reader(source)
    cache = make_cache(20, reader)

    def oldest(known: int) -> int:
        assert source.told or cache.types[0].num_listed == 0
        if error is RuntimeError:  # as if the run had ended
            raise error
        return known + 1

    reader.fail_after = 0
    with pytest.raises(error):
        cache.bring([needs_of(0, range(10, 20))], [needs_of(1, range(30, 40))], oldest)
    assert not source.told


def test_of_a_store_on_this_disk_nothing_is_told(monkeypatch: Any) -> None:
    cache = make_cache(20, Reader())
    monkeypatch.setattr(cache.expected, "_expect", None)
    needs = needs_of(0, range(10, 20))
    cache.bring([needs], [needs_of(1, range(30, 40))], lambda known: known + 1)
    check(cache, needs)
