"""OGB's layouts, as text and as arrays; docs/layouts.md lists them.

Both have release notes, and splits in `split/<name>/`.  The text layout consists of compressed csv
files without a header, for one or several node types.  The other has arrays in `raw/data.npz`,
which are read in place or decompressed in order.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.arrow import FLAG, INTEGER
from preprocess.files.npy import ZipArray, list_members
from preprocess.files.strided import GivenArray, Placed
from preprocess.files.tables import Table
from preprocess.files.torchfile import kind_of, open_tensor, read_torch
from preprocess.ingest.contents import SPLITS
from preprocess.sources.arrays import ArrayRows, EdgeArray, id_rows
from preprocess.sources.source import NODE, RELATION, Ends, Owner, Rows, Source
from preprocess.sources.text import TextEdges, TextIds, TextRows

# data sets to which OGB's master.csv says to add inverse edges, with the names of their archives
_ADD_INVERSE = ("proteins", "products", "ppa", "ppassoc", "collab", "ddi")
_FOLDER_NAME = re.compile(r"(?:ogb[nl][_-])?(.+?)(?:_(?:pyg|dgl))?")
_RELEASE_NAME = re.compile(r"ogb[nl]-(\w+)")  # in RELEASE_v1.txt
_PAIRS = (("edge",), ("source_node", "target_node"), ("head", "tail"))
_NEGATIVES = "edge_neg"
_OTHER_TYPES = "head_type"  # key of splits that list pairs of many relations together
_SUFFIX = ".csv.gz"
_EDGE, _NODES, _EDGES = "edge.csv.gz", "num-node-list.csv.gz", "num-edge-list.csv.gz"
_TYPES, _TRIPLETS = "num-node-dict.csv.gz", "triplet-type-list.csv.gz"
_LABEL, _HAS_LABEL = "node-label.csv.gz", "nodetype-has-label.csv.gz"
_SPECIES = "species.csv.gz"  # ogbn-proteins' name for node_species.csv.gz
_FLOAT64 = np.dtype(np.float64)  # dtype of labels; NaN: no label
_SOME = 1000  # relations
_DATA, _LABEL_FILE = "data.npz", "node-label.npz"
_INDEX, _LABEL_ARRAY = "edge_index", "node_label"
_COUNTS = ("num_nodes_list", "num_edges_list")
_MAIN = {"node_feat": "x", "edge_feat": "feat"}


class OgbSource(Source):
    """A dataset's folder.  Splits of pairs over many relations (ogbl-biokg) are left out."""

    def add_rest(self, folder: Path) -> None:
        """Add what is the same in both layouts; call it after nodes and edges."""
        self.check_nodes(folder)
        releases = sorted(folder.glob("RELEASE_v*.txt"))
        self.add_files(*releases)
        self.undirected = not _names(folder, releases).isdisjoint(_ADD_INVERSE)
        root = folder / "split"
        names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        if len(names) > 1:
            raise BadInput.at(
                root, f"splits {' and '.join(names)}", "one", "move the others out of the folder"
            )
        if names:
            self._find_splits(root / names[0])

    def _find_splits(self, folder: Path) -> None:
        whole = folder / "split_dict.pt"
        if whole.is_file():
            self.add_files(whole)
            held = read_torch(whole)
            for split in SPLITS:
                if not isinstance(held, dict) or split not in held:
                    what = f"no {split!r}" if isinstance(held, dict) else f"a {kind_of(held)}"
                    expected = f"a dictionary of {', '.join(SPLITS)}"
                    raise BadInput.at(whole, what, expected, "save it again")
                self._add_loaded(
                    split, whole, f"{whole}: {split}", held[split], len(self.num_nodes)
                )
        elif any((folder / f"{split}.pt").exists() for split in SPLITS):
            for split in SPLITS:
                path = folder / f"{split}.pt"
                self.add_files(path)
                self._add_loaded(split, path, str(path), read_torch(path), 0)
        else:
            self._add_texts(folder)

    def _add_texts(self, folder: Path) -> None:
        types, flags = self.num_nodes, folder / "nodetype-has-split.csv.gz"
        if flags.exists():
            owners = {name: folder / name for name in read_flags(flags, types)}
            self.add_files(flags)
        elif len(types) == 1 and not any(p.is_dir() for p in folder.iterdir()):
            owners = {next(iter(types)): folder}
        else:
            owners = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
            if not owners:
                raise BadInput.at(folder, "no folders", f"some of {', '.join(types)}", "add them")
        for name, owner in owners.items():
            if name not in types:
                expected = f"of {', '.join(types)}"
                raise BadInput.at(owner, f"a split of type {name!r}", expected, "correct its name")
            for split in SPLITS:
                self.add_split(name, TextIds(split, owner / f"{split}.csv.gz", types[name], name))

    def _add_loaded(self, split: str, path: Path, where: str, value: Any, one_list: int) -> None:
        """Add a split: a list for the only type (if `one_list` is 1), lists by type, or pairs."""
        types, dot = self.num_nodes, "." if where != str(path) else ": "
        if isinstance(value, Placed | GivenArray) and one_list == 1:
            rows = open_tensor(path, where, value, "a tensor")
            self.add_split(next(iter(types)), id_rows(split, rows))
            return
        if not isinstance(value, dict):
            expected = "a dictionary by type" if len(types) > 1 else "a tensor or a dictionary"
            raise BadInput.at(where, f"a {kind_of(value)}", expected, "save it again")
        if value and set(value) <= set(types):
            for name, ids in value.items():
                rows = open_tensor(path, f"{where}{dot}{name}", ids, "a tensor")
                self.add_split(name, id_rows(split, rows))
            return
        if _OTHER_TYPES in value:
            return
        columns = next((c for c in _PAIRS if set(c) <= set(value)), None)
        if columns is None or len(self._edges) != 1:
            keys = ", ".join(map(str, value)) or "nothing"
            expected = f"types of nodes ({', '.join(types)}) or pairs of one relation (edge)"
            raise BadInput.at(where, f"a dictionary of {keys}", expected, "save it again")
        (ends,) = self._edges
        pairs = {split: columns, f"{split}_negative": (_NEGATIVES,)}
        for name, fields in pairs.items():
            if set(fields) <= set(value):
                files = [
                    open_tensor(path, f"{where}{dot}{field}", value[field], "a tensor")
                    for field in fields
                ]
                if len(files) == 1:
                    self.add_split(ends, id_rows(name, files[0], ((2,),)))
                else:
                    src, dst = (id_rows(name, file) for file in files)
                    self.add_split(ends, _pairs(name, src, dst, fields[0]))


def _pairs(name: str, src: ArrayRows, dst: ArrayRows, first: str) -> Rows:
    """Pairs of nodes in two lists; `first`: name of the first list.  Raises BadInput."""
    if dst.form.num_rows != src.form.num_rows:
        raise BadInput.at(
            dst.form.where, f"{dst.form.num_rows} rows", f"{src.form.num_rows} as in {first}",
            "save it again",
        )  # fmt: skip
    dtype = np.result_type(src.form.dtype, dst.form.dtype)
    form = src.form._replace(name=name, dtype=dtype, row_shape=(2,))
    return Rows(form, partial(_stacked, src, dst), src.path)


def _stacked(src: ArrayRows, dst: ArrayRows, count: int) -> Iterator[NDArray[Any]]:
    for ends in zip(src.pieces(count), dst.pieces(count), strict=True):
        yield np.stack(ends, axis=1)


def read_flags(path: Path, types: Mapping[str, int]) -> list[str]:
    """Types flagged in a table that has types as columns, and one row of truth values."""
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


def _names(folder: Path, releases: Sequence[Path]) -> set[str]:
    """Names of the dataset, from its folder and from its release notes."""
    match = _FOLDER_NAME.fullmatch(folder.resolve().name)
    notes = " ".join(p.read_text(errors="replace") for p in releases)
    return {*([match[1]] if match else []), *_RELEASE_NAME.findall(notes)}


class OgbCsvSource(OgbSource):
    """A dataset's folder with text in `raw`.  Raises BadInput."""

    layout = "ogb-csv"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with the edges and the number of nodes in `raw`, or the types and relations."""
        for names in ((_EDGE, _NODES), (_TRIPLETS, _TYPES)):
            found = [f"raw/{name}" for name in names if (path / "raw" / name).is_file()]
            if found:
                return " and ".join(found)
        return None

    def __init__(self, path: Path) -> None:
        raw = path / "raw"
        if not raw.is_dir():
            what = "no folder raw" if path.is_dir() else "no folder"
            raise BadInput.at(path, what, "a dataset of OGB", "is the path right?")
        super().__init__(path)
        if (raw / _TYPES).exists() or (raw / _TRIPLETS).exists():
            self._add_several(raw)
        else:
            (num_nodes,) = _only_row(Table(raw / _NODES, header=False))
            self.add_files(raw / _NODES)
            self._add_type(NODE, num_nodes, raw, _NODES, raw / _LABEL, (raw / _LABEL).exists())
            self._add_relation(raw, (NODE, RELATION, NODE))
        self.add_rest(path)

    def _add_several(self, raw: Path) -> None:
        counts = Table(raw / _TYPES)
        num_nodes = dict(zip(counts.names, _only_row(counts), strict=True))
        self.add_files(raw / _TYPES, raw / _TRIPLETS)
        flags = raw / _HAS_LABEL
        labels = {name: raw / "node-label" / name / _LABEL for name in num_nodes}
        if flags.exists():
            self.add_files(flags)
            labelled = read_flags(flags, num_nodes)
        else:
            labelled = [name for name, label in labels.items() if label.exists()]
        for name, count in num_nodes.items():
            folder, has_label = raw / "node-feat" / name, name in labelled and count > 0
            self._add_type(name, count, folder, _TYPES, labels[name], has_label)
        for ends in _triplets(Table(raw / _TRIPLETS, header=False), num_nodes):
            self._add_relation(raw / "relations" / "___".join(ends), ends)

    def _add_type(
        self, name: str, count: int, folder: Path, says: str, label: Path, has_label: bool
    ) -> None:
        self.num_nodes[name] = count
        self._add_arrays(name, folder, "node", count, says)
        if has_label:
            self.add_label(name, TextRows("label", label, count, says, dtype=_FLOAT64))

    def _add_relation(self, folder: Path, ends: Ends) -> None:
        (num_edges,) = _only_row(Table(folder / _EDGES, header=False))
        self.add_files(folder / _EDGES)
        self.add_edges(ends, TextEdges(folder / _EDGE, num_edges, _EDGES))
        self._add_arrays(ends, folder, "edge", num_edges, _EDGES)

    def _add_arrays(self, owner: Owner, folder: Path, kind: str, num_rows: int, says: str) -> None:
        """`<kind>-feat` and each `<kind>_<name>` of a folder."""
        if num_rows == 0:
            return
        main = folder / f"{kind}-feat{_SUFFIX}"
        if main.exists():
            name = "x" if kind == "node" else "feat"
            self.add_array(owner, TextRows(name, main, num_rows, says, main=True))
        paths = {
            path.name.removesuffix(_SUFFIX).removeprefix(f"{kind}_"): path
            for path in sorted(folder.glob(f"{kind}_*{_SUFFIX}"))
        }
        if kind == "node" and (folder / _SPECIES).exists():
            paths.setdefault("species", folder / _SPECIES)
        for name, path in paths.items():
            self.add_array(owner, TextRows(name, path, num_rows, says))


def _triplets(table: Table, types: Mapping[str, int]) -> list[Ends]:
    if len(table.names) != 3:
        raise BadInput.at(
            f"{table.path}:1", f"{len(table.names)} columns",
            "3: source type, relation, target type", "correct it",
        )  # fmt: skip
    found: list[Ends] = []
    columns = [
        [texts.at(i) for texts in table.texts(name, _SOME) for i in range(len(texts))]
        for name in table.names
    ]
    for row, (src, name, dst) in enumerate(zip(*columns, strict=True)):
        for end in (src, dst):
            if end not in types:
                raise BadInput.at(
                    table.place(row), f"node type {end!r}", f"one of {', '.join(types)}",
                    f"{_TYPES} lists the types",
                )  # fmt: skip
        if (src, name, dst) in found:
            raise BadInput.at(
                table.place(row), f"relation {src},{name},{dst} again", "each once", "drop the line"
            )
        found.append((src, name, dst))
    return found


def _only_row(table: Table) -> list[int]:
    """The only row of a table of node or edge counts; several rows would be several graphs."""
    rows = table.arrays(dict.fromkeys(table.names, INTEGER), 2)
    first = next(rows, None)
    if first is None:
        raise BadInput.at(table.path, "no numbers", "one row of them", "copy it again")
    if first[0].size > 1 or next(rows, None) is not None:
        raise BadInput.at(
            table.path, "several rows, a graph each", "one graph", "take one graph out of them"
        )
    numbers = [int(column[0]) for column in first]
    if min(numbers) < 0:
        raise BadInput.at(table.place(0), min(numbers), "at least 0", "correct it")
    return numbers


class OgbBinarySource(OgbSource):
    """A dataset's folder with arrays in `raw`.  Raises BadInput."""

    layout, marks = "ogb-binary", (f"raw/{_DATA}",)

    def __init__(self, path: Path) -> None:
        data, labels = path / "raw" / _DATA, path / "raw" / _LABEL_FILE
        members = list_members(data)
        for name in members:
            if not name.startswith(("node_", "edge_")) and name not in _COUNTS:
                raise BadInput.at(
                    data, f"array {name!r}", "names that begin with node_ or edge_", "take it out"
                )
        num_nodes, num_edges = (_only_number(ZipArray(data, name)) for name in _COUNTS)
        super().__init__(path, {NODE: num_nodes})
        ends: Ends = (NODE, RELATION, NODE)
        edges = EdgeArray(ZipArray(data, _INDEX))
        if edges.num_edges != num_edges:
            raise BadInput.at(
                edges.where, f"{edges.num_edges} edges", f"{num_edges}, as {_COUNTS[1]} says",
                "are they of one graph?",
            )  # fmt: skip
        self.add_edges(ends, edges)
        for name in sorted(members, key=lambda n: (n not in _MAIN, n)):  # the main array first
            if name not in (*_COUNTS, _INDEX):
                of_nodes, array = name.startswith("node_"), ZipArray(data, name)
                count, says = (num_nodes, _COUNTS[0]) if of_nodes else (num_edges, _COUNTS[1])
                rows = ArrayRows(
                    _MAIN.get(name, name[5:]), array, count, f"as {says} says", name not in _MAIN
                )
                self.add_array(NODE if of_nodes else ends, rows)
        if labels.exists():
            array, says = ZipArray(labels, _LABEL_ARRAY), f"as {_COUNTS[0]} says"
            self.add_label(NODE, ArrayRows("label", array, num_nodes, says, single=True))
        self.add_rest(path)


def _only_number(array: ZipArray) -> int:
    array.check(array.size == 1 and array.dtype.kind in "iu", "one integer: one graph",
                "take one graph out of them")  # fmt: skip
    number = int(array.flat().read(0, 1)[0])
    if number < 0:
        raise BadInput.at(array.where, number, "at least 0", "correct it")
    return number
