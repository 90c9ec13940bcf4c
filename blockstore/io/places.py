"""Places of an array's pages, and pieces of it as `read_pieces` takes them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES
from blockstore.io.elsewhere import Arrived
from blockstore.kernels.reads import PAGE, PAGES, PLACE, SHARD
from blockstore.store import BlockedFile


class Place(NamedTuple):
    """Places of a file's pages: in its shards, or on one of the disks it is dealt over."""

    fds: NDArray[np.int64]  # by SHARD
    paths: tuple[Path, ...]  # likewise; or one for all
    crcs: NDArray[np.uint32]  # of the pages, from the first one on
    stride: int  # distance in `crcs` from page 0 of one SHARD to that of the next

    def path(self, shard: int) -> Path:
        return self.paths[shard % len(self.paths)]

    def number(self, piece: NDArray[np.int64]) -> int:
        """Index in `crcs` of the first page of a piece."""
        return int(piece[SHARD]) * self.stride + int(piece[PAGE])

    def forget(self, pieces: NDArray[np.int64], direct: bool) -> None:
        """Drop pieces from the page cache, unless reads go past it."""
        if not direct:
            for shard, page, pages in pieces[:, :PLACE].tolist():
                offset, size = page * PAGE_BYTES, pages * PAGE_BYTES
                os.posix_fadvise(int(self.fds[shard]), offset, size, os.POSIX_FADV_DONTNEED)


def places_of(file: BlockedFile, fds: NDArray[np.int64]) -> list[Place]:
    """Places of a file whose shards, or files on disks, have these descriptors.

    Unit `row * n + i` of pages is unit `row` of disk i, and so a SHARD of its own in `read_pieces`:
    page p of the file there has the crc of page `p + row * (n - 1) * unit + i * unit` of the array.
    """
    deal = file.deal
    if deal is None:
        return [Place(fds, file.shards, file.crcs, file.geometry.pages_per_shard)]
    unit, stride = deal.unit_pages, (len(deal.files) - 1) * deal.unit_pages
    rows = -(-deal.num_pages // (unit * len(deal.files)))
    return [
        Place(np.full(rows, fd), (path,), file.crcs[i * unit :], stride)
        for i, (fd, path) in enumerate(zip(fds.tolist(), deal.files, strict=True))
    ]


def pieces_of(runs: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs and the bytes in memory that they go to, as `read_pieces` takes them."""
    pieces = np.empty((len(runs), 4), np.int64)
    pieces[:, :PLACE], pieces[:, PLACE] = runs[:, :PLACE], places
    return pieces


def bytes_of(piece: NDArray[np.int64], memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    start = int(piece[PLACE])
    return memory[start : start + int(piece[PAGES]) * PAGE_BYTES]


def page_numbers(shard_pages: int, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the pages of pieces, counted through all shards."""
    counts = pieces[:, PAGES]
    first = pieces[:, SHARD] * shard_pages + pieces[:, PAGE]
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def place_arrived(
    shard_pages: int,
    pieces: NDArray[np.int64],
    memory: NDArray[np.uint8],
    arrived: Sequence[Arrived],
) -> NDArray[np.int64]:
    """Copy pieces of a file that have just come and still are in memory; returns the others."""
    if not arrived:
        return pieces
    firsts, left = np.array([one.first for one in arrived]), []
    numbers = pieces[:, SHARD] * shard_pages + pieces[:, PAGE]
    for i, page in enumerate(numbers):
        out = bytes_of(pieces[i], memory)
        while out.size and (k := int(np.searchsorted(firsts, page, "right")) - 1) >= 0:
            some = arrived[k].body[int(page - firsts[k]) * PAGE_BYTES :][: out.size]
            if not some.size:
                break
            out[: some.size] = some
            out, page = out[some.size :], page + some.size // PAGE_BYTES
        if out.size:
            left.append(i)
    return pieces[left]
