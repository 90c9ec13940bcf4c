"""The plain layout: a folder of npy files with fixed names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.kernels import densify, first_outside
from preprocess.npy import NpyFile
from preprocess.source import SourceRelation, SourceRows

NODE, RELATION = "node", "to"
SPLITS = ("train", "valid", "test")
FEATURES, LABEL = "node_feat", "node_label"


class _Csr(msgspec.Struct):
    shape: tuple[int, int]
    nnz: int


class PlainSource:
    """`edge_index.npy` (2, E), `node_feat.npy` or its CSR parts, `node_label.npy`, `*_idx.npy`.

    One node type "node", one relation "to".  Raises BadInput.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise BadInput(f"{folder}: not a folder, expected one with edge_index.npy in it")
        self.where, self._folder = str(folder), folder
        self._edges = self._edge_index()
        self._features = self._feature_rows()
        self._label = self._label_rows()
        count = self._count_nodes()
        self.num_nodes = {NODE: count}
        self.relations: tuple[SourceRelation, ...] = (
            SourceRelation(NODE, RELATION, NODE, self._edges.shape[1], str(self._edges.path)),
        )

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        num_nodes, done = self.num_nodes[NODE], 0
        for src, dst in self._pairs(relation.num_edges, count):
            for row, ids in enumerate((src, dst)):
                bad = int(first_outside(ids, num_nodes))
                if bad >= 0:
                    raise BadInput(
                        f"{self._edges.path}[{row}, {done + bad}]: node id {ids[bad]}, expected "
                        f"0 to {num_nodes - 1}"
                    )
            yield src, dst
            done += src.size

    def _pairs(self, total: int, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Pieces of both rows; in Fortran order they lie pair by pair."""
        if self._edges.fortran:
            for pairs in self._edges.pieces(0, 2 * total, 2 * count):
                yield pairs[0::2].copy(), pairs[1::2].copy()
        else:
            sources = self._edges.pieces(0, total, count)
            targets = self._edges.pieces(total, 2 * total, count)
            yield from zip(sources, targets, strict=True)

    def features(self, node_type: str) -> list[SourceRows]:
        """`node_feat`, as "x"."""
        return [self._features] if self._features is not None and node_type == NODE else []

    def label(self, node_type: str) -> SourceRows | None:
        """`node_label`."""
        return self._label if node_type == NODE else None

    def rows(self, node_type: str, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Dense rows in order."""
        if rows.held == "csr":
            yield from self._csr_rows(rows, count)
            return
        file = NpyFile(Path(rows.where))
        width = int(np.prod(rows.row_shape, dtype=np.int64))
        for piece in file.pieces(0, rows.num_rows * width, count * width):
            yield piece.reshape(-1, *rows.row_shape)

    def splits(self, node_type: str) -> dict[str, NDArray[np.int64]]:
        """The splits that have a file."""
        found: dict[str, NDArray[np.int64]] = {}
        owner = np.zeros(self.num_nodes[NODE], np.uint8)
        for number, name in enumerate(SPLITS, 1):
            path = self._folder / f"{name}_idx.npy"
            if not path.exists():
                continue
            file = NpyFile(path)
            if len(file.shape) != 1 or file.dtype.kind not in "iu":
                raise BadInput(
                    f"{path}: shape {file.shape} of {file.dtype}, expected (n,) of integers"
                )
            ids = file.read(0, file.size).astype(np.int64)
            bad = int(first_outside(ids, owner.size))
            if bad >= 0:
                raise BadInput(f"{path}[{bad}]: node id {ids[bad]}, expected 0 to {owner.size - 1}")
            taken = np.flatnonzero((owner[ids] != 0) & (owner[ids] != number))
            if taken.size:
                other = SPLITS[owner[ids[taken[0]]] - 1]
                raise BadInput(
                    f"{path}[{taken[0]}]: node {ids[taken[0]]} is in {other}_idx.npy too, expected "
                    "splits that do not overlap"
                )
            owner[ids] = number
            found[name] = ids
        return found

    def _edge_index(self) -> NpyFile:
        file = NpyFile(self._folder / "edge_index.npy")
        if len(file.shape) != 2 or file.shape[0] != 2:
            raise BadInput(f"{file.path}: shape {file.shape}, expected (2, edges)")
        if file.dtype.kind not in "iu":
            raise BadInput(f"{file.path}: dtype {file.dtype}, expected integer node ids")
        return file

    def _feature_rows(self) -> SourceRows | None:
        dense = self._folder / f"{FEATURES}.npy"
        meta = self._folder / f"{FEATURES}_csr.json"
        if dense.exists():
            file = NpyFile(dense)
            _refuse_fortran(file)
            if len(file.shape) != 2 or file.shape[1] == 0 or file.dtype.kind != "f":
                raise BadInput(
                    f"{dense}: shape {file.shape} of {file.dtype}, expected (nodes, features) "
                    "of floats"
                )
            return SourceRows("x", file.dtype, file.shape[1:], file.shape[0], "dense", str(dense))
        if not meta.exists():
            return None
        try:
            csr = msgspec.json.decode(meta.read_bytes(), type=_Csr)
        except msgspec.MsgspecError as error:
            raise BadInput(f"{meta}: {error}; expected shape and nnz") from error
        self._csr = {p: NpyFile(self._folder / f"{FEATURES}_{p}.npy") for p in _CSR_PARTS}
        rows, width = csr.shape
        sizes = {"indptr": rows + 1, "indices": csr.nnz, "data": csr.nnz}
        for part, size in sizes.items():
            if self._csr[part].shape != (size,):
                raise BadInput(
                    f"{self._csr[part].path}: shape {self._csr[part].shape}, expected ({size},)"
                )
        return SourceRows("x", self._csr["data"].dtype, (width,), rows, "csr", str(meta))

    def _csr_rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        out = np.empty((min(count, rows.num_rows), *rows.row_shape), rows.dtype)
        for first in range(0, rows.num_rows, max(count, 1)):
            dense = out[: min(count, rows.num_rows - first)]
            indptr = self._csr["indptr"].read(first, dense.shape[0] + 1).astype(np.int64)
            start, size = int(indptr[0]), int(indptr[-1] - indptr[0])
            if (np.diff(indptr) < 0).any() or start < 0 or start + size > self._csr["data"].size:
                raise BadInput(f"{self._csr['indptr'].path}[{first}]: offsets do not ascend")
            columns = self._csr["indices"].read(start, size)
            bad = int(first_outside(columns, rows.row_shape[0]))
            if bad >= 0:
                raise BadInput(
                    f"{self._csr['indices'].path}[{start + bad}]: column {columns[bad]}, expected "
                    f"0 to {rows.row_shape[0] - 1}"
                )
            densify(indptr, columns, self._csr["data"].read(start, size), dense)
            yield dense

    def _label_rows(self) -> SourceRows | None:
        path = self._folder / f"{LABEL}.npy"
        if not path.exists():
            return None
        file = NpyFile(path)
        _refuse_fortran(file)
        if len(file.shape) not in (1, 2) or file.dtype.kind not in "iuf":
            raise BadInput(
                f"{path}: shape {file.shape} of {file.dtype}, expected (nodes,) or (nodes, labels)"
            )
        return SourceRows("y", file.dtype, file.shape[1:], file.shape[0], "dense", str(path))

    def _count_nodes(self) -> int:
        """Nodes of the graph: as many as there are labels, else features, else ids seen."""
        counts = [r for r in (self._label, self._features) if r is not None]
        if counts:
            num_nodes = max(r.num_rows for r in counts)
            for r in counts:
                if r.num_rows != num_nodes:
                    raise BadInput(
                        f"{r.where}: {r.num_rows} rows, expected {num_nodes}, one a node"
                    )
        else:
            num_nodes = 0
            for piece in self._edges.pieces(0, self._edges.size, 1 << 20):
                num_nodes = max(num_nodes, int(piece.max()) + 1)
        if num_nodes == 0:
            raise BadInput(f"{self._folder}: the graph has no nodes, expected at least one")
        return num_nodes


_CSR_PARTS = ("indptr", "indices", "data")


def _refuse_fortran(file: NpyFile) -> None:
    if file.fortran:
        raise BadInput(f"{file.path}: rows are not in C order, expected that; save it again")
