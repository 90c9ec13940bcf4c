"""The plain layouts: a folder of npy files whose names say what they hold (docs/layouts.md).

`plain` has one type and one relation, and fixed file names; `plain-hetero` has any number of both,
listed in a schema.  Arrays of nodes and edges are dense or sparse.  Other files are not read.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES
from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.kernels.edges import first_outside
from preprocess.kernels.rows import densify
from preprocess.sources.arrays import ArrayRows, EdgeArray, id_rows
from preprocess.sources.plain_names import (
    CSR,
    CSR_PARTS,
    EDGES,
    FORMS,
    LABEL,
    MAIN,
    META,
    ONLY,
    SCHEMA,
    PlainNames,
    array_order,
    csr_stem,
    one_type,
    parse_stem,
    parse_stems,
    several_types,
    split_order,
    typed_file,
)
from preprocess.sources.source import NODE, Ends, Owner, Rows, Source, SourceRows
from preprocess.sources.sourcefiles import read_description

_SCAN_EDGES = 1 << 18
_KINDS = {"edge": "rows", "edge_split": "split", "feat": "rows", "label": "label", "split": "split"}

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Csr(msgspec.Struct):
    shape: tuple[int, int]
    nnz: int | None = None


class PlainArrays(Source):
    """Arrays in npy files of one folder, grouped by type or relation.  Raises BadInput.

    Subclasses find the number of nodes of each type, and call `check_counts`.
    """

    def __init__(self, folder: Path, names: PlainNames, needs: str) -> None:
        """`needs`: name of a required file, for messages."""
        if not folder.is_dir():
            what = "a file, not a folder" if folder.exists() else "nothing, not a folder"
            raise BadInput.at(folder, what, f"a folder with {needs}", "is the path right?")
        super().__init__(folder)
        self._folder, self._names = folder, names
        self._stems: dict[tuple[Owner, str], dict[str, str]] = {}  # owner, kind -> name -> stem

    def stems(self) -> list[str]:
        """Names of the npy files without the suffix, sorted."""
        return sorted(p.stem for p in self._folder.iterdir() if p.suffix == ".npy")

    def named(self, owner: Owner, kind: str) -> dict[str, str]:
        """Array name -> file name, for arrays of a kind: "rows", "csr", "label" or "split"."""
        return self._stems.setdefault((owner, kind), {})

    def take(self, stem: str, kind: str, owner: Owner, name: str) -> None:
        """Register the array in a file.  Raises BadInput: another file has the same array."""
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
        """Add the arrays and labels of a type; `shape`: that of a sparse main array, if known."""
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
        """Check that every array of a type has `num_nodes` rows, the number from file `says`."""
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
        """Open an npy file, and register it as read."""
        self.add_files(self.path(stem))
        return NpyFile(self.path(stem))

    def _open_csr(self, node_type: str, name: str, shape: tuple[int, int] | None) -> None:
        """Add a sparse array of a type; if `shape` is None, it is read from a file."""
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
        """`meta`: the file that has the shape."""
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
            item = dense.dtype.itemsize  # numba does not support float16: copy the bits
            densify(indptr, columns, values.view(f"u{item}"), dense.view(f"u{item}"))
            yield dense


def shifted_ids(name: str, file: NpyFile, first: int, num_nodes: int) -> Rows:
    """A split of a type whose ids are numbered across all types: its own are those from `first` on.

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


class _Meta(msgspec.Struct):
    num_nodes: int | None = None


class PlainSource(PlainArrays):
    """One node type "node", one relation "to".  Raises BadInput.

    The number of nodes is that of rows of labels or features, else that in `meta.json`, else the
    largest id plus 1.
    """

    layout = "plain"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `edge_index.npy`, and no `schema.json`."""
        found = (path / f"{EDGES}.npy").is_file() and not (path / SCHEMA).exists()
        return f"{EDGES}.npy" if found else None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, one_type, f"{EDGES}.npy")
        for stem in self.stems():
            if (found := parse_stem(stem)) is not None:
                self.take(stem, *found)
        self._find_sparse()
        self.open_relation(ONLY)
        self.open_type(NODE)
        self.num_nodes[NODE] = self._count_nodes()
        self.open_splits(NODE)

    def _find_sparse(self) -> None:
        """Separate sparse arrays, which have a `_csr.json` or offsets, from dense ones."""
        dense, tail, first = self.named(NODE, "rows"), f"_{CSR}", f"_{CSR_PARTS[0]}"
        raws = [p.stem.removesuffix(tail) for p in self._folder.glob(f"node_*{tail}.json")]
        raws += [s.removesuffix(first) for s in dense.values() if s.endswith(first)]
        parts = {f"{raw}_{part}" for raw in raws for part in CSR_PARTS}
        for name in [name for name, stem in dense.items() if stem in parts]:
            del dense[name]
        for raw in raws:
            if (found := parse_stem(raw)) is not None:
                self.named(NODE, "csr")[found[2]] = f"{raw}{tail}.json"

    def _count_nodes(self) -> int:
        counts: dict[str, int] = {Path(r.where).name: r.num_rows for r in self.node_arrays(NODE)}
        meta = self._folder / META
        if meta.exists():
            self.add_files(meta)
            said = read_description(meta, _Meta, '{"num_nodes": n}').num_nodes
            counts |= {META: said} if said is not None else {}
        if counts:
            says, num_nodes = max(counts.items(), key=lambda c: c[1])
            self.check_counts(NODE, num_nodes, says)
            if counts.get(META, num_nodes) != num_nodes:
                raise BadInput.at(
                    meta, f"{counts[META]} nodes", f"{num_nodes}, as {says} has", "correct it"
                )
        else:
            pieces = self._edges[ONLY].pieces(_SCAN_EDGES)
            num_nodes = 1 + max((int(ids.max()) for ends in pieces for ids in ends), default=-1)
        if num_nodes <= 0:
            raise BadInput.at(
                self._folder, "a graph with no nodes", "at least one", "is this the right folder?"
            )
        return num_nodes


class _Schema(msgspec.Struct):
    node_types: dict[str, _Count]
    relations: list[str | tuple[str, str, str]]
    offsets: dict[str, _Count] = {}
    target: str | None = None
    feature_shapes: dict[str, tuple[int, int]] = {}


class PlainHeteroSource(PlainArrays):
    """Any number of types and relations, in the order of the schema.  Raises BadInput."""

    layout = "plain-hetero"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `schema.json` and arrays that are named after types."""
        first = typed_file(path)
        return f"{SCHEMA} and {first}" if first else None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, several_types, SCHEMA)
        self._schema_path = folder / SCHEMA
        self._schema = _read_schema(self._schema_path)
        self.add_files(self._schema_path)
        self.num_nodes.update(self._schema.node_types)
        self.check_nodes(self._schema_path)
        listed = [self._ends(r) for r in self._schema.relations]
        twice = next((e for i, e in enumerate(listed) if e in listed[:i]), None)
        if twice is not None:
            raise self._bad(f"relation {'|'.join(twice)} twice", "it once", "remove one")
        for stem in self.stems():
            self._sort_in(stem, listed)
        for ends in listed:
            self.open_relation(ends)
        for node_type in self.num_nodes:
            self.open_type(node_type, self._schema.feature_shapes.get(node_type))
            self.open_splits(node_type)
        self._open_target()
        for node_type, num_nodes in self.num_nodes.items():
            self.check_counts(node_type, num_nodes, SCHEMA)

    def _sort_in(self, stem: str, listed: Sequence[Ends]) -> None:
        """Register a file under its type or relation, by its name."""
        head, raws = parse_stems(stem)
        path = self.path(stem)
        if head not in FORMS or not raws:
            return
        if len(raws) not in FORMS[head]:
            raise BadInput.at(
                path, f"{len(raws)} names behind {head}",
                " or ".join(map(str, FORMS[head])), "see docs/layouts.md, or rename it",
            )  # fmt: skip
        names, of_edges = [unquote(r) for r in raws], head.startswith("edge")
        owner: Owner = (names[0], names[1], names[2]) if of_edges else names[0]
        if owner not in (listed if of_edges else self.num_nodes):
            found = f"relation {'|'.join(owner)}" if of_edges else f"node type {owner!r}"
            raise self._unknown(path, found, "relations" if of_edges else "node_types")
        rest = names[3:] if of_edges else names[1:]
        if head == "feat" and rest and raws[-1] in CSR_PARTS:
            self.named(owner, "csr")[rest[0] if len(rest) > 1 else MAIN] = f"{stem}.npy"
        elif head == "feat" and len(rest) > 1:
            raise BadInput.at(
                path, f"a part {raws[-1]!r}", f"one of {', '.join(CSR_PARTS)}", "rename it"
            )
        elif rest or head != "edge":
            self.take(stem, _KINDS[head], owner, rest[0] if rest else MAIN)

    def _open_target(self) -> None:
        """Add labels and splits in which nodes are numbered across all types."""
        target, path = self._schema.target, self.path(LABEL)
        if target is None:
            return
        if target not in self.num_nodes:
            raise self._unknown(self._schema_path, f"target {target!r}", "node_types")
        first = self._first(target)
        if path.exists():
            if self.label(target) is not None:
                raise BadInput.at(
                    path, f"labels of {target}, which have a file of their own", "one of them",
                    "remove one",
                )  # fmt: skip
            total, found = sum(self.num_nodes.values()), self.npy(LABEL).shape[:1]
            if found != (total,):
                raise BadInput.at(
                    f"{path}: header", f"{found[0] if found else 0} rows",
                    f"{total}, one a node of any type", f"{SCHEMA} has {total}",
                )  # fmt: skip
            self.open_label(target, LABEL, first, self.num_nodes[target])
        held = {r.name for r in self.splits(target)}
        stems = {p[2]: s for s in self.stems() if (p := parse_stem(s)) and p[:2] == ("split", NODE)}
        for name in split_order(stems):
            if name in held:
                raise BadInput.at(
                    self.path(stems[name]), f"split {name} of {target}, which has another file",
                    "one of them", "remove one",
                )  # fmt: skip
            file = self.npy(stems[name])
            self.add_split(target, shifted_ids(name, file, first, self.num_nodes[target]))

    def _first(self, target: str) -> int:
        """Number of the first node of a type, counted across all types."""
        first = 0
        for name, num_nodes in self.num_nodes.items():
            if self._schema.offsets.get(name, first) != first:
                raise self._bad(
                    f"offset {self._schema.offsets[name]} of {name}",
                    f"{first}, behind the types before it", "correct it",
                )  # fmt: skip
            if name == target:
                return first
            first += num_nodes
        raise AssertionError(target)

    def _ends(self, relation: str | tuple[str, str, str]) -> Ends:
        names = relation.split("|") if isinstance(relation, str) else list(relation)
        if len(names) != 3:
            raise self._bad(f"relation {relation!r}", '"<src>|<name>|<dst>"', "correct it")
        for name in (names[0], names[2]):
            if name not in self.num_nodes:
                raise self._unknown(
                    self._schema_path, f"node type {name!r} of {'|'.join(names)}", "node_types"
                )
        return names[0], names[1], names[2]

    def _bad(self, found: object, expected: str, remedy: str) -> BadInput:
        return BadInput.at(self._schema_path, found, expected, remedy)

    def _unknown(self, path: Path, found: str, field: str) -> BadInput:
        return BadInput.at(path, found, f'one of "{field}" in {SCHEMA}', "add it there")


def _read_schema(path: Path) -> _Schema:
    """Read the schema.  Raises BadInput, also for a type that is listed twice."""
    expected = '{"node_types": {"<type>": nodes}, "relations": ["<src>|<name>|<dst>"]}'
    schema = read_description(path, _Schema, expected)

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
        if twice is not None:
            raise BadInput.at(path, f"{twice!r} twice", "each name once", "rename one")

    json.loads(path.read_bytes(), object_pairs_hook=once)  # msgspec keeps the last duplicate
    return schema
