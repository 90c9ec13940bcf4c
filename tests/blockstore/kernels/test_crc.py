"""Page checksums against google_crc32c."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.format import PAGE_BYTES
from blockstore.kernels.crc import _table_page, find_bad_page, page_crcs


def _pages(num_pages: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, 256, num_pages * PAGE_BYTES, np.uint8)


def _expected(data, num_pages: int) -> list[int]:
    pages = data[: num_pages * PAGE_BYTES].reshape(num_pages, PAGE_BYTES)
    return [google_crc32c.value(page.tobytes()) for page in pages]


@pytest.mark.parametrize("num_pages", [0, 1, 3, 4, 5, 9])
def test_every_page_gets_its_crc32c_and_nothing_else_is_touched(num_pages):
    data, out = _pages(10), np.full(11, 7, np.uint32)
    page_crcs(data, num_pages, out)
    assert out[:num_pages].tolist() == _expected(data, num_pages)
    assert (out[num_pages:] == 7).all()


def test_the_tables_give_what_the_instruction_gives():
    data = _pages(3)
    words = data.view(np.uint64)
    found = [int(_table_page(words, page * PAGE_BYTES // 8)) for page in range(3)]
    assert found == _expected(data, 3)


@given(
    num_pages=st.integers(1, 140), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_a_flipped_bit_is_found_in_its_page(num_pages, place, bit):
    data, crcs = np.zeros(num_pages * PAGE_BYTES, np.uint8), np.empty(num_pages, np.uint32)
    page_crcs(data, num_pages, crcs)
    assert find_bad_page(data, num_pages, crcs) == -1
    byte = int(place * data.size)
    data[byte] ^= 1 << bit
    data[-1] ^= 255  # a second fault: the first one is told
    assert find_bad_page(data, num_pages, crcs) == byte // PAGE_BYTES
