"""OGB's layout in text: packed csv files without a header, of a graph of one type or of several.

    raw/edge.csv.gz               source,target
    raw/num-node-list.csv.gz      nodes; num-edge-list.csv.gz likewise
    raw/node-feat.csv.gz          a row a node; node-label.csv.gz, node_year.csv.gz likewise
    raw/edge-feat.csv.gz          a row an edge; edge_weight.csv.gz likewise
of several types:
    raw/num-node-dict.csv.gz      a header of types, then their nodes
    raw/triplet-type-list.csv.gz  source type,relation,target type
    raw/relations/<source type>___<relation>___<target type>/edge.csv.gz, num-edge-list.csv.gz, ...
    raw/node-feat/<type>/node-feat.csv.gz, node_year.csv.gz
    raw/node-label/<type>/node-label.csv.gz
    raw/nodetype-has-label.csv.gz a header of types, then True or False
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.tables import INTEGER, ColumnType, Table
from preprocess.source import SourceRows
from preprocess.sources.ogb import (
    Array,
    Ends,
    OgbSource,
    RelationPart,
    TypePart,
    check_names,
    read_flags,
)
from preprocess.sources.plain import NODE, RELATION

_SUFFIX = ".csv.gz"
_EDGE, _NODES, _EDGES = "edge.csv.gz", "num-node-list.csv.gz", "num-edge-list.csv.gz"
_TYPES, _TRIPLETS = "num-node-dict.csv.gz", "triplet-type-list.csv.gz"
_LABEL, _HAS_LABEL = "node-label.csv.gz", "nodetype-has-label.csv.gz"
_SPECIES = "species.csv.gz"  # what ogbn-proteins calls node_species.csv.gz
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_SOME = 1000  # relations


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
        if (raw / _TYPES).exists() or (raw / _TRIPLETS).exists():
            types, relations, files = _several(raw)
        else:
            types, relations, files = _single(raw)
        super().__init__(path, types, relations, files)


_Parts = tuple[dict[str, TypePart], list[RelationPart], list[Path]]


def _single(raw: Path) -> _Parts:
    (num_nodes,) = _only_row(Table(raw / _NODES, header=False))
    features = _arrays(raw, "node", num_nodes, _NODES)
    label = raw / _LABEL
    held = CsvRows(label, "label", num_nodes, _NODES) if label.exists() else None
    relation = _relation(raw, (NODE, RELATION, NODE))
    types = {NODE: TypePart(num_nodes, features, held)}
    return types, [relation], [raw / _NODES, raw / _EDGES]


def _several(raw: Path) -> _Parts:
    counts = Table(raw / _TYPES)
    num_nodes = dict(zip(counts.names, _only_row(counts), strict=True))
    files = [raw / _TYPES, raw / _TRIPLETS]
    flags = raw / _HAS_LABEL
    labels = {name: raw / "node-label" / name / _LABEL for name in num_nodes}
    if flags.exists():
        files.append(flags)
        labelled = read_flags(flags, num_nodes)
    else:
        labelled = [name for name, label in labels.items() if label.exists()]
    types = {
        name: TypePart(
            count,
            _arrays(raw / "node-feat" / name, "node", count, _TYPES),
            CsvRows(labels[name], "label", count, _TYPES) if name in labelled and count else None,
        )
        for name, count in num_nodes.items()
    }
    relations = []
    for ends in _triplets(Table(raw / _TRIPLETS, header=False), num_nodes):
        folder = raw / "relations" / "___".join(ends)
        relations.append(_relation(folder, ends))
        files.append(folder / _EDGES)
    return types, relations, files


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


def _relation(folder: Path, ends: Ends) -> RelationPart:
    (num_edges,) = _only_row(Table(folder / _EDGES, header=False))
    edges = CsvEdges(folder / _EDGE, num_edges, _EDGES)
    return RelationPart(ends, edges, _arrays(folder, "edge", num_edges, _EDGES))


def _arrays(folder: Path, kind: str, num_rows: int, said: str) -> list[Array]:
    """`<kind>-feat` and each `<kind>_<name>` of a folder."""
    if num_rows == 0:
        return []
    main = folder / f"{kind}-feat{_SUFFIX}"
    found: list[Array] = []
    if main.exists():
        found.append(CsvRows(main, "x" if kind == "node" else "feat", num_rows, said, main=True))
    paths = {
        path.name.removesuffix(_SUFFIX).removeprefix(f"{kind}_"): path
        for path in sorted(folder.glob(f"{kind}_*{_SUFFIX}"))
    }
    if kind == "node" and (folder / _SPECIES).exists():
        paths.setdefault("species", folder / _SPECIES)
    found += [CsvRows(path, name, num_rows, said) for name, path in paths.items()]
    check_names(found)
    return found


def _only_row(table: Table) -> list[int]:
    """Numbers of nodes or edges, of one graph."""
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


class CsvRows:
    """An array in text, a row a node or an edge: int64 where all columns are, else float32.

    Labels are float64, NaN where there is none.
    """

    def __init__(self, path: Path, name: str, num_rows: int, said: str, main: bool = False) -> None:
        """`said` is the file that says how many rows; `main`: one column is a row of one."""
        self.path, self._said, self._table = path, said, Table(path, header=False)
        width = len(self._table.names)
        row_shape = (width,) if main or width > 1 else ()
        dtype = _FLOAT64 if path.name == _LABEL else self._dtype()
        self.form = SourceRows(name, dtype, row_shape, num_rows, "dense", str(path))

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        done = 0
        for piece in self._table.matrix(self.form.dtype, count):
            done += piece.shape[0]
            _check_count(self._table, done, self.form.num_rows, self._said)
            yield piece.reshape(-1, *self.form.row_shape)
        _check_count(self._table, done, self.form.num_rows, self._said, ended=True)

    def _dtype(self) -> np.dtype[Any]:
        """By the first piece of the text."""
        held = self._table.look()
        for name, kind in held.items():
            if kind not in (INTEGER, ColumnType(_FLOAT32)):
                next(self._table.arrays({name: ColumnType(_FLOAT32)}, 1))  # which names the line
                raise BadInput.at(f"{self.path}: column {name}", kind, "numbers", "correct it")
        return INTEGER.dtype if set(held.values()) == {INTEGER} and INTEGER.dtype else _FLOAT32


class CsvEdges:
    """Edges in text: source,target."""

    def __init__(self, path: Path, num_edges: int, said: str) -> None:
        self.path, self.num_edges, self._said = path, num_edges, said
        self._table = Table(path, header=False)
        if num_edges == 0:
            return
        if len(self._table.names) != 2:
            raise BadInput.at(
                f"{path}:1", f"{len(self._table.names)} columns", "2, source and target",
                "correct it",
            )  # fmt: skip
        next(self.pieces(1))  # a header is refused

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), at most `count` at a time."""
        if self.num_edges == 0:
            return
        done = 0
        for src, dst in self._table.arrays({"0": INTEGER, "1": INTEGER}, count):
            done += src.size
            _check_count(self._table, done, self.num_edges, self._said)
            yield src, dst
        _check_count(self._table, done, self.num_edges, self._said, ended=True)

    def place(self, end: int, row: int) -> str:
        """Of an id: its line."""
        return self._table.place(row)


def _check_count(table: Table, done: int, num_rows: int, said: str, ended: bool = False) -> None:
    if done > num_rows:
        raise BadInput.at(
            table.place(num_rows),
            "one more row",
            f"{num_rows}, as {said} says",
            "are they of one graph?",
        )
    if ended and done < num_rows:
        raise BadInput.at(
            f"{table.path}: end", f"{done} rows", f"{num_rows}, as {said} says", "copy it again"
        )
