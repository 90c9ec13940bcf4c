"""Pages of a part of a store that are not in it: their rows come from another server.

A reader divides the pages that it is asked for by who has their blocks.  What is asked of a server
are rows: those that the caller names, or all that lie in the pages; the latter are then the pages
of the whole store, and their checksums fit.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.elsewhere import RemoteRows
from blockstore.kernels.crc import find_bad_page
from blockstore.kernels.reads import PAGE, PAGES, PLACE, SHARD
from blockstore.kernels.rows import place_rows
from blockstore.part import Holes
from blockstore.store import BlockedFile, corrupt_page


class Away(NamedTuple):
    """Runs of pages whose blocks others have."""

    pieces: NDArray[np.int64]  # (n, 4) as `read_pieces` takes them
    keepers: NDArray[np.uint16]  # (n,)


class _Entries(NamedTuple):
    """Rows and the runs of pages that they go to, by ascending rows."""

    rows: NDArray[np.int64]
    piece: NDArray[np.int64]  # number of the run of each
    starts: NDArray[np.int64]  # byte of memory where each begins


def tasks_away(
    runs: NDArray[np.int64], first: NDArray[np.int64], geometry: BlockGeometry, holes: Holes | None
) -> list[bool]:
    """Whether tasks, runs [first[i], first[i + 1]), have pages that others have."""
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
) -> tuple[NDArray[np.int64], Away]:
    """Pieces that are here, and those that others have, each cut where another server begins."""
    per_block = geometry.pages_per_block
    first = pieces[:, PAGE] // per_block
    counts = (pieces[:, PAGE] + pieces[:, PAGES] - 1) // per_block - first + 1
    which = np.repeat(np.arange(len(pieces)), counts)
    block = first[which] + np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
    keepers = holes.keepers[pieces[which, SHARD] * geometry.blocks_per_shard + block]
    new = np.ones(which.size, np.bool_)
    new[1:] = (which[1:] != which[:-1]) | (keepers[1:] != keepers[:-1])
    begins = np.flatnonzero(new)
    ends = np.append(begins[1:], which.size)[: begins.size] - 1
    own = pieces[which[begins]]
    low = np.maximum(own[:, PAGE], block[begins] * per_block)
    high = np.minimum(own[:, PAGE] + own[:, PAGES], (block[ends] + 1) * per_block)
    cut = own.copy()
    cut[:, PAGE], cut[:, PAGES] = low, high - low
    cut[:, PLACE] += (low - own[:, PAGE]) * PAGE_BYTES
    away = keepers[begins] != holes.server
    return cut[~away], Away(cut[away], keepers[begins][away])


def bring(
    source: RemoteRows,
    file: BlockedFile,
    away: Away,
    memory: NDArray[np.uint8],
    rows: NDArray[Any] | None,
) -> None:
    """Fill runs of pages that others have.

    rows   ascending rows of the array that are wanted of them: nothing else of these pages is
           filled; None: all of the pages, which are verified

    Raises StoreError: rows do not come, or are not those that were written.
    """
    order = np.lexsort((away.pieces[:, PAGE], away.pieces[:, SHARD]))
    pieces, keepers = away.pieces[order], away.keepers[order]
    row_bytes = file.geometry.chunk_bytes // file.geometry.rows_per_block
    lows = pieces[:, PLACE]
    highs = lows + pieces[:, PAGES] * PAGE_BYTES
    if rows is None:
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
            memory[low:high] = 0
        entries = _all_rows(file.geometry, pieces, row_bytes, source.num_rows(file.path))
    else:
        entries = _given_rows(file.geometry, pieces, row_bytes, rows)
    most = source.most_rows(file.path)
    for server in np.unique(keepers).tolist():
        chosen = keepers[entries.piece] == server
        found, piece, starts = (values[chosen] for values in entries)
        new = np.ones(found.size, np.bool_)  # a row on the edge of two pieces comes twice
        new[1:] = found[1:] != found[:-1]
        ids = found[new]
        for at in range(0, ids.size, most):
            asked = ids[at : at + most]
            low, high = np.searchsorted(found, [asked[0], asked[-1] + 1]).tolist()
            which = np.searchsorted(asked, found[low:high])
            to = piece[low:high]
            answer = source.ask(server, file.path, asked)
            place_rows(answer, which, starts[low:high], lows[to], highs[to], row_bytes, memory)
    if rows is None:
        for piece, server in zip(pieces, keepers.tolist(), strict=True):
            _verify(file, piece, server, memory)


def _all_rows(
    geometry: BlockGeometry, pieces: NDArray[np.int64], row_bytes: int, num_rows: int
) -> _Entries:
    """Every row that has a byte in some pieces; one on the edge of two pieces comes twice."""
    per_block, shard = geometry.rows_per_block, pieces[:, SHARD] * geometry.blocks_per_shard
    low = pieces[:, PAGE] * PAGE_BYTES
    last = low + pieces[:, PAGES] * PAGE_BYTES - 1
    first_row = np.minimum(low % geometry.slot_bytes // row_bytes, per_block)
    first_row += (shard + low // geometry.slot_bytes) * per_block
    stop_row = np.minimum(last % geometry.slot_bytes // row_bytes, per_block - 1) + 1
    stop_row += (shard + last // geometry.slot_bytes) * per_block
    counts = np.maximum(np.minimum(stop_row, num_rows) - first_row, 0)
    piece = np.repeat(np.arange(len(pieces)), counts)
    rows = first_row[piece] + np.arange(piece.size)
    rows -= np.repeat(np.cumsum(counts) - counts, counts)
    return _Entries(rows, piece, _starts(geometry, pieces, row_bytes, rows, piece))


def _given_rows(
    geometry: BlockGeometry, pieces: NDArray[np.int64], row_bytes: int, rows: NDArray[Any]
) -> _Entries:
    """Those of some rows that lie in pieces, which ascend."""
    size = geometry.blocks_per_shard * geometry.slot_bytes
    low = pieces[:, SHARD] * size + pieces[:, PAGE] * PAGE_BYTES
    high = low + pieces[:, PAGES] * PAGE_BYTES
    # of all rows of a request only those of the blocks between the first piece and the last
    ends = np.array([low[0], high[-1] - 1]) // geometry.slot_bytes + [0, 1]
    ends = np.minimum(ends * geometry.rows_per_block, np.iinfo(rows.dtype).max)
    first, stop = np.searchsorted(rows, ends.astype(rows.dtype))
    wanted = rows[first:stop].astype(np.int64)
    at = _byte_of(geometry, row_bytes, wanted)
    piece = np.searchsorted(low, at, "right") - 1
    inside = (piece >= 0) & (at + row_bytes <= high[piece])
    wanted, piece = wanted[inside], piece[inside]
    return _Entries(wanted, piece, _starts(geometry, pieces, row_bytes, wanted, piece))


def _byte_of(geometry: BlockGeometry, row_bytes: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where rows begin, counted over the blocks of all shards."""
    block, inside = np.divmod(rows, geometry.rows_per_block)
    found: NDArray[np.int64] = block * geometry.slot_bytes + inside * row_bytes
    return found


def _starts(
    geometry: BlockGeometry,
    pieces: NDArray[np.int64],
    row_bytes: int,
    rows: NDArray[np.int64],
    piece: NDArray[np.int64],
) -> NDArray[np.int64]:
    size = geometry.blocks_per_shard * geometry.slot_bytes
    base = pieces[:, PLACE] - pieces[:, SHARD] * size - pieces[:, PAGE] * PAGE_BYTES
    return _byte_of(geometry, row_bytes, rows) + base[piece]


def _verify(
    file: BlockedFile, piece: NDArray[np.int64], server: int, memory: NDArray[np.uint8]
) -> None:
    """Compare a piece's pages, at their place in memory, with their checksums.

    Raises CorruptBlock, which names the server that sent them.
    """
    geometry, (shard, page, pages, place) = file.geometry, piece.tolist()
    first = shard * geometry.pages_per_shard + page
    crcs = file.crcs[first : first + pages]
    data = memory[place : place + pages * PAGE_BYTES]
    bad = int(find_bad_page(data, pages, crcs))
    if bad >= 0:
        where = f"server {server}, {file.shards[shard]}"
        at = bad * PAGE_BYTES
        raise corrupt_page(where, page * PAGE_BYTES + at, data[at:], int(crcs[bad]))
