"""What a store holds, in the order of its blocks, in pieces of bounded size."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Relation, RowArray
from blockstore.store import Store, numpy_dtype, scan_blocks
from blockstore.unpack import unpack_block
from preprocess.stages.ahead import read_ahead


class StoredEdges(NamedTuple):
    """Some edges, by store id."""

    targets: NDArray[Any]  # ascending; of the dtype of sources
    sources: NDArray[Any]  # id_dtype; ascending in a column


def stored_edges(
    store: Store,
    relation: Relation,
    most: int,
    columns: tuple[int, int] | None = None,
    scan_bytes: int = 1 << 20,
) -> Iterator[StoredEdges]:
    """Edges of a relation, at most so many at a time; arrays are valid until the next step.

    columns   (first, stop)   store ids of targets; None: all

    Blocks are read about `scan_bytes` at a time; of one block its targets are held beside it.
    Raises CorruptBlock.
    """
    file, where = store.graph(relation), store.path / relation.path
    start, stop = 0, relation.num_blocks
    if columns is not None:
        firsts = store.first_node(relation)[:-1]
        start = max(0, int(np.searchsorted(firsts, columns[0], "right")) - 1)
        stop = int(np.searchsorted(firsts, columns[1], "right"))
    for first, blocks in scan_blocks(file, scan_bytes, start, stop):
        for i in range(blocks.shape[0]):
            block = unpack_block(blocks[i], f"{where}, block {first + i}")
            header, dtype = block.header, block.sources.dtype
            degrees = np.empty(header.num_nodes + 1, np.int64)
            degrees[0], degrees[1:] = header.num_carried, block.degrees_here()
            # carried edges are of the column before the first; where there are none, it is not used
            names = np.arange(header.first_node - 1, header.first_node + header.num_nodes)
            targets = np.repeat(names.astype(dtype), degrees)
            low, high = 0, targets.size
            if columns is not None:
                low, high = np.searchsorted(targets, np.array(columns, dtype)).tolist()
            for at in range(low, high, most):
                some = slice(at, min(at + most, high))
                yield StoredEdges(targets[some], block.sources[some])


def stored_rows(
    store: Store, array: RowArray, scan_bytes: int = 1 << 20, lane: tuple[int, int] = (0, 1)
) -> Iterator[NDArray[Any]]:
    """Rows of an array in order, of its numpy dtype (rows, items), about `scan_bytes` at a time.

    lane   as `scan_blocks` takes it

    Where there are gaps between blocks, rows are a copy.  Valid until the next step.  Raises
    CorruptBlock.
    """
    file, dtype = store.rows(array), numpy_dtype(array.dtype)
    per_block = file.geometry.rows_per_block
    for first, blocks in scan_blocks(file, scan_bytes, lane=lane):
        raw = blocks[:, : file.geometry.chunk_bytes].view(dtype)
        rows = raw.reshape(blocks.shape[0] * per_block, array.row_items)
        yield rows[: array.num_rows - first * per_block]


def rows_ahead(
    store: Store,
    array: RowArray,
    scan_bytes: int,
    lanes: int,
    change: Callable[[NDArray[Any]], NDArray[Any]],
) -> Generator[NDArray[Any]]:
    """The same, read, verified and changed by `lanes` threads ahead of who uses them."""

    def changed(lane: int) -> Iterator[NDArray[Any]]:
        return (change(rows) for rows in stored_rows(store, array, scan_bytes, (lane, lanes)))

    with ExitStack() as held:
        ahead = [held.enter_context(closing(read_ahead(changed(lane)))) for lane in range(lanes)]
        for pieces in cycle(ahead):
            piece = next(pieces, None)
            if piece is None:
                return
            yield piece
