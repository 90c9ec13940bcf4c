"""The plain layout: a folder of npy files with fixed names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES
from preprocess.errors import BadInput
from preprocess.kernels.edges import first_outside
from preprocess.kernels.rows import densify
from preprocess.npy import NpyFile
from preprocess.source import SourceRelation, SourceRows

NODE, RELATION = "node", "to"
EDGES, FEATURES, LABEL = "edge_index", "node_feat", "node_label"
SPLITS = ("train", "valid", "test")
_CSR_PARTS = ("indptr", "indices", "data")
_SCAN_ITEMS = 1 << 18


class _Csr(msgspec.Struct):
    shape: tuple[int, int]
    nnz: int


class PlainSource:
    """`edge_index.npy` (2, E), `node_feat.npy` or its CSR parts, `node_label.npy`, `*_idx.npy`.

    One node type "node", one relation "to".  There are as many nodes as labels, else as feature
    rows, else one more than the largest id.  Raises BadInput.
    """

    layout = "plain"
    undirected = False

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `edge_index.npy`, and no `schema.json`."""
        found = (path / f"{EDGES}.npy").is_file() and not (path / "schema.json").exists()
        return f"{EDGES}.npy" if found else None

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = "a file, not a folder" if folder.exists() else "nothing, not a folder"
            raise BadInput.at(folder, what, f"a folder with {EDGES}.npy", "is the path right?")
        self.where, self._folder = str(folder), folder
        self._csr: dict[str, NpyFile] = {}
        self._edges = self._edge_index()
        self._features = self._dense_features() or self._csr_features()
        self._label = self._label_rows()
        self._splits = tuple(r for name in SPLITS if (r := self._split_rows(name)) is not None)
        self.num_nodes = {NODE: self._count_nodes()}
        self.relations = (
            SourceRelation(NODE, RELATION, NODE, self._edges.shape[1], str(self._edges.path)),
        )

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        num_nodes, done = self.num_nodes[NODE], 0
        for src, dst in self._edge_chunks(count):
            for row, ids in enumerate((src, dst)):
                bad = int(first_outside(ids, num_nodes))
                if bad >= 0:
                    raise BadInput.at(
                        f"{relation.where}[{row}, {done + bad}]", f"node id {ids[bad]}",
                        f"0 to {num_nodes - 1}", f"{self._counted} has {num_nodes} nodes",
                    )  # fmt: skip
            yield src, dst
            done += src.size

    @property
    def files(self) -> list[Path]:
        """Every npy file of the folder, and what describes them."""
        return sorted(p for p in self._folder.iterdir() if p.suffix in (".npy", ".json"))

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """None yet."""
        return []

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """None yet."""
        return []

    def features(self, node_type: str) -> list[SourceRows]:
        """`node_feat`, as "x"."""
        return [self._features] if self._features is not None and node_type == NODE else []

    def label(self, node_type: str) -> SourceRows | None:
        """`node_label`."""
        return self._label if node_type == NODE else None

    def splits(self, node_type: str) -> tuple[SourceRows, ...]:
        """The splits that have a file."""
        return self._splits if node_type == NODE else ()

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Dense rows in order."""
        count = max(count, 1)
        if rows.held == "csr":
            yield from self._csr_rows(rows, count)
            return
        width = int(np.prod(rows.row_shape, dtype=np.int64))
        file = NpyFile(Path(rows.where))
        for piece in file.pieces(0, rows.num_rows * width, count * width):
            yield piece.reshape(-1, *rows.row_shape)

    def _edge_chunks(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        total = self._edges.shape[1]
        if not self._edges.fortran_order:
            sources = self._edges.pieces(0, total, count)
            yield from zip(sources, self._edges.pieces(total, 2 * total, count), strict=True)
            return
        split = np.empty((2, min(count, total)), self._edges.dtype)  # pairs lie together on disk
        for pairs in self._edges.pieces(0, 2 * total, 2 * count):
            src, dst = split[:, : pairs.size // 2]
            src[:], dst[:] = pairs[::2], pairs[1::2]
            yield src, dst

    def _edge_index(self) -> NpyFile:
        file = NpyFile(self._folder / f"{EDGES}.npy")
        if len(file.shape) != 2 or file.shape[0] != 2:
            raise BadInput.at(
                f"{file.path}: header",
                f"shape {file.shape}",
                "(2, edges)",
                "transpose or reshape it",
            )
        if file.dtype.kind not in "iu":
            raise BadInput.at(
                f"{file.path}: header", f"items of {file.dtype}", "integer node ids", "convert them"
            )
        return file

    def _dense_features(self) -> SourceRows | None:
        path = self._folder / f"{FEATURES}.npy"
        if not path.exists():
            return None
        file = NpyFile(path)
        if len(file.shape) != 2 or file.shape[1] == 0:
            raise BadInput.at(
                f"{path}: header", f"shape {file.shape}", "(nodes, features)", "reshape it"
            )
        if file.fortran_order:
            raise BadInput.at(
                f"{path}: header", "Fortran order", "C order",
                "save it again with numpy.ascontiguousarray",
            )  # fmt: skip
        if file.dtype.kind not in "biuf":
            raise BadInput.at(
                f"{path}: header", f"items of {file.dtype}", "numbers", "convert them"
            )
        return SourceRows("x", file.dtype, file.shape[1:], file.shape[0], "dense", str(path))

    def _csr_features(self) -> SourceRows | None:
        meta = self._folder / f"{FEATURES}_csr.json"
        if not meta.exists():
            return None
        try:
            csr = msgspec.json.decode(meta.read_bytes(), type=_Csr)
        except msgspec.MsgspecError as error:
            raise BadInput.at(
                meta, error, '{"shape": [rows, columns], "nnz": n}', "correct it"
            ) from error
        rows, width = csr.shape
        for part, size in zip(_CSR_PARTS, (rows + 1, csr.nnz, csr.nnz), strict=True):
            file = self._csr[part] = NpyFile(self._folder / f"{FEATURES}_{part}.npy")
            kinds = "biuf" if part == "data" else "iu"
            if file.shape != (size,) or file.dtype.kind not in kinds or rows < 0 or width < 1:
                raise BadInput.at(
                    f"{file.path}: header", f"shape {file.shape} of {file.dtype}",
                    f"({size},) of {'numbers' if part == 'data' else 'integers'}",
                    f"it must agree with {meta.name}",
                )  # fmt: skip
        return SourceRows("x", self._csr["data"].dtype, (width,), rows, "csr", str(meta))

    def _csr_rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        out = np.empty((min(count, rows.num_rows), *rows.row_shape), rows.dtype)
        indptr_file, indices, data = (self._csr[part] for part in _CSR_PARTS)
        for first in range(0, rows.num_rows, count):
            dense = out[: min(count, rows.num_rows - first)]
            indptr = indptr_file.read(first, dense.shape[0] + 1).astype(np.int64)
            start, size = int(indptr[0]), int(indptr[-1] - indptr[0])
            if (np.diff(indptr) < 0).any() or start < 0 or start + size > data.size:
                raise BadInput.at(
                    f"{indptr_file.path}[{first}]", "offsets that do not ascend",
                    f"0 to {data.size} in order", "write the matrix again",
                )  # fmt: skip
            columns = indices.read(start, size)
            bad = int(first_outside(columns, rows.row_shape[0]))
            if bad >= 0:
                raise BadInput.at(
                    f"{indices.path}[{start + bad}]", f"column {columns[bad]}",
                    f"0 to {rows.row_shape[0] - 1}", "write the matrix again",
                )  # fmt: skip
            values = data.read(start, size)
            item = dense.dtype.itemsize  # float16 is no type of numba: bits are moved
            densify(indptr, columns, values.view(f"u{item}"), dense.view(f"u{item}"))
            yield dense

    def _label_rows(self) -> SourceRows | None:
        path = self._folder / f"{LABEL}.npy"
        if not path.exists():
            return None
        file = NpyFile(path)
        if len(file.shape) not in (1, 2) or 0 in file.shape[1:] or file.fortran_order:
            order = " in Fortran order" if file.fortran_order else ""
            raise BadInput.at(
                f"{path}: header", f"shape {file.shape}{order}",
                "(nodes,) or (nodes, labels) in C order", "save it again",
            )  # fmt: skip
        if file.dtype.name not in ITEM_BYTES:
            raise BadInput.at(
                f"{path}: header", f"items of {file.dtype}", f"one of {', '.join(ITEM_BYTES)}",
                "convert them",
            )  # fmt: skip
        return SourceRows("y", file.dtype, file.shape[1:], file.shape[0], "dense", str(path))

    def _split_rows(self, name: str) -> SourceRows | None:
        path = self._folder / f"{name}_idx.npy"
        if not path.exists():
            return None
        file = NpyFile(path)
        if len(file.shape) != 1 or file.dtype.kind not in "iu":
            raise BadInput.at(
                f"{path}: header", f"shape {file.shape} of {file.dtype}", "(n,) of integers",
                "save the ids of the nodes as a list",
            )  # fmt: skip
        return SourceRows(name, file.dtype, (), file.shape[0], "dense", str(path))

    def _count_nodes(self) -> int:
        """Nodes of the graph, and in `_counted` what says so."""
        counts = [r for r in (self._label, self._features) if r is not None]
        if counts:
            most = max(counts, key=lambda r: r.num_rows)
            num_nodes, self._counted = most.num_rows, Path(most.where).name
            for r in counts:
                if r.num_rows != num_nodes:
                    raise BadInput.at(
                        f"{r.where}: header", f"{r.num_rows} rows", f"{num_nodes}, one a node",
                        f"{self._counted} has {num_nodes}",
                    )  # fmt: skip
        else:
            num_nodes, self._counted = 0, "the folder"
            for piece in self._edges.pieces(0, self._edges.size, _SCAN_ITEMS):
                num_nodes = max(num_nodes, int(piece.max()) + 1)
        if num_nodes == 0:
            raise BadInput.at(
                self._folder, "a graph with no nodes", "at least one", "is this the right folder?"
            )
        return num_nodes
