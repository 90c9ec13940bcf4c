"""Labels: what they are, which nodes have one, and seeded splits of those nodes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.random import make_key, permute_range
from preprocess.errors import BadInput
from preprocess.sources.source import Source, SourceRows
from preprocess.stages.rows import source_chunk

_EXACT = 2.0**53  # whole numbers up to here are floats, each of its own
_STEP = 1 << 16  # nodes, a multiple of 8
_PURPOSE = 0x5370_6C69  # of the key: no other draw has it


def label_dtype(rows: SourceRows, whole: bool) -> str:
    if rows.dtype.kind == "f":
        return "int64" if whole else "float32"
    return "uint8" if rows.dtype.kind == "b" else rows.dtype.name


def are_whole(source: Source, rows: SourceRows, share: int) -> bool:
    """Whether float labels are classes: whole numbers, and NaN where there is none."""
    for piece in source.rows(rows, source_chunk(rows, share)):
        values = piece[~np.isnan(piece)].astype(np.float64)
        if not ((np.abs(values) < _EXACT) & (values == np.floor(values))).all():
            return False
    return True


def label_pieces(
    source: Source, rows: SourceRows, dtype: str, share: int
) -> Iterator[NDArray[Any]]:
    """Labels in the source's order, as stored: of classes, -1 for NaN.

    Raises BadInput: a number that float32 cannot hold.
    """
    done = 0
    for piece in source.rows(rows, source_chunk(rows, share)):
        if piece.dtype.kind == "f" and dtype == "int64":
            yield np.where(np.isnan(piece), -1.0, piece).astype(np.int64)
        else:
            with np.errstate(over="ignore"):
                out = piece.astype(np.dtype(dtype), copy=False)
            if out.dtype.kind == "f" and (np.isinf(out) & np.isfinite(piece)).any():
                bad = np.argwhere(np.isinf(out) & np.isfinite(piece))[0]
                raise BadInput.at(
                    f"{rows.where}[{done + bad[0]}]", f"label {piece[tuple(bad)]:g}",
                    "less than 3.4e38 for float32", "scale the labels",
                )  # fmt: skip
            yield out
        done += piece.shape[0]


def have_labels(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each node has a label, or one of its row of labels: other than -1 and NaN."""
    known = ~np.isnan(rows) if rows.dtype.kind == "f" else rows != -1
    found: NDArray[np.bool_] = known.reshape(rows.shape[0], -1).any(axis=1)
    return found


def labelled_bits(source: Source, rows: SourceRows, dtype: str, share: int) -> NDArray[np.uint8]:
    """A bit a node, packed: it has a label; a byte a node while they are looked at."""
    flags, done = np.zeros(rows.num_rows, np.bool_), 0
    for piece in label_pieces(source, rows, dtype, share):
        flags[done : done + piece.shape[0]] = have_labels(piece)
        done += piece.shape[0]
    return np.packbits(flags)


def seeded_ids(
    bits: NDArray[np.uint8], num_nodes: int, total: int, places: tuple[int, int], key: int
) -> Iterator[NDArray[np.int64]]:
    """Ids of a split, ascending: those labelled nodes whose places in a keyed permutation of all
    `total` are in `places`, (first, stop).
    """
    low, high = places
    before = 0  # labelled nodes
    for first in range(0, num_nodes, _STEP):
        flags = np.unpackbits(bits[first // 8 : (first + _STEP) // 8])[: num_nodes - first]
        ids = first + np.flatnonzero(flags)
        order = np.empty(ids.size, np.int64)
        permute_range(before, before + ids.size, total, np.uint64(key), order)
        yield ids[(low <= order) & (order < high)]
        before += ids.size


def split_key(seed: int, type_number: int) -> int:
    """Of the split of one type."""
    return make_key(seed, _PURPOSE, type_number, 0, 0)
