"""What both plain layouts hold: arrays in npy files, dense or sparse, of nodes and of edges."""

from collections.abc import Iterator
from functools import partial
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
from preprocess.sources.arrays import ArrayRows, EdgeArray, id_rows
from preprocess.sources.description import read_description
from preprocess.sources.plain_names import (
    CSR,
    CSR_PARTS,
    MAIN,
    PlainNames,
    array_order,
    csr_stem,
    split_order,
)
from preprocess.sources.source import Ends, Owner, Rows, Source, SourceRows


class _Csr(msgspec.Struct):
    shape: tuple[int, int]
    nnz: int | None = None


class PlainArrays(Source):
    """Arrays in npy files of one folder, sorted by what they are of.  Raises BadInput.

    A type's number of nodes is checked by whoever knows it: `check_counts`.
    """

    def __init__(self, folder: Path, names: PlainNames, needs: str) -> None:
        """`needs`: a file that must be there, for messages."""
        if not folder.is_dir():
            what = "a file, not a folder" if folder.exists() else "nothing, not a folder"
            raise BadInput.at(folder, what, f"a folder with {needs}", "is the path right?")
        super().__init__(folder)
        self._folder, self._names = folder, names
        self._stems: dict[tuple[Owner, str], dict[str, str]] = {}  # owner, kind -> name -> stem

    def stems(self) -> list[str]:
        """Names of the npy files, without the suffix, in order."""
        return sorted(p.stem for p in self._folder.iterdir() if p.suffix == ".npy")

    def named(self, owner: Owner, kind: str) -> dict[str, str]:
        """Name of an array to the name of its file, of a kind: "rows", "csr", "label", "split"."""
        return self._stems.setdefault((owner, kind), {})

    def take(self, stem: str, kind: str, owner: Owner, name: str) -> None:
        """Note what a file holds.  Raises BadInput: another holds the same."""
        named = self.named(owner, kind)
        if name in named:
            raise BadInput.at(
                self.path(stem), f"an array {name!r}, which {named[name]}.npy is too",
                "names that differ", "rename one",
            )  # fmt: skip
        named[name] = stem

    def open_relation(self, ends: Ends) -> None:
        """Add the edges of a relation, their arrays and their splits."""
        edges = EdgeArray(self.npy(self._names("edges", ends, "")))
        self.add_edges(ends, edges)
        says = f"one an edge of {edges.path.name}"
        for name in array_order(named := self.named(ends, "rows")):
            self.add_array(ends, ArrayRows(name, self.npy(named[name]), edges.num_edges, says))
        for name in split_order(named := self.named(ends, "split")):
            self.add_split(ends, id_rows(name, self.npy(named[name]), ((), (2,))))

    def open_type(self, node_type: str, shape: tuple[int, int] | None = None) -> None:
        """Add the arrays and labels of a type; `shape` of a sparse main one, if it is known."""
        dense, sparse = self.named(node_type, "rows"), self.named(node_type, "csr")
        for name in array_order([*dense, *sparse]):
            if name in dense and name in sparse:
                raise BadInput.at(
                    self.path(dense[name]), f"{sparse[name]} beside it", "one of them", "remove one"
                )
            if name in sparse:
                self._open_csr(node_type, name, shape if name == MAIN else None)
                continue
            file = self.npy(dense[name])
            if name == MAIN:
                file.check(len(file.shape) == 2, "(nodes, features)", "reshape it")
            self.add_array(node_type, ArrayRows(name, file))
        for stem in self.named(node_type, "label").values():
            self.open_label(node_type, stem)

    def open_label(
        self, node_type: str, stem: str, first: int = 0, count: int | None = None
    ) -> None:
        """Add the labels of a type: all rows of a file, or `count` rows from `first` on."""
        file = self.npy(stem)
        file.check(len(file.shape) in (1, 2), "(nodes,) or (nodes, labels)")
        file.check(file.dtype.name in ITEM_BYTES, f"one of {', '.join(ITEM_BYTES)}", "convert them")
        self.add_label(node_type, ArrayRows("label", file, first=first, count=count))

    def open_splits(self, node_type: str) -> None:
        """Add the splits of a type."""
        for name in split_order(named := self.named(node_type, "split")):
            self.add_split(node_type, id_rows(name, self.npy(named[name])))

    def check_counts(self, node_type: str, num_nodes: int, says: str) -> None:
        """Every array of a type has `num_nodes` rows, as the file `says`."""
        for rows in self.node_arrays(node_type):
            if rows.num_rows != num_nodes:
                raise BadInput.at(
                    f"{rows.where}: header", f"{rows.num_rows} rows", f"{num_nodes}, one a node",
                    f"{says} has {num_nodes}",
                )  # fmt: skip

    def node_arrays(self, node_type: str) -> list[SourceRows]:
        """Labels and features of a type."""
        label = self.label(node_type)
        return [*([label] if label else []), *self.features(node_type)]

    def path(self, stem: str) -> Path:
        return self._folder / f"{stem}.npy"

    def npy(self, stem: str) -> NpyFile:
        """An npy file, which is read."""
        self.add_files(self.path(stem))
        return NpyFile(self.path(stem))

    def _open_csr(self, node_type: str, name: str, shape: tuple[int, int] | None) -> None:
        """Add a sparse array of a type; its shape is in a file of its own if it is not given."""
        meta = self._folder / f"{csr_stem(self._names, node_type, name, CSR)}.json"
        if shape is not None and not meta.exists():
            csr = _Csr(shape)
        else:
            csr = read_description(meta, _Csr, 'the shape, {"shape": [rows, columns], "nnz": n}')
            self.add_files(meta)
        files = [self.npy(csr_stem(self._names, node_type, name, part)) for part in CSR_PARTS]
        self.add_array(node_type, _CsrRows(name, files, csr, meta))


class _CsrRows:
    """A sparse array in CSR form, given as dense rows.  Raises BadInput."""

    def __init__(self, name: str, files: list[NpyFile], csr: _Csr, meta: Path) -> None:
        """`meta`: what says the shape."""
        rows, width = csr.shape
        self._indptr, self._indices, self._data = files
        nnz = self._indices.size if csr.nnz is None else csr.nnz
        for file, size, kinds in zip(
            files, (rows + 1, nnz, nnz), ("iu", "iu", "biuf"), strict=True
        ):
            fits = file.shape == (size,) and file.dtype.kind in kinds and rows >= 0 and width >= 1
            expected = f"({size},) of {'integers' if kinds == 'iu' else 'numbers'}"
            file.check(fits, expected, f"it must agree with {meta.name}")
        self.name, self.path = name, self._indptr.path
        self.form = SourceRows(name, self._data.dtype, (width,), rows, "csr", str(self.path))

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        num_rows, width = self.form.num_rows, self.form.row_shape[0]
        out = np.empty((min(count, num_rows), width), self.form.dtype)
        for first in range(0, num_rows, count):
            dense = out[: min(count, num_rows - first)]
            indptr = self._indptr.read(first, dense.shape[0] + 1).astype(np.int64)
            start, size = int(indptr[0]), int(indptr[-1] - indptr[0])
            if (np.diff(indptr) < 0).any() or start < 0 or start + size > self._data.size:
                raise BadInput.at(
                    f"{self.path}[{first}]", "offsets that do not ascend",
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


def shifted_ids(name: str, file: NpyFile, first: int, num_nodes: int) -> Rows:
    """A split of a type with `num_nodes`, whose ids count through all types, its own from `first`.

    Raises BadInput.
    """
    ids = id_rows(name, file)
    form = ids.form._replace(dtype=np.dtype(np.int64))
    return Rows(form, partial(_shifted, ids, first, num_nodes), file.path)


def _shifted(ids: ArrayRows, first: int, num_nodes: int, count: int) -> Iterator[NDArray[Any]]:
    done = 0
    for piece in ids.pieces(count):
        shifted = piece.astype(np.int64) - first
        bad = int(first_outside(shifted, num_nodes))
        if bad >= 0:
            raise BadInput.at(
                f"{ids.path}[{done + bad}]", f"node id {piece[bad]}",
                f"{first} to {first + num_nodes - 1}",
                "ids count through the types: correct the split",
            )  # fmt: skip
        yield shifted
        done += shifted.size
