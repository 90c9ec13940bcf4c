"""crc32c of pages: by the CPU's instruction over several pages at once, by a table elsewhere."""

import numpy as np
from numba.extending import overload

from blockstore.format import PAGE_BYTES
from blockstore.kernels.intrinsics import crc32_word, has_crc32
from blockstore.kernels.jit import inner, leaf, njit

PAGE_WORDS = PAGE_BYTES // 8
_INITIAL = np.uint64(0xFFFF_FFFF)


def _make_tables():
    """uint32 (8, 256): crc of byte b followed by k zero bytes, for eight bytes a step."""
    tables = np.zeros((8, 256), np.uint32)
    crc = np.arange(256, dtype=np.uint32)
    for k in range(8):
        for _ in range(8):
            crc = ((crc >> 1) ^ (crc & 1) * np.uint32(0x82F6_3B78)).astype(np.uint32)
        tables[k] = crc
    return tables


_TABLES = _make_tables()


def _make_page_tables():
    """uint32 (4, 256): the crc of bytes and then a page of zeros is the xor of what these say of
    the four bytes of the crc before it; zeros count as nothing, so no bit is inverted."""
    bits = np.arange(32, dtype=np.uint32)

    def apply(columns, values):  # a linear map, given by what it makes of each bit
        chosen = (values[:, np.newaxis] >> bits & 1) * columns
        return np.bitwise_xor.reduce(chosen, axis=1).astype(np.uint32)

    one = np.uint32(1) << bits
    columns = ((one >> 8) ^ _TABLES[0, one & 255]).astype(np.uint32)  # of one byte
    for _ in range(PAGE_BYTES.bit_length() - 1):
        columns = apply(columns, columns)
    byte = np.arange(256, dtype=np.uint32)
    return np.stack([apply(columns, byte << (8 * k)) for k in range(4)])


_PAGE_TABLES = _make_page_tables()


@njit(nogil=True, cache=True)
def crc_word_by_table(crc, word):
    """crc32c continued by eight bytes, as `crc32_word`, from eight tables of 1 KiB."""
    mixed = crc ^ word
    result = np.uint32(0)
    for k in range(8):
        byte = np.int64((mixed >> np.uint64(8 * k)) & np.uint64(255))
        result ^= _TABLES[7 - k, byte]
    return np.uint64(result)


def _crc_word(crc, word):
    return crc_word_by_table(crc, word)


@overload(_crc_word)
def _choose_crc_word(crc, word):
    if has_crc32():
        return lambda crc, word: crc32_word(crc, word)
    return lambda crc, word: crc_word_by_table(crc, word)


@inner
def _crc_page(words, start):
    crc = _INITIAL
    for i in range(start, start + PAGE_WORDS):
        crc = _crc_word(crc, words[i])
    return np.uint32(crc ^ _INITIAL)


@inner
def _crc_four_pages(words, start):
    """The crcs of four pages, interleaved: the instruction takes 3 cycles, starts every cycle."""
    a, b, c, d = _INITIAL, _INITIAL, _INITIAL, _INITIAL
    for i in range(start, start + PAGE_WORDS):
        a = _crc_word(a, words[i])
        b = _crc_word(b, words[i + PAGE_WORDS])
        c = _crc_word(c, words[i + 2 * PAGE_WORDS])
        d = _crc_word(d, words[i + 3 * PAGE_WORDS])
    return (
        np.uint32(a ^ _INITIAL),
        np.uint32(b ^ _INITIAL),
        np.uint32(c ^ _INITIAL),
        np.uint32(d ^ _INITIAL),
    )


@njit(nogil=True, cache=True)
def page_crcs(data, num_pages, out):
    """crc32c of each of the first pages of `data`.

    data   uint8 (>= num_pages * 4096,)   aligned to 8 bytes; its size a multiple of 8
    out    uint32 (>= num_pages,)         out: as google_crc32c.value gives
    """
    words = data.view(np.uint64)
    page = 0
    while page + 4 <= num_pages:
        crcs = _crc_four_pages(words, page * PAGE_WORDS)
        for k in range(4):
            out[page + k] = crcs[k]
        page += 4
    while page < num_pages:
        out[page] = _crc_page(words, page * PAGE_WORDS)
        page += 1


@njit(nogil=True, cache=True)
def find_bad_page(data, num_pages, expected):
    """The first page whose crc32c is not the expected one, or -1.

    data       uint8 (>= num_pages * 4096,)   aligned to 8 bytes; its size a multiple of 8
    expected   uint32 (>= num_pages,)

    Returns the page's index, int64.
    """
    words = data.view(np.uint64)
    page = 0
    while page + 4 <= num_pages:
        crcs = _crc_four_pages(words, page * PAGE_WORDS)
        for k in range(4):
            if crcs[k] != expected[page + k]:
                return page + k
        page += 4
    while page < num_pages:
        if _crc_page(words, page * PAGE_WORDS) != expected[page]:
            return page
        page += 1
    return -1


@inner
def _join(crc, page):
    """The crc32c of bytes followed by a page."""
    for k in range(4):
        page ^= _PAGE_TABLES[k, (crc >> np.uint32(8 * k)) & np.uint32(255)]
    return page


@leaf
def join_crcs(pages):
    """The crc32c of pages one after the other, by that of each, uint32 (pages,)."""
    crc = np.uint32(0)
    for i in range(pages.size):
        crc = _join(crc, pages[i])
    return crc


@inner
def crc_pages(words, page, num_pages, crc):
    """`crc` continued by at most four pages; returns how many, and the crc32c."""
    count = min(4, num_pages - page)
    if count == 4:
        for each in _crc_four_pages(words, page * PAGE_WORDS):
            crc = _join(crc, each)
    else:
        for i in range(count):
            crc = _join(crc, _crc_page(words, (page + i) * PAGE_WORDS))
    return count, crc


@inner
def crc_rest(data, start, crc):
    """`crc` continued by the bytes from `start` on."""
    state = np.uint32(crc ^ np.uint32(_INITIAL))
    for i in range(start, data.size):
        state = (state >> np.uint32(8)) ^ _TABLES[0, (state ^ data[i]) & np.uint32(255)]
    return np.uint32(state ^ np.uint32(_INITIAL))


@leaf
def crc_bytes(data):
    """crc32c of bytes, uint8 (any,); uint32."""
    words = data[: data.size // 8 * 8].view(np.uint64)
    page, crc = 0, np.uint32(0)
    while page < data.size // PAGE_BYTES:
        count, crc = crc_pages(words, page, data.size // PAGE_BYTES, crc)
        page += count
    return crc_rest(data, page * PAGE_BYTES, crc)
