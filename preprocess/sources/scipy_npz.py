"""The layout of a sparse matrix that `scipy.sparse.save_npz` wrote: one file, CSR, CSC or COO."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import StoredArray, ZipArray, list_members, read_word
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.compressed import major_ids, offsets
from preprocess.sources.single import SingleSource

_FORMATS = ("csr", "csc", "coo")
_SCAN_ITEMS = 1 << 16


class NpzMatrix:
    """A square sparse matrix of an `.npz` file, read in order: rows are sources, columns targets.

    Raises BadInput.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format = read_word(path, "format")
        if self._format not in _FORMATS:
            raise BadInput.at(
                f"{path}: format", repr(self._format), f"one of {', '.join(_FORMATS)}",
                "save matrix.tocsr()",
            )  # fmt: skip
        self.num_nodes = self._side()
        self.data = self._array("data", None, "biuf")
        self.num_edges = self.data.size
        self._ends: list[tuple[StoredArray, int]] = []  # the array of each end, and its first item
        self._indptr: StoredArray | None = None
        if self._format != "coo":
            self._indptr = self._array("indptr", (self.num_nodes + 1,), "iu")
            self._indices = self._array("indices", (self.num_edges,), "iu")
        elif "coords" in list_members(path):
            coords = self._array("coords", (2, self.num_edges), "iu")
            if coords.fortran_order:
                raise BadInput.at(
                    f"{coords.where}: header", "Fortran order", "C order", "save matrix.tocsr()"
                )
            self._ends = [(coords, 0), (coords, self.num_edges)]
        else:
            self._ends = [(self._array(n, (self.num_edges,), "iu"), 0) for n in ("row", "col")]

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst) in the order of the file, `count` at a time; arrays are reused."""
        total = self.num_edges
        if self._indptr is None:
            row, col = (a.pieces(first, first + total, count) for a, first in self._ends)
            yield from zip(row, col, strict=True)
            return
        major = major_ids(offsets(self._indptr), self._indptr.where, total, count)
        for ids, others in zip(major, self._indices.pieces(0, total, count), strict=True):
            yield (ids, others) if self._format == "csr" else (others, ids)

    def place(self, end: int, row: int) -> str:
        """Of the source (0) or the target (1) of an edge, for messages."""
        if self._indptr is not None:
            return f"{self._indices.where}[{row}]"
        array, _ = self._ends[end]
        return f"{array.where}[{f'{end}, ' if len(array.shape) > 1 else ''}{row}]"

    def _side(self) -> int:
        """Of the square.  Raises BadInput: it is none."""
        shape = self._array("shape", (2,), "iu")
        rows, columns = (int(n) for n in shape.read(0, 2))
        if rows != columns or rows < 0:
            raise BadInput.at(
                shape.where, f"a matrix of {rows} x {columns}", "a square one, a row a node",
                "two types of nodes go into one square, or into a table with a schema",
            )  # fmt: skip
        return rows

    def _array(self, name: str, shape: tuple[int, ...] | None, kinds: str) -> StoredArray:
        array = ZipArray(self.path, name)
        fits = len(array.shape) == 1 if shape is None else array.shape == shape
        if not fits or array.dtype.kind not in kinds:
            what = "numbers" if "f" in kinds else "integers"
            raise BadInput.at(
                f"{array.where}: header", f"shape {array.shape} of {array.dtype}",
                f"{shape or '(entries,)'} of {what}", "save it again with scipy.sparse.save_npz",
            )  # fmt: skip
        return array


class ScipyNpzSource(SingleSource):
    """A graph as a square matrix: an entry an edge, its value the weight unless all are 1.

    Raises BadInput.
    """

    layout = "scipy-npz"

    def __init__(self, path: Path) -> None:
        self._matrix = NpzMatrix(path)
        super().__init__(
            path, [path], self._matrix.num_nodes, self._matrix.num_edges, f"{path}: shape"
        )
        self._weights: list[SourceRows] | None = None

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A file `*.npz`."""
        is_npz = path.is_file() and path.suffix == ".npz"
        return f"{path.name}, a sparse matrix" if is_npz else None

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """The values, as "weight", unless all are 1: they are looked through once."""
        data = self._matrix.data
        if self._weights is None:
            ones = all((p == 1).all() for p in data.pieces(0, data.size, _SCAN_ITEMS))
            rows = SourceRows("weight", data.dtype, (), data.size, "dense", data.where)
            self._readers[rows] = partial(data.pieces, 0, data.size)
            self._weights = [] if ones else [rows]
        return self._weights

    def _edge_pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        return self._matrix.pieces(count)

    def _place(self, end: int, row: int) -> str:
        return self._matrix.place(end, row)
