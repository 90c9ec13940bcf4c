"""Triton kernel: a GPU gathers rows from host memory and from a cache in its own memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = tl.constexpr(1024)  # words that a program moves at a time
# On an H100 16 programs read host memory at 0.94 of the rate of any number of them.  A training
# step beside them takes 8.0 ms, and 10.8 ms beside as many as there are blocks of rows.
MAX_PROGRAMS = 16
MAX_PROGRAMS_CACHED = 64  # if most rows are found in the device's own memory
MAX_WORDS = 128  # of one row, per tile
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _gather(
    arena, addresses, slots, cache, out, num_rows,
    ROW_WORDS: tl.constexpr, WORD_BYTES: tl.constexpr, CACHED: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Program p of P: blocks p, p + P, ... of ROWS rows of `out`, COLUMNS words at a time.

    arena      words, in host memory      read if the row is not in the cache
    addresses  int64 (num_rows,)          byte offsets in the arena; negative: a row of zeros
    slots      int64 (num_rows,)          row in the cache; -1: not there
    cache      words (cached, ROW_WORDS)
    out        words (num_rows, ROW_WORDS)
    """
    ROWS: tl.constexpr = TILE // COLUMNS  # noqa: N806
    begin = tl.program_id(0).to(tl.int64) * ROWS
    while begin < num_rows:
        rows = begin + tl.arange(0, ROWS)
        live = rows < num_rows
        address = tl.load(addresses + rows, mask=live, other=-1)
        from_host = live & (address >= 0)
        first = address // WORD_BYTES
        if CACHED:
            slot = tl.load(slots + rows, mask=live, other=-1)
            from_host = from_host & (slot < 0)
            from_cache = live & (slot >= 0)
        for word in range(0, ROW_WORDS, COLUMNS):
            columns = word + tl.arange(0, COLUMNS)
            inside = (columns < ROW_WORDS)[None, :]
            value = tl.load(
                arena + first[:, None] + columns[None, :], mask=from_host[:, None] & inside, other=0
            )
            if CACHED:
                held = tl.load(
                    cache + slot[:, None] * ROW_WORDS + columns[None, :],
                    mask=from_cache[:, None] & inside, other=0,
                )  # fmt: skip
                value = tl.where(from_cache[:, None], held, value)
            tl.store(
                out + rows[:, None] * ROW_WORDS + columns[None, :], value,
                mask=live[:, None] & inside,
            )  # fmt: skip
        begin += tl.num_programs(0) * ROWS


def gather_on_device(
    arena: Tensor, addresses: Tensor, out: Tensor, slots: Tensor | None, cache: Tensor | None
) -> None:
    """Row i of `out` = row slots[i] of `cache`, or, if that is negative, bytes of the arena.

    arena      uint8 (bytes,)                in host memory that is registered with the device
    addresses  int64 (rows,)                 byte offsets, multiples of the widest word in a row
    out        uint8 (rows, row_bytes)
    cache      uint8 (cached, row_bytes)
    """
    num_rows, row_bytes = out.shape
    if not num_rows or not row_bytes:
        return
    word = next(size for size in WORDS if row_bytes % size == 0)
    kind, row_words = WORDS[word], row_bytes // word
    columns = min(MAX_WORDS, triton.next_power_of_2(row_words))
    rows = TILE.value // columns
    cached = slots is not None and cache is not None and cache.numel() > 0
    whole = arena[: arena.numel() // word * word].view(kind)
    maximum = MAX_PROGRAMS_CACHED if cached else MAX_PROGRAMS
    _gather[(min(triton.cdiv(num_rows, rows), maximum),)](
        whole, addresses, slots if cached else addresses,
        cache.view(kind) if cached and cache is not None else out.view(kind), out.view(kind),
        num_rows, ROW_WORDS=row_words, WORD_BYTES=word, CACHED=cached, COLUMNS=columns,
    )  # fmt: skip
