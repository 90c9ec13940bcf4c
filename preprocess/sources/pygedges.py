"""Edges as PyG holds them: pairs of ids, or the transposed adjacency matrix."""

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.sources.compressed import major_ids
from preprocess.torchfile import Record, TensorRows, is_tensor

SCAN_ROWS = 1 << 18  # that are looked through at a time


def open_edges(held: dict[str, Any], where: str) -> "Pairs | Transposed":
    """The edges among the arrays of a store.  Raises BadInput: there are none."""
    index, adjacency = held.get("edge_index"), held.get("adj_t")
    if is_tensor(index):
        return Pairs(index, f"{where}edge_index")
    is_csr = str(getattr(adjacency, "layout", "")) == "torch.sparse_csr"
    if isinstance(adjacency, Record) or is_csr:
        return Transposed(adjacency, f"{where}adj_t")
    name, found = ("adj_t", adjacency) if adjacency is not None else ("edge_index", index)
    what = "nothing" if found is None else str(getattr(found, "layout", type(found).__name__))
    raise BadInput.at(
        f"{where}{name}", what, "edge_index, a tensor (2, edges), or adj_t in CSR",
        "set it with torch_geometric.utils.to_edge_index, and save the graph again",
    )  # fmt: skip


class Pairs:
    """`edge_index`."""

    values = None  # weights are an array of their own

    def __init__(self, tensor: Any, where: str) -> None:
        self.where = where
        shape = tuple(tensor.shape)
        kind = TensorRows(tensor, where).dtype.kind
        if len(shape) != 2 or shape[0] != 2 or kind not in "iu":
            raise BadInput.at(
                where, f"shape {shape} of {tensor.dtype}", "(2, edges) of integers",
                "transpose or convert it",
            )  # fmt: skip
        self.num_edges = int(shape[1])
        self._ends = [TensorRows(tensor[end], where) for end in (0, 1)]

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

    def __init__(self, adjacency: Any, where: str) -> None:
        self.where = where
        if isinstance(adjacency, Record):
            storage = adjacency.attributes.get("storage")
            parts = storage.attributes if isinstance(storage, Record) else {}
            indptr, row = parts.get("_rowptr"), parts.get("_row")
            col, values = parts.get("_col"), parts.get("_value")
            sizes = parts.get("_sparse_sizes")
        else:
            indptr, row, col = adjacency.crow_indices(), None, adjacency.col_indices()
            values, sizes = adjacency.values(), tuple(adjacency.shape)
        self.values = values if is_tensor(values) else None
        self._sizes = self._checked_sizes(sizes)
        self._col = self._ids("columns", col, None)
        self.num_edges = self._col.num_rows
        by_offset = indptr is not None
        self._indptr = self._ids("row offsets", indptr, self._sizes[0] + 1) if by_offset else None
        self._row = None if by_offset else self._ids("rows", row, self.num_edges)

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
        return self._sizes[1 - end] - 1

    def _checked_sizes(self, sizes: Any) -> tuple[int, int]:
        if not (
            isinstance(sizes, tuple)
            and len(sizes) == 2
            and all(isinstance(n, int) and n >= 0 for n in sizes)
        ):
            raise BadInput.at(self.where, f"sizes {sizes}", "(rows, columns)", "save edge_index")
        return sizes[0], sizes[1]

    def _ids(self, what: str, values: Any, num_rows: int | None) -> TensorRows:
        where = f"{self.where}: {what}"
        array = TensorRows(values, where) if is_tensor(values) else None
        if (
            array is None
            or len(array.shape) != 1
            or array.dtype.kind not in "iu"
            or num_rows not in (None, array.num_rows)
        ):
            found = f"shape {array.shape} of {array.dtype}" if array else type(values).__name__
            expected = f"({'entries' if num_rows is None else num_rows},) of integers"
            raise BadInput.at(where, found, expected, "save edge_index instead")
        return array
