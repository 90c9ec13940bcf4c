"""Page checksums against google_crc32c."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from blockstore.format import PAGE_BYTES
from blockstore.kernels.crc import (
    crc_bytes,
    crc_word_by_table,
    find_bad_page,
    join_crcs,
    page_crcs,
)
from blockstore.kernels.intrinsics import crc32_word, has_crc32


@njit
def _by_instruction(crc, word):
    return crc32_word(crc, word)


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


@given(crc=st.integers(0, 2**32 - 1), word=st.integers(0, 2**64 - 1))
def test_the_tables_give_what_eight_bytes_do(crc, word):
    """google_crc32c inverts before and after; a step of ours does not."""
    after = google_crc32c.extend(crc ^ 0xFFFF_FFFF, word.to_bytes(8, "little")) ^ 0xFFFF_FFFF
    assert int(crc_word_by_table(np.uint64(crc), np.uint64(word))) == after
    if has_crc32():
        assert int(_by_instruction(np.uint64(crc), np.uint64(word))) == after


@given(num_pages=st.integers(1, 14), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_in_its_page(num_pages, place, bit):
    data, crcs = np.zeros(num_pages * PAGE_BYTES, np.uint8), np.empty(num_pages, np.uint32)
    page_crcs(data, num_pages, crcs)
    assert find_bad_page(data, num_pages, crcs) == -1
    byte = int(place * data.size)
    data[byte] ^= 1 << bit
    data[-1] ^= 255  # a second fault: the first one is told
    assert find_bad_page(data, num_pages, crcs) == byte // PAGE_BYTES


@given(st.one_of(st.integers(0, 40), st.integers(0, 9 * PAGE_BYTES)), st.integers(0, 7))
def test_the_crc32c_of_bytes_wherever_they_begin(size: int, start: int):
    data = np.random.default_rng(size).integers(0, 256, start + size).astype(np.uint8)[start:]
    assert crc_bytes(data) == google_crc32c.value(data.tobytes())


@pytest.mark.parametrize("num_pages", [0, 1, 2, 7])
def test_crcs_of_pages_give_that_of_all(num_pages: int):
    data = np.random.default_rng(0).integers(0, 256, num_pages * PAGE_BYTES).astype(np.uint8)
    crcs = np.array([google_crc32c.value(p.tobytes()) for p in np.split(data, num_pages or 1)])
    assert join_crcs(crcs[:num_pages].astype(np.uint32)) == google_crc32c.value(data.tobytes())
