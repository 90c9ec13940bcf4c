"""What both plain layouts hold: arrays in npy files, dense or sparse, of nodes and of edges."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES
from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.kernels.edges import first_outside
from preprocess.kernels.rows import densify
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.plain_names import CSR, CSR_PARTS, MAIN, Ends, PlainNames
from preprocess.sources.typed import ArrayRows, EdgeArray, RowReader, TypedArrays


class _Csr(msgspec.Struct):
    shape: tuple[int, int]
    nnz: int | None = None


class PlainArrays(TypedArrays):
    """`TypedArrays` in npy files of one folder, with arrays and splits of edges.  Raises BadInput.

    A type's number of nodes is checked by whoever knows it: `check_counts`.
    """

    def __init__(self, folder: Path, names: PlainNames, needs: str) -> None:
        """`needs`: a file that must be there, for messages."""
        if not folder.is_dir():
            what = "a file, not a folder" if folder.exists() else "nothing, not a folder"
            raise BadInput.at(folder, what, f"a folder with {needs}", "is the path right?")
        self._folder, self._names = folder, names
        self._counts: dict[str, int] = {}
        super().__init__(folder, self._counts)
        self._edge_rows: dict[SourceRelation, list[SourceRows]] = {}
        self._edge_splits: dict[SourceRelation, list[SourceRows]] = {}

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """In the order in which they were added."""
        return self._edge_rows.get(relation, [])

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """In the order in which they were added."""
        return self._edge_splits.get(relation, [])

    def stems(self) -> list[str]:
        """Names of the npy files, without the suffix, in order."""
        return sorted(p.stem for p in self._folder.iterdir() if p.suffix == ".npy")

    def open_edges(self, ends: Ends) -> SourceRelation:
        self.add_edges(ends, EdgeArray(NpyFile(self._path(self._names.edges(ends)))))
        return self.relations[-1]

    def open_features(self, node_type: str, name: str, stem: str) -> None:
        """Add an array of a type; the main one has a row of numbers for each node."""
        file = self._npy(stem)
        if name == MAIN and len(file.shape) != 2:
            raise BadInput.at(
                f"{file.path}: header", f"shape {file.shape}", "(nodes, features)", "reshape it"
            )
        self.add_feature(node_type, name, ArrayRows(file, file.shape[0] if file.shape else 0))

    def open_csr(self, node_type: str, name: str, shape: tuple[int, int] | None = None) -> None:
        """Add a sparse array of a type; its shape is in a file of its own where it is not given."""
        meta = self._folder / f"{self._names.csr(node_type, name, CSR)}.json"
        csr = _Csr(shape) if shape is not None and not meta.exists() else _read_shape(meta)
        if meta.exists():
            self.files.append(meta)
        files = {p: self._npy(self._names.csr(node_type, name, p)) for p in CSR_PARTS}
        self.add_feature(node_type, name, CsrRows(files, csr.shape, csr.nnz, meta))

    def open_label(self, node_type: str, stem: str, first: int = 0, count: int = -1) -> None:
        """Add the labels of a type: all rows of a file, or `count` rows from `first` on."""
        file = self._npy(stem)
        self.add_label(node_type, LabelRows(file, first, count))

    def open_split(self, node_type: str, name: str, stem: str, first: int = 0) -> None:
        """Add a split of a type; `first`: id of the type's first node in it."""
        file = self._npy(stem)
        ids: RowReader = IdRows(file, False)
        if first:
            ids = ShiftedIds(file, first, self._counts[node_type])
        self.add_split(node_type, name, ids)

    def open_edge_rows(self, relation: SourceRelation, name: str, stem: str) -> None:
        """Add an array of a relation."""
        file = self._npy(stem)
        if file.shape[:1] != (relation.num_edges,):
            raise BadInput.at(
                f"{file.path}: header", f"shape {file.shape}",
                f"{relation.num_edges} rows, one an edge of {Path(relation.where).name}",
                "is it of this graph?",
            )  # fmt: skip
        rows = self._added(name, ArrayRows(file, relation.num_edges))
        self._edge_rows.setdefault(relation, []).append(rows)

    def open_edge_split(self, relation: SourceRelation, name: str, stem: str) -> None:
        """Add a split of a relation."""
        rows = self._added(name, IdRows(self._npy(stem), True))
        self._edge_splits.setdefault(relation, []).append(rows)

    def node_arrays(self, node_type: str) -> list[SourceRows]:
        """Features and labels of a type."""
        label = self.label(node_type)
        return [*([label] if label else []), *self.features(node_type)]

    def check_counts(self, node_type: str, num_nodes: int, says: str) -> None:
        """Every array of a type has `num_nodes` rows, as the file `says`."""
        for rows in self.node_arrays(node_type):
            if rows.num_rows != num_nodes:
                raise BadInput.at(
                    f"{rows.where}: header", f"{rows.num_rows} rows", f"{num_nodes}, one a node",
                    f"{says} has {num_nodes}",
                )  # fmt: skip

    def _path(self, stem: str) -> Path:
        return self._folder / f"{stem}.npy"

    def _npy(self, stem: str) -> NpyFile:
        self.files.append(self._path(stem))
        return NpyFile(self.files[-1])


class CsrRows:
    """A sparse array in CSR form, given as dense rows.  Raises BadInput."""

    def __init__(
        self, files: dict[str, NpyFile], shape: tuple[int, int], nnz: int | None, meta: Path
    ) -> None:
        """`meta`: what says the shape."""
        rows, width = shape
        self._indptr, self._indices, self._data = (files[p] for p in CSR_PARTS)
        nnz = self._indices.size if nnz is None else nnz
        for part, size in zip(CSR_PARTS, (rows + 1, nnz, nnz), strict=True):
            file = files[part]
            kinds = "biuf" if part == "data" else "iu"
            if file.shape != (size,) or file.dtype.kind not in kinds or rows < 0 or width < 1:
                raise BadInput.at(
                    f"{file.path}: header", f"shape {file.shape} of {file.dtype}",
                    f"({size},) of {'numbers' if part == 'data' else 'integers'}",
                    f"it must agree with {meta.name}",
                )  # fmt: skip
        where = str(self._indptr.path)
        self._form = SourceRows("", self._data.dtype, (width,), rows, "csr", where)

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""
        return self._form._replace(name=name)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        num_rows, width = self._form.num_rows, self._form.row_shape[0]
        out = np.empty((min(count, num_rows), width), self._form.dtype)
        for first in range(0, num_rows, count):
            dense = out[: min(count, num_rows - first)]
            indptr = self._indptr.read(first, dense.shape[0] + 1).astype(np.int64)
            start, size = int(indptr[0]), int(indptr[-1] - indptr[0])
            if (np.diff(indptr) < 0).any() or start < 0 or start + size > self._data.size:
                raise BadInput.at(
                    f"{self._indptr.path}[{first}]", "offsets that do not ascend",
                    f"0 to {self._data.size} in order", "write the matrix again",
                )  # fmt: skip
            columns = self._indices.read(start, size)
            bad = int(first_outside(columns, width))
            if bad >= 0:
                raise BadInput.at(
                    f"{self._indices.path}[{start + bad}]", f"column {columns[bad]}",
                    f"0 to {width - 1}", "write the matrix again",
                )  # fmt: skip
            values = self._data.read(start, size)
            item = dense.dtype.itemsize  # float16 is no type of numba: bits are moved
            densify(indptr, columns, values.view(f"u{item}"), dense.view(f"u{item}"))
            yield dense


class LabelRows:
    """Labels, a number or a row of numbers for each node.  Raises BadInput."""

    def __init__(self, file: NpyFile, first: int, count: int) -> None:
        """Rows [first, first + count); all where `count` is -1."""
        if len(file.shape) not in (1, 2) or 0 in file.shape[1:] or file.fortran_order:
            order = " in Fortran order" if file.fortran_order else ""
            raise BadInput.at(
                f"{file.path}: header", f"shape {file.shape}{order}",
                "(nodes,) or (nodes, labels) in C order", "save it again",
            )  # fmt: skip
        if file.dtype.name not in ITEM_BYTES:
            raise BadInput.at(
                f"{file.path}: header", f"items of {file.dtype}",
                f"one of {', '.join(ITEM_BYTES)}", "convert them",
            )  # fmt: skip
        self._file, self._first = file, first
        self._count = file.shape[0] if count < 0 else count

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""
        file = self._file
        return SourceRows(name, file.dtype, file.shape[1:], self._count, "dense", file.where)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        row_shape = self._file.shape[1:]
        width = int(np.prod(row_shape, dtype=np.int64))
        first, stop = self._first * width, (self._first + self._count) * width
        for piece in self._file.pieces(first, stop, count * width):
            yield piece.reshape(-1, *row_shape)


class IdRows:
    """A split: a list of ids, or, of edges, pairs of them too.  Raises BadInput."""

    def __init__(self, file: NpyFile, pairs: bool) -> None:
        shapes = ((), (2,)) if pairs else ((),)
        if not file.shape or file.shape[1:] not in shapes or file.dtype.kind not in "iu":
            wanted = "(n,) or (n, 2) of integers" if pairs else "(n,) of integers"
            remedy = "positions of edges, or pairs (source, target)" if pairs else (
                "save the ids of the nodes as a list"
            )  # fmt: skip
            raise BadInput.at(
                f"{file.path}: header", f"shape {file.shape} of {file.dtype}", wanted, remedy
            )
        self._array = ArrayRows(file, file.shape[0])
        self.pieces = self._array.pieces

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""
        return self._array.rows(name)


class ShiftedIds:
    """A split whose ids count through all types.  Raises BadInput."""

    def __init__(self, file: NpyFile, first: int, num_nodes: int) -> None:
        """`first`: of these, that of the type's first node; it has `num_nodes`."""
        self._ids, self._first, self._num_nodes = IdRows(file, False), first, num_nodes

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""
        return self._ids.rows(name)._replace(dtype=np.dtype(np.int64))

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Ids that count from the type's first node."""
        done = 0
        for piece in self._ids.pieces(count):
            ids = piece.astype(np.int64) - self._first
            bad = int(first_outside(ids, self._num_nodes))
            if bad >= 0:
                raise BadInput.at(
                    f"{self._ids.rows('').where}[{done + bad}]", f"node id {piece[bad]}",
                    f"{self._first} to {self._first + self._num_nodes - 1}",
                    "ids count through the types: correct the split",
                )  # fmt: skip
            yield ids
            done += ids.size


def _read_shape(path: Path) -> _Csr:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Csr)
    except FileNotFoundError as error:
        raise BadInput.at(path, "no file: it is missing", "the shape", "add it") from error
    except msgspec.MsgspecError as error:
        raise BadInput.at(
            path, error, '{"shape": [rows, columns], "nnz": n}', "correct it"
        ) from error
