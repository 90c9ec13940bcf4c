"""The layout of a sparse matrix that `scipy.sparse.save_npz` wrote: one file, CSR, CSC or COO."""

from pathlib import Path

from preprocess.errors import BadInput
from preprocess.files.npy import ZipArray, list_members, read_word
from preprocess.sources.arrays import ArrayRows, CompressedEdges, EdgeArray, EdgeLists
from preprocess.sources.source import (
    NODE,
    RELATION,
    EdgeFile,
    Ends,
    Source,
    SourceRelation,
    SourceRows,
)

_FORMATS = ("csr", "csc", "coo")
_SCAN_ITEMS = 1 << 16


def open_matrix(path: Path) -> tuple[int, EdgeFile]:
    """(nodes, edges) of a square matrix: rows are sources, columns targets.  Raises BadInput."""
    form = read_word(path, "format")
    if form not in _FORMATS:
        raise BadInput.at(
            f"{path}: format", repr(form), f"one of {', '.join(_FORMATS)}", "save matrix.tocsr()"
        )
    num_nodes, num_edges = _side(path), open_values(path).size
    if form != "coo":
        indptr = _array(path, "indptr", (num_nodes + 1,), "iu")
        indices = _array(path, "indices", (num_edges,), "iu")
        return num_nodes, CompressedEdges(indptr, indices, int(form == "csc"), f"{path}: shape")
    if "coords" in list_members(path):
        return num_nodes, EdgeArray(_array(path, "coords", (2, num_edges), "iu"))
    row, col = (_array(path, name, (num_edges,), "iu") for name in ("row", "col"))
    return num_nodes, EdgeLists(row, col, f"{path}: shape")


def open_values(path: Path) -> ZipArray:
    """The values of a matrix, one for each entry.  Raises BadInput."""
    return _array(path, "data", None, "biuf")


class ScipyNpzSource(Source):
    """A graph as a square matrix: entries are edges, values are weights unless all are 1."""

    layout = "scipy-npz"

    def __init__(self, path: Path) -> None:
        num_nodes, edges = open_matrix(path)
        super().__init__(path, {NODE: num_nodes})
        self._ends: Ends = (NODE, RELATION, NODE)
        self.check_nodes(f"{path}: shape")
        self.add_edges(self._ends, edges)
        self._values: ZipArray | None = open_values(path)

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        is_npz = path.is_file() and path.suffix == ".npz"
        return f"{path.name}, a sparse matrix" if is_npz else None

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """The values as "weight", unless all are 1; they are read once to find out."""
        values, self._values = self._values, None
        if values is not None and not all((p == 1).all() for p in values.all_pieces(_SCAN_ITEMS)):
            self.add_array(self._ends, ArrayRows("weight", values))
        return super().edge_rows(relation)


def _side(path: Path) -> int:
    """Number of rows and columns.  Raises BadInput: the matrix is not square."""
    shape = _array(path, "shape", (2,), "iu")
    rows, columns = (int(n) for n in shape.read(0, 2))
    if rows != columns or rows < 0:
        raise BadInput.at(
            shape.where, f"a matrix of {rows} x {columns}", "a square one, a row a node",
            "two types of nodes go into one square, or into a table with a schema",
        )  # fmt: skip
    return rows


def _array(path: Path, name: str, shape: tuple[int, ...] | None, kinds: str) -> ZipArray:
    array = ZipArray(path, name)
    fits = len(array.shape) == 1 if shape is None else array.shape == shape
    what = "numbers" if "f" in kinds else "integers"
    array.check(
        fits and array.dtype.kind in kinds, f"{shape or '(entries,)'} of {what}",
        "save it again with scipy.sparse.save_npz",
    )  # fmt: skip
    return array
