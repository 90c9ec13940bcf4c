"""Edges as PyG holds them: pairs of ids, or the transposed adjacency matrix."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.strided import Array, Held, Placed, StridedRows
from preprocess.sources.compressed import major_ids
from preprocess.sources.pygfile import Adjacency, Other, Value

SCAN_ROWS = 1 << 18  # that are looked through at a time


def open_edges(path: Path, held: Mapping[str, Value], where: str) -> "Pairs | Transposed":
    """The edges among the values of a store.  Raises BadInput: there are none."""
    index, adjacency = held.get("edge_index"), held.get("adj_t")
    if isinstance(index, Placed | Held):
        return Pairs(StridedRows(path, index, f"{where}edge_index"))
    if isinstance(adjacency, Adjacency):
        return Transposed(path, adjacency, f"{where}adj_t")
    name, found = ("adj_t", adjacency) if adjacency is not None else ("edge_index", index)
    what = found.text if isinstance(found, Other) else "nothing" if found is None else "an array"
    raise BadInput.at(
        f"{where}{name}", what, "edge_index, a tensor (2, edges), or adj_t in CSR",
        "set it with torch_geometric.utils.to_edge_index, and save the graph again",
    )  # fmt: skip


class Pairs:
    """`edge_index`."""

    values: Array | None = None  # weights are an array of their own

    def __init__(self, index: StridedRows) -> None:
        self.where, shape = index.where, index.shape
        if len(shape) != 2 or shape[0] != 2 or index.dtype.kind not in "iu":
            raise BadInput.at(
                self.where, f"shape {shape} of {index.dtype}", "(2, edges) of integers",
                "transpose or convert it",
            )  # fmt: skip
        self.num_edges = shape[1]
        self._ends = [index.row(end) for end in (0, 1)]

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), not checked."""
        src, dst = (e.pieces(0, self.num_edges, count) for e in self._ends)
        return zip(src, dst, strict=True)

    def place(self, end: int, row: int) -> str:
        """Of one end of an edge, for messages."""
        return f"{self.where}[{end}, {row}]"

    def largest_id(self, end: int) -> int:
        """Of the sources (0) or the targets (1), -1 without edges; a pass over the edges."""
        pieces = self._ends[end].pieces(0, self.num_edges, SCAN_ROWS)
        return max((int(p.max()) for p in pieces), default=-1)


class Transposed:
    """`adj_t`: rows are targets, columns sources."""

    def __init__(self, path: Path, adjacency: Adjacency, where: str) -> None:
        self.where, self.values, self._path = where, adjacency.values, path
        sizes, indptr = adjacency.sizes, adjacency.indptr
        if len(sizes) != 2 or min(sizes) < 0:
            raise BadInput.at(where, f"sizes {sizes}", "(rows, columns)", "save edge_index instead")
        self._num_rows, self._num_columns = sizes
        self._col = self._ids("columns", adjacency.col, None)
        self.num_edges = self._col.num_rows
        self._indptr = self._row = None
        if indptr is not None:
            self._indptr = self._ids("row offsets", indptr, self._num_rows + 1)
        else:
            self._row = self._ids("rows", adjacency.row, self.num_edges)

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), not checked."""
        src = self._col.pieces(0, self.num_edges, count)
        dst: Iterator[NDArray[Any]]
        if self._indptr is not None:
            indptr = self._indptr.pieces(0, self._indptr.num_rows, SCAN_ROWS)
            dst = major_ids(indptr, self._indptr.where, self.num_edges, count)
        else:
            assert self._row is not None
            dst = self._row.pieces(0, self.num_edges, count)
        return zip(src, dst, strict=True)

    def place(self, end: int, row: int) -> str:
        """Of one end of an edge, for messages."""
        return f"{self.where}: {('columns', 'rows')[end]}[{row}]"

    def largest_id(self, end: int) -> int:
        """Sources (0) are columns, targets (1) rows, and some may have no edge."""
        return (self._num_columns, self._num_rows)[end] - 1

    def _ids(self, what: str, array: Array | None, num_rows: int | None) -> StridedRows:
        where = f"{self.where}: {what}"
        rows = StridedRows(self._path, array, where) if array is not None else None
        if (
            rows is None
            or len(rows.shape) != 1
            or rows.dtype.kind not in "iu"
            or num_rows not in (None, rows.num_rows)
        ):
            found = f"shape {rows.shape} of {rows.dtype}" if rows is not None else "no array"
            expected = f"({'entries' if num_rows is None else num_rows},) of integers"
            raise BadInput.at(where, found, expected, "save edge_index instead")
        return rows
