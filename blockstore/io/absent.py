"""Pages of a part of a store that are not in it: their rows come from another server.

A reader divides the pages that it is asked for by the server that has their blocks.  A server is
asked for rows: those that the caller names, or all that lie in the pages, which are then the pages
of the whole store, and their checksums fit.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.elsewhere import RemoteRows
from blockstore.kernels.crc import find_bad_page
from blockstore.kernels.reads import KEEPER, PAGE, PAGES, PLACE, SHARD, split_by_keeper
from blockstore.kernels.rows import RowLayout, list_rows, move_rows, row_layout
from blockstore.part import Holes
from blockstore.store import BlockedFile, corrupt_page

_NO_ROWS = np.empty(0, np.int64)


def tasks_away(
    runs: NDArray[np.int64], first: NDArray[np.int64], geometry: BlockGeometry, holes: Holes | None
) -> list[bool]:
    """Whether each task, runs [first[i], first[i + 1]), has pages that other servers have."""
    if holes is None:
        return [False] * (first.size - 1)
    low = runs[:, SHARD] * geometry.blocks_per_shard
    high = low + (runs[:, PAGE] + runs[:, PAGES] - 1) // geometry.pages_per_block
    low = low + runs[:, PAGE] // geometry.pages_per_block
    away = np.zeros(len(runs), np.bool_)
    for step in range(int((high - low).max(initial=-1)) + 1):  # blocks of the longest run
        away |= holes.keepers[np.minimum(low + step, high)] != holes.server
    found: list[bool] = np.logical_or.reduceat(away, first[:-1]).tolist()
    return found


def split_pieces(
    pieces: NDArray[np.int64], geometry: BlockGeometry, holes: Holes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces that are here, and those that others have, each cut where another server begins.

    The latter are int64 (n, 5), with the server as `KEEPER`.
    """
    maximum = int((pieces[:, PAGES] // geometry.pages_per_block).sum()) + 2 * len(pieces)
    here, away = np.empty((maximum, PLACE + 1), np.int64), np.empty((maximum, KEEPER + 1), np.int64)
    blocks = geometry.pages_per_block, geometry.blocks_per_shard
    num_here, num_away = split_by_keeper(pieces, blocks, holes.keepers, holes.server, here, away)
    return here[:num_here], away[:num_away]


def bring(
    source: RemoteRows,
    file: BlockedFile,
    away: NDArray[np.int64],
    memory: NDArray[np.uint8],
    rows: NDArray[Any] | None,
) -> None:
    """Fill runs of pages that others have, as `split_pieces` gives them.

    rows   ascending rows of the array that are wanted of them: nothing else of these pages is
           filled; None: all of the pages, which are verified

    Raises StoreError: rows do not come, or are not those that were written.
    """
    pieces = away[np.lexsort((away[:, PAGE], away[:, SHARD]))]
    row_bytes = file.geometry.chunk_bytes // file.geometry.rows_per_block
    layout = row_layout(file.geometry, row_bytes)
    if rows is None:
        for low, pages in pieces[:, [PLACE, PAGES]].tolist():
            memory[low : low + pages * PAGE_BYTES] = 0
    num_rows, maximum = source.num_rows(file.path), source.max_rows(file.path)
    for server in sorted(set(pieces[:, KEEPER].tolist())):
        own = pieces[pieces[:, KEEPER] == server]
        found = np.empty(
            int(own[:, PAGES].sum()) * PAGE_BYTES // row_bytes + 2 * len(own), np.int64
        )
        every, chosen = rows is None, _NO_ROWS if rows is None else rows
        found = found[: list_rows(own, layout, num_rows, every, chosen, found)]
        for at in range(0, found.size, maximum):
            asked = found[at : at + maximum]
            take = partial(_take, asked, own, layout, memory)
            source.ask(server, file.path, asked, take)
    if rows is None:
        for piece in pieces:
            _verify(file, piece, memory)


def _take(
    rows: NDArray[np.int64],
    pieces: NDArray[np.int64],
    layout: RowLayout,
    memory: NDArray[np.uint8],
    packed: NDArray[np.uint8],
) -> int:
    """Copy rows that have come to their places; returns their crc32c."""
    return int(move_rows(packed, rows, pieces, layout, memory, True))


def _verify(file: BlockedFile, piece: NDArray[np.int64], memory: NDArray[np.uint8]) -> None:
    """Compare a piece's pages, at their place in memory, with their checksums.

    Raises CorruptBlock, which names the server that sent them.
    """
    geometry, (shard, page, pages, place, server) = file.geometry, piece.tolist()
    first = shard * geometry.pages_per_shard + page
    crcs = file.crcs[first : first + pages]
    data = memory[place : place + pages * PAGE_BYTES]
    bad = int(find_bad_page(data, pages, crcs))
    if bad >= 0:
        where = f"server {server}, {file.shards[shard]}"
        at = bad * PAGE_BYTES
        raise corrupt_page(where, page * PAGE_BYTES + at, data[at:], int(crcs[bad]))
