"""The layout of Ginex and AGNES: a CSC matrix, features and labels as plain items, `conf.json`.

    indptr.dat, indices.dat     integers   columns are targets, entries their sources
    features.dat, labels.dat    (nodes, features), (nodes, 1) of float32, NaN where there is none
    conf.json                   num_nodes, and <array>_shape and <array>_dtype of the four
    split_idx.pth               {"train": ids, "valid": ids, "test": ids}; it may be missing

`nc_score.pth` and other files beside them are not read.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import RawFile
from preprocess.files.torchapart import load_apart
from preprocess.source import SourceRows
from preprocess.sources.compressed import check_ends, major_ids, offsets
from preprocess.sources.single import SingleSource
from preprocess.sources.table import read_description

CONF, SPLITS = "conf.json", "split_idx.pth"


class _Conf(msgspec.Struct):
    num_nodes: int
    indptr_shape: tuple[int, ...]
    indptr_dtype: str
    indices_shape: tuple[int, ...]
    indices_dtype: str
    features_shape: tuple[int, ...]
    features_dtype: str
    labels_shape: tuple[int, ...]
    labels_dtype: str


class GinexSource(SingleSource):
    """A folder that Ginex's `prepare_dataset.py` wrote.  Raises BadInput."""

    layout = "ginex"

    def __init__(self, path: Path) -> None:
        self._folder, self._conf_path = path, path / CONF
        self._conf = read_description(self._conf_path, _Conf)
        num_nodes = self._conf.num_nodes
        self._indptr = self._open("indptr", "iu", num_nodes + 1)
        self._indices = self._open("indices", "iu", None)
        check_ends(self._indptr, self._indices.size)
        arrays = [
            self._open("features", "biuf", num_nodes),
            self._open("labels", "biuf", num_nodes),
        ]
        files = [self._conf_path, *(a.path for a in (self._indptr, self._indices, *arrays))]
        super().__init__(path, files, num_nodes, self._indices.size, str(self._conf_path))
        x, label = (self._rows_of(n, a) for n, a in zip(("x", "label"), arrays, strict=True))
        self._features, self._label = [x], label
        if (path / SPLITS).exists():
            self.files.append(path / SPLITS)
            self._splits = self._load_splits(path / SPLITS)

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `conf.json` and `indptr.dat`."""
        found = (path / CONF).is_file() and (path / "indptr.dat").is_file()
        return f"{CONF} and indptr.dat" if found else None

    def _open(self, name: str, kinds: str, rows: int | None) -> RawFile:
        """An array: of `rows` rows, or a list of any length."""
        shape: tuple[int, ...] = getattr(self._conf, f"{name}_shape")
        text: str = getattr(self._conf, f"{name}_dtype")
        try:
            dtype = np.dtype(text)
        except TypeError:
            dtype = np.dtype(object)
        if dtype.kind not in kinds:
            raise BadInput.at(
                f"{self._conf_path}: {name}_dtype", repr(text),
                "integers" if kinds == "iu" else "numbers", "correct it",
            )  # fmt: skip
        most = 1 if kinds == "iu" else 2
        fits = 1 <= len(shape) <= most and min(shape) >= 0 and 0 not in shape[1:]
        if not fits or (rows is not None and shape[0] != rows):
            expected = f"{'any length' if rows is None else rows}, of {most} dimensions at most"
            raise BadInput.at(
                f"{self._conf_path}: {name}_shape", list(shape), expected,
                f"num_nodes is {self._conf.num_nodes}",
            )  # fmt: skip
        return RawFile(self._folder / f"{name}.dat", dtype, shape)

    def _rows_of(self, name: str, file: RawFile) -> SourceRows:
        shape = file.shape[1:] if name == "x" or file.shape[1:] != (1,) else ()
        rows = SourceRows(name, file.dtype, shape, file.shape[0], "dense", file.where)
        self._readers[rows] = partial(_read_rows, file, rows)
        return rows

    def _load_splits(self, path: Path) -> list[SourceRows]:
        held = load_apart(path)
        if not isinstance(held, dict):
            raise BadInput.at(path, f"a {type(held).__name__}", "a dict of splits", "save one")
        found = []
        for name in ("train", "valid", "test"):
            ids, where = held.get(name), f"{path}: {name}"
            if ids is None:
                continue
            is_array = isinstance(ids, np.ndarray)
            if not is_array or ids.ndim != 1 or ids.dtype.kind not in "iu":
                what = f"shape {ids.shape} of {ids.dtype}" if is_array else type(ids).__name__
                raise BadInput.at(where, what, "a list of integers", "save ids of nodes")
            rows = SourceRows(name, ids.dtype, (), ids.size, "dense", where)
            self._readers[rows] = partial(_cut, ids)
            found.append(rows)
        return found

    def _edge_pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        total = self._indices.size
        dst = major_ids(offsets(self._indptr), self._indptr.where, total, count)
        yield from zip(self._indices.pieces(0, total, count), dst, strict=True)

    def _place(self, end: int, row: int) -> str:
        return f"{self._indices.where}[{row}]"


def _read_rows(file: RawFile, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
    width = int(np.prod(rows.row_shape, dtype=np.int64))
    for piece in file.pieces(0, rows.num_rows * width, count * width):
        yield piece.reshape(-1, *rows.row_shape)


def _cut(ids: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    for first in range(0, ids.size, count):
        yield ids[first : first + count]
