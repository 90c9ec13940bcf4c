"""What OGB's layouts have in common: a source made of parts, whose splits lie in `split/<name>/`.

split/time/{train,valid,test}.csv.gz           ids of nodes, one a line
split/time/<type>/{train,valid,test}.csv.gz    of a type of nodes
split/time/{train,valid,test}.pt               pairs of nodes, for link prediction
split/time/split_dict.pt                       any of those in one file, which wins
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preprocess.contents import SPLITS
from preprocess.errors import BadInput
from preprocess.files.tables import FLAG, INTEGER, Table
from preprocess.files.torchfile import as_numpy, is_tensor, load_torch
from preprocess.kernels.edges import first_outside
from preprocess.source import SourceRelation, SourceRows

# whose edges OGB's master.csv says to add the inverse of, and the names of their archives
_ADD_INVERSE = ("proteins", "products", "ppa", "ppassoc", "collab", "ddi")
_FOLDER_NAME = re.compile(r"(?:ogb[nl][_-])?(.+?)(?:_(?:pyg|dgl))?")
_RELEASE_NAME = re.compile(r"ogb[nl]-(\w+)")  # in RELEASE_v1.txt
_PAIRS = (("edge",), ("source_node", "target_node"), ("head", "tail"))
_NEGATIVES = "edge_neg"
_OTHER_TYPES = "head_type"  # of pairs of many relations in one list
_INT64 = np.dtype(np.int64)

Ends = tuple[str, str, str]  # source type, relation, target type


class Array(Protocol):
    """An array in a file, read by rows."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def form(self) -> SourceRows:
        """What it is."""

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order, at most `count` at a time; the array may be reused."""


class Edges(Protocol):
    """The edges of a relation in a file."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def num_edges(self) -> int:
        """In it."""

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), at most `count` at a time; ids are not checked."""

    def place(self, end: int, row: int) -> str:
        """Of an id, for messages: of the source (0) or target (1) of an edge."""


@dataclass(frozen=True, slots=True)
class TypePart:
    """A type of nodes."""

    num_nodes: int
    features: Sequence[Array] = ()
    label: Array | None = None

    @property
    def arrays(self) -> Sequence[Array]:
        return [*self.features, *([] if self.label is None else [self.label])]


@dataclass(frozen=True, slots=True)
class RelationPart:
    ends: Ends
    edges: Edges
    arrays: Sequence[Array] = ()


@dataclass
class _Splits:
    nodes: dict[str, list[Array]] = field(default_factory=dict)
    edges: dict[Ends, list[Array]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


class OgbSource:
    """A dataset's folder.  Splits of pairs over many relations (ogbl-biokg) are left out.

    Raises BadInput.
    """

    layout = ""

    def __init__(
        self,
        folder: Path,
        types: Mapping[str, TypePart],
        relations: Sequence[RelationPart],
        files: Sequence[Path],
    ) -> None:
        """`files` are those read besides arrays, edges and splits."""
        self.where = str(folder)
        self._types, self._parts = dict(types), {r.ends: r for r in relations}
        self.num_nodes = {name: t.num_nodes for name, t in types.items()}
        if sum(self.num_nodes.values()) == 0:
            raise BadInput.at(folder, "a graph with no nodes", "at least one", "is it whole?")
        self.relations = tuple(
            SourceRelation(*r.ends, r.edges.num_edges, str(r.edges.path)) for r in relations
        )
        releases = sorted(folder.glob("RELEASE_v*.txt"))
        self.undirected = not _names(folder, releases).isdisjoint(_ADD_INVERSE)
        self._splits = _find_splits(folder, self.num_nodes, list(self._parts))
        self._readers: dict[SourceRows, Array] = {}
        arrays = [a for t in types.values() for a in t.arrays]
        arrays += [a for r in relations for a in r.arrays]
        arrays += [a for lists in self._splits.nodes.values() for a in lists]
        read = {*files, *releases, *self._splits.files, *(r.edges.path for r in relations)}
        self.files = sorted(read | {a.path for a in arrays})

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        edges, done = self._parts[relation[:3]].edges, 0
        for src, dst in edges.pieces(max(count, 1)):
            for end, (ids, name) in enumerate(((src, relation.src), (dst, relation.dst))):
                _check_ids(ids, self.num_nodes[name], edges.place, end, done)
            yield src, dst
            done += src.size

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """`edge-feat` as "feat", `edge_<name>` as "<name>"."""
        return self._readable(self._parts[relation[:3]].arrays)

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """Pairs (source, target), and those that are no edges as "<split>_negative"."""
        return self._readable(self._splits.edges.get(relation[:3], []))

    def features(self, node_type: str) -> list[SourceRows]:
        """`node-feat` as "x", `node_<name>` as "<name>"."""
        return self._readable(self._types[node_type].features)

    def label(self, node_type: str) -> SourceRows | None:
        """`node-label`."""
        label = self._types[node_type].label
        return None if label is None else self._readable([label])[0]

    def splits(self, node_type: str) -> list[SourceRows]:
        """Lists of nodes; those in text are counted at first."""
        return self._readable(self._splits.nodes.get(node_type, []))

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array may be reused."""
        return self._readers[rows].pieces(max(count, 1))

    def _readable(self, arrays: Sequence[Array]) -> list[SourceRows]:
        forms = [a.form for a in arrays]
        self._readers.update(zip(forms, arrays, strict=True))
        return forms


class TorchList:
    """Nodes, or pairs of them, in a file of `torch.save`; it is open only while it is read.

    Memory: tensors are mapped; arrays, and what torch before 1.6 wrote, are loaded whole.
    """

    def __init__(
        self, name: str, path: Path, loaded: Any, keys: Sequence[tuple[str, ...]], pairs: bool
    ) -> None:
        """`keys` lead to one list or array of pairs in what is `loaded`, or to two columns."""
        self.path, self._keys = path, keys
        where = f"{path}: {'.'.join(keys[0])}"
        arrays = [_dig(loaded, key) for key in keys]
        shape = (2,) if pairs and len(keys) == 1 else ()
        for array, key in zip(arrays, keys, strict=True):
            place = f"{path}: {'.'.join(key)}"
            if not is_tensor(array):
                what = type(array).__name__
                raise BadInput.at(place, f"a {what}", "a tensor", "save it again")
            dtype = as_numpy(array.reshape(-1)[:0]).dtype
            is_list = len(array.shape) > 0 and tuple(array.shape[1:]) == shape
            if not is_list or dtype.kind not in "iu":
                raise BadInput.at(
                    place, f"shape {tuple(array.shape)} of {dtype}",
                    f"{'(pairs, 2)' if shape else '(n,)'} of integers", "save it again",
                )  # fmt: skip
            if array.shape[0] != arrays[0].shape[0]:
                raise BadInput.at(
                    place, f"{array.shape[0]} rows", f"{arrays[0].shape[0]} as in {keys[0][-1]}",
                    "save it again",
                )  # fmt: skip
        dtype = np.result_type(*(as_numpy(a[:0]).dtype for a in arrays))
        row_shape = (2,) if pairs else ()
        self.form = SourceRows(name, dtype, row_shape, int(arrays[0].shape[0]), "dense", where)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        loaded = load_torch(self.path)
        arrays = [_dig(loaded, key) for key in self._keys]
        del loaded
        for first in range(0, self.form.num_rows, count):
            parts = [as_numpy(a[first : first + count]) for a in arrays]
            yield parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


class CsvList:
    """Nodes in text, one a line."""

    def __init__(self, name: str, path: Path, num_nodes: int) -> None:
        self.path, self._name, self._num_nodes = path, name, num_nodes
        self._table = Table(path, header=False)
        if len(self._table.names) != 1:
            raise BadInput.at(
                f"{path}:1", f"{len(self._table.names)} columns", "one, of ids", "correct it"
            )

    @cached_property
    def form(self) -> SourceRows:
        """What it is; the text is parsed once to count it."""
        num_rows = self._table.num_rows()
        return SourceRows(self._name, _INT64, (), num_rows, "dense", str(self.path))

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Ids in order, checked: a message names their line."""
        done = 0
        for (ids,) in self._table.arrays({"0": INTEGER}, count):
            _check_ids(ids, self._num_nodes, lambda _, row: self._table.place(row), 0, done)
            yield ids
            done += ids.size


def read_flags(path: Path, types: Mapping[str, int]) -> list[str]:
    """Types that are said to have something: a header of types, one row of truth values."""
    table = Table(path)
    for name in table.names:
        if name not in types:
            raise BadInput.at(
                f"{path}: header", f"node type {name!r}", f"one of {', '.join(types)}", "correct it"
            )
    rows = list(table.arrays(dict.fromkeys(table.names, FLAG), 2))
    if len(rows) != 1 or rows[0][0].size != 1:
        raise BadInput.at(path, "another number of rows", "one", "correct it")
    return [name for name, flag in zip(table.names, rows[0], strict=True) if flag[0]]


def check_names(arrays: Sequence[Array]) -> None:
    """Raises BadInput: two arrays of a type or relation would have the same name."""
    seen: dict[str, str] = {}
    for form in (a.form for a in arrays):
        if form.name in seen:
            raise BadInput.at(
                form.where, f"array {form.name!r} again", f"it once, in {seen[form.name]}",
                "rename one of them",
            )  # fmt: skip
        seen[form.name] = form.where


def _find_splits(folder: Path, types: Mapping[str, int], relations: Sequence[Ends]) -> _Splits:
    root = folder / "split"
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    if len(names) > 1:
        raise BadInput.at(
            root, f"splits {' and '.join(names)}", "one", "move the others out of the folder"
        )
    found = _Splits()
    if not names:
        return found
    chosen = root / names[0]
    whole = chosen / "split_dict.pt"
    if whole.is_file():
        loaded = load_torch(whole)
        for split in SPLITS:
            _add_loaded(found, whole, loaded, (split,), split, types, relations)
    elif any((chosen / f"{split}.pt").exists() for split in SPLITS):
        for split in SPLITS:
            path = chosen / f"{split}.pt"
            _add_loaded(found, path, load_torch(path), (), split, types, relations)
    else:
        _add_texts(found, chosen, types)
    return found


def _add_texts(found: _Splits, folder: Path, types: Mapping[str, int]) -> None:
    flags = folder / "nodetype-has-split.csv.gz"
    if flags.exists():
        owners = {name: folder / name for name in read_flags(flags, types)}
        found.files.append(flags)
    elif len(types) == 1 and not any(p.is_dir() for p in folder.iterdir()):
        owners = {next(iter(types)): folder}
    else:
        owners = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
        if not owners:
            raise BadInput.at(folder, "no folders", f"some of {', '.join(types)}", "add them")
    for name, owner in owners.items():
        if name not in types:
            raise BadInput.at(
                owner, f"a split of type {name!r}", f"of {', '.join(types)}", "correct its name"
            )
        paths = {split: owner / f"{split}.csv.gz" for split in SPLITS}
        found.nodes[name] = [CsvList(s, p, types[name]) for s, p in paths.items()]


def _add_loaded(
    found: _Splits,
    path: Path,
    loaded: Any,
    key: tuple[str, ...],
    split: str,
    types: Mapping[str, int],
    relations: Sequence[Ends],
) -> None:
    """What a file holds at a key: a list, lists by type, or columns of pairs."""
    value = _dig(loaded, key, path)
    found.files.append(path)
    if is_tensor(value) and key and len(types) == 1:
        array = TorchList(split, path, loaded, [key], pairs=False)
        found.nodes.setdefault(next(iter(types)), []).append(array)
        return
    place = f"{path}: {'.'.join(key)}" if key else str(path)
    if not isinstance(value, dict):
        expected = "a dictionary by type" if len(types) > 1 else "a tensor or a dictionary"
        raise BadInput.at(place, f"a {type(value).__name__}", expected, "save it again")
    if value and set(value) <= set(types):
        for name in value:
            lists = found.nodes.setdefault(name, [])
            lists.append(TorchList(split, path, loaded, [(*key, name)], pairs=False))
        return
    if _OTHER_TYPES in value:
        return
    columns = next((c for c in _PAIRS if set(c) <= set(value)), None)
    if columns is None or len(relations) != 1:
        keys = ", ".join(map(str, value)) or "nothing"
        expected = f"types of nodes ({', '.join(types)}) or pairs of one relation (edge)"
        raise BadInput.at(place, f"a dictionary of {keys}", expected, "save it again")
    named = {split: columns, f"{split}_negative": (_NEGATIVES,)}
    found.edges.setdefault(relations[0], []).extend(
        TorchList(name, path, loaded, [(*key, column) for column in fields], pairs=True)
        for name, fields in named.items()
        if set(fields) <= set(value)
    )


def _dig(loaded: Any, key: tuple[str, ...], path: Path | None = None) -> Any:
    """What lies under a key; with `path`, BadInput where there is none."""
    for part in key:
        if path is not None and (not isinstance(loaded, dict) or part not in loaded):
            what = f"no {part!r}" if isinstance(loaded, dict) else f"a {type(loaded).__name__}"
            raise BadInput.at(path, what, f"a dictionary of {', '.join(SPLITS)}", "save it again")
        loaded = loaded[part]
    return loaded


def _check_ids(ids: NDArray[Any], num_nodes: int, place: Any, end: int, done: int) -> None:
    bad = int(first_outside(ids, num_nodes))
    if bad >= 0:
        raise BadInput.at(
            place(end, done + bad), f"node id {ids[bad]}", f"0 to {num_nodes - 1}",
            f"the graph is said to have {num_nodes} such nodes",
        )  # fmt: skip


def _names(folder: Path, releases: Sequence[Path]) -> set[str]:
    """What the dataset is called, by its folder and by its notes."""
    match = _FOLDER_NAME.fullmatch(folder.resolve().name)
    notes = " ".join(p.read_text(errors="replace") for p in releases)
    return {*([match[1]] if match else []), *_RELEASE_NAME.findall(notes)}
