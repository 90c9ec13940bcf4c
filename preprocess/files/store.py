"""Read the graph and arrays of a store in block order, in pieces of bounded size."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import NodeType, Relation, RowArray
from blockstore.pack import GraphBlock, unpack_block
from blockstore.store import Store, numpy_dtype, scan_blocks
from preprocess.errors import BadInput
from preprocess.files.ahead import read_ahead
from preprocess.files.array_file import ArrayFile
from preprocess.pipeline.progress import Progress

Piece = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]

PIECE_COPIES = 6  # total memory of a scan with read-ahead, in units of `scan_bytes`


def graph_blocks(
    store: Store, relation: Relation, scan_bytes: int = 1 << 20
) -> Iterator[tuple[int, GraphBlock]]:
    """(number, block) of all graph blocks in order; reads about `scan_bytes` at a time.

    A block is valid until the next step.  Raises CorruptBlock.
    """
    for first, blocks in scan_blocks(store.graph(relation), scan_bytes):
        for number, block in enumerate(blocks, first):
            yield number, unpack_block(block, f"{store.path / relation.path}, block {number}")


def stored_blocks(
    store: Store, relation: Relation, scan_bytes: int = 1 << 20
) -> Iterator[tuple[NDArray[Any], GraphBlock]]:
    """As `graph_blocks`, with the target of each edge of a block, by store id."""
    for _, block in graph_blocks(store, relation, scan_bytes):
        header, dtype = block.header, block.sources.dtype
        degrees = np.empty(header.num_nodes + 1, np.int64)
        degrees[0], degrees[1:] = header.num_carried, block.degrees_here()
        # carried edges belong to the column before the first, which is unused if there are none
        names = np.arange(header.first_node - 1, header.first_node + header.num_nodes)
        yield np.repeat(names.astype(dtype), degrees), block


def stored_edges(
    store: Store, relation: Relation, maximum: int, scan_bytes: int = 1 << 20
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """(targets, sources) of a relation by store id, at most `maximum` edges at a time.

    Valid until the next step.  Raises CorruptBlock.
    """
    for targets, block in stored_blocks(store, relation, scan_bytes):
        for at in range(0, targets.size, maximum):
            some = slice(at, at + maximum)
            yield targets[some], block.sources[some]


def stored_rows(
    store: Store, array: RowArray, scan_bytes: int = 1 << 20, lane: tuple[int, int] = (0, 1)
) -> Iterator[NDArray[Any]]:
    """Rows of an array in order, of its numpy dtype (rows, items), about `scan_bytes` at a time.

    lane   as `scan_blocks` takes it

    If there are gaps between blocks, rows are a copy.  Valid until the next step.  Raises
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
    """As `stored_rows`, read, verified and passed through `change` ahead by `lanes` threads."""

    def changed(lane: int) -> Iterator[NDArray[Any]]:
        return (change(rows) for rows in stored_rows(store, array, scan_bytes, (lane, lanes)))

    with ExitStack() as held:
        ahead = [held.enter_context(closing(read_ahead(changed(lane)))) for lane in range(lanes)]
        for pieces in cycle(ahead):
            piece = next(pieces, None)
            if piece is None:
                return
            yield piece


def to_floats(
    rows: NDArray[Any], array: RowArray, scale: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Stored rows, (rows, items), as float32; `scale`: that of an int8 array, if it has one."""
    if array.dtype == "bfloat16":
        bits = rows.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    with np.errstate(over="ignore"):
        floats: NDArray[np.float32] = rows.astype(np.float32, copy=False)
    if scale is not None:
        floats *= scale
    return floats


def floats_ahead(
    store: Store, array: RowArray, scan_bytes: int, lanes: int
) -> Generator[NDArray[np.float32]]:
    """`rows_ahead` in float32, (rows, items)."""
    scale = store.scale(array) if array.scale_path else None
    return rows_ahead(
        store, array, scan_bytes, lanes,
        lambda rows: to_floats(rows.reshape(-1, array.row_items), array, scale),
    )  # fmt: skip


def choose_feature(nodes: NodeType, name: str, where: str) -> str:
    """The name of a feature of a type; "" means "x", or its only one.  Raises BadInput."""
    held = nodes.features
    if not name:
        name = "x" if "x" in held else next(iter(held)) if len(held) == 1 else ""
    if name not in held or held[name].row_items == 0:
        found = f"feature {name!r}" if name else f"{len(held)} features and no name"
        expected = f"one of {', '.join(held)} of {nodes.name}"
        raise BadInput.at(f"{where}: --feature", found, expected, "choose one")
    return name


def result_dtype(feature: RowArray, asked: str | None) -> str:
    """Dtype to store sums of rows in: `asked`, or that of a float or scaled array, or float32."""
    kept = feature.dtype in ("float32", "float16", "bfloat16") or feature.scale_path
    return asked or (feature.dtype if kept else "float32")


@dataclass(frozen=True, slots=True)
class SlicedPlan:
    """Work on the columns of an array slice by slice, with all rows of one slice at a time."""

    width: int  # columns of a slice in memory; the last slice is padded with zeros
    num_slices: int

    def columns(self, number: int, num_columns: int) -> int:
        """Number of columns of a slice without the padding."""
        return min(self.width, num_columns - number * self.width)


def cut_columns(
    store: Store,
    array: RowArray,
    files: list[Path],
    width: int,
    scan_bytes: int,
    progress: Progress,
    check: Callable[[NDArray[np.float32], int], None] | None = None,
) -> None:
    """Read the rows once and write them as float32, `width` columns to each file.

    Rows of the last file are padded with zeros.

    check   is called with some rows and the number of the first of them
    """
    done, total = 0, array.num_rows * array.row_bytes
    for path in files:
        path.unlink(missing_ok=True)
        path.touch()
    with (
        progress.stage("cut columns", total, "B") as stage,
        closing(floats_ahead(store, array, scan_bytes, 2)) as pieces,
    ):
        for rows in pieces:
            if check is not None:
                check(rows, done)
            for number, path in enumerate(files):
                some = rows[:, number * width : (number + 1) * width]
                part = np.zeros((rows.shape[0], width), np.float32)
                part[:, : some.shape[1]] = some
                with ArrayFile(path, np.float32) as file:
                    file.append(part)
            done += rows.shape[0]
            stage.advance(rows.shape[0] * array.row_bytes)


def joined_columns(
    parts: list[tuple[Path, int]], dtype: Any, first: int, num_rows: int, step: int
) -> Iterator[NDArray[Any]]:
    """Join files that hold some columns of each row into rows, at most `step` at a time.

    parts   (file, number of its columns), from left to right
    first   the first row that is taken
    """
    width = sum(count for _, count in parts)
    with ExitStack() as held:
        files = [(held.enter_context(ArrayFile(path, dtype)), columns) for path, columns in parts]
        for row in range(first, first + num_rows, step):
            count, at = min(step, first + num_rows - row), 0
            out = np.empty((count, width), dtype)
            for file, columns in files:
                piece = file.read(row * columns, count * columns)
                out[:, at : at + columns] = piece.reshape(count, columns)
                at += columns
            yield out


def stored_columns(
    store: Store,
    relation: Relation,
    scan_bytes: int,
    columns: tuple[int, int] | None = None,
    records: bool = False,
) -> Iterator[Piece]:
    """(head, degrees, edges) of consecutive columns of a relation; valid until the next step.

    head      int64 (2,)           the first column, and the number of its edges in earlier pieces
    degrees   int64 (columns,)     edges of each column that are in this piece
    edges     id_dtype (edges,)    sources; with `records`: uint32 (edges, words), all data of an
                                   edge in its block, section by section

    columns   [first, stop) to read; their blocks may also yield neighboring columns

    Raises CorruptBlock.
    """
    file = store.graph(relation)
    start, stop = 0, file.geometry.num_blocks
    if columns is not None:
        first_node = store.first_node(relation)
        start = max(0, int(np.searchsorted(first_node[:-1], columns[0], "right")) - 1)
        stop = int(np.searchsorted(first_node[:-1], columns[1], "left"))
    skipped = 0  # edges so far of the column that continues in the next piece
    for number, blocks in scan_blocks(file, scan_bytes, start, stop):
        opened = [
            unpack_block(blocks[i], f"{store.path / file.path}, block {number + i}")
            for i in range(blocks.shape[0])
        ]
        head, degrees = _merge(opened)
        head[1] = skipped if opened[0].header.num_carried else 0
        skipped = int(degrees[-1]) if degrees.size else 0
        skipped += int(head[1]) if degrees.size == 1 else 0
        edges = [block.edge_words() if records else block.sources for block in opened]
        yield head, degrees, np.concatenate(edges) if len(edges) > 1 else edges[0]


def scan_size(share: int, block_bytes: int) -> int:
    """Bytes of blocks to read at a time: at least a block, else `PIECE_COPIES` fit in `share`."""
    return max(block_bytes, min(4 << 20, share // (2 * PIECE_COPIES)))


def _merge(blocks: list[GraphBlock]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(head, degrees) of consecutive blocks; a column in several of them counts as one."""
    carried = blocks[0].header.num_carried
    first = blocks[0].header.first_node - bool(carried)
    parts = [np.array([carried] if carried else [], np.int64)]
    for i, block in enumerate(blocks):
        if i and block.header.num_carried:
            last = next(part for part in reversed(parts) if part.size)
            last[-1] += block.header.num_carried
        parts.append(block.degrees_here())
    return np.array([first, 0], np.int64), np.concatenate(parts)
