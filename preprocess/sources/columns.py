"""Which columns of tables are nodes, edges, arrays and splits, and how they are read.

The user's ids of nodes, integers or texts, are mapped to the store's numbers from 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.arrow import FLAG, INTEGER, TEXT, ColumnType, Texts
from preprocess.files.tables import BadCell, Table, joined
from preprocess.ingest.contents import SPLITS
from preprocess.ingest.prepare import Preparation
from preprocess.pipeline.stage import Facts
from preprocess.sources.idmap import PIECE_ROWS, KeyColumn, KeyTwice, map_keys, pick, table_bytes_of
from preprocess.sources.source import EdgePieces, SourceRows

_FLOAT64 = np.dtype(np.float64)
_WORDS = {
    "train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test",
    "": "", "none": "",
}  # fmt: skip
_SPLIT_ROWS = 1 << 16
ROW, SAME, INTEGERS, TEXTS = "row", "same", "integer", "text"  # kinds of ids: see `NodeIds`
_ENDS = ("src", "dst")

# one end of an edge table: tables, column, and the file of its ids
_Column = tuple["TableSequence", str, str]


class Columns(NamedTuple):
    """An array made of one or several columns, side by side."""

    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """How the split of a row is given: by a word in one column, or by a mask for each split."""

    word: str = ""
    masks: tuple[tuple[str, str], ...] = ()  # (split, column)

    def __bool__(self) -> bool:
        return bool(self.word or self.masks)


class TableSequence:
    """Concatenated tables with the same columns."""

    def __init__(self, tables: Sequence[Table], remedy: str) -> None:
        """`remedy`: advice to the user if a column is missing."""
        assert tables
        self._tables, self._remedy = tuple(tables), remedy
        self._types: dict[str, ColumnType] = {}
        self._seen: list[dict[str, ColumnType]] = []

    @property
    def paths(self) -> list[Path]:
        return [t.path for t in self._tables]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, from the first table."""
        return self._tables[0].names

    @property
    def where(self) -> str:
        return str(self._tables[0].path)

    def num_rows(self) -> int:
        """Rows of all tables; text is parsed once."""
        return sum(t.num_rows() for t in self._tables)

    def guess_rows(self) -> int:
        return sum(t.guess_rows() for t in self._tables)

    def type_of(self, name: str) -> ColumnType:
        """The type of a column.  Raises BadInput: it is missing, or its width varies."""
        if name not in self._types:
            for table in self._tables:
                table.check_has(name, self._remedy)
            self._seen = self._seen or [t.look() for t in self._tables]
            held = self._seen[0][name]
            for table, seen in zip(self._tables, self._seen, strict=True):
                held = self._common(table, name, held, seen[name])
            self._types[name] = held
        return self._types[name]

    def arrays(self, columns: Mapping[str, ColumnType], count: int) -> Iterator[list[NDArray[Any]]]:
        for table in self._tables:
            yield from table.arrays(columns, count)

    def texts(self, name: str, count: int) -> Iterator[Texts]:
        for table in self._tables:
            yield from table.texts(name, count)

    def words(self, name: str, words: Sequence[str], count: int) -> Iterator[NDArray[np.int32]]:
        for table in self._tables:
            yield from table.words(name, words, count)

    def place(self, row: int) -> str:
        for table in self._tables[:-1]:
            num_rows = table.num_rows()
            if row < num_rows:
                return table.place(row)
            row -= num_rows
        return self._tables[-1].place(row)

    def _common(self, table: Table, name: str, a: ColumnType, b: ColumnType) -> ColumnType:
        if a == b:
            return a
        if a.dtype is None or b.dtype is None:
            return TEXT  # numbers can be read as text
        if a.width != b.width:
            raise BadInput.at(
                f"{table.path}: column {name!r}", b, f"{a} as in {self.where}", "correct it"
            )
        return ColumnType(np.result_type(a.dtype, b.dtype), a.width)


@dataclass(frozen=True, slots=True)
class NodeTables:
    """The nodes of a type, one for each row; without tables, the nodes that appear in edges."""

    name: str
    tables: TableSequence | None
    key: str = ""  # column of ids; "": the id of a node is its row number, from 0
    kind: str = ""  # kind of ids: "integer", "text", or "" to infer it
    features: tuple[Columns, ...] = ()
    label: Columns | None = None
    splits: Splits = Splits()


@dataclass(frozen=True, slots=True)
class EdgeTables:
    """The edges of a relation, one for each row."""

    src: str
    name: str
    dst: str
    tables: TableSequence
    src_key: str
    dst_key: str
    features: tuple[Columns, ...] = ()
    splits: Splits = Splits()

    @property
    def ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(type, column of ids) for sources and for targets."""
        return (self.src, self.src_key), (self.dst, self.dst_key)


class TableArray:
    """An array whose rows are those of columns of tables."""

    path = None  # the source registers the files of its tables itself

    def __init__(
        self,
        tables: TableSequence,
        array: Columns,
        num_rows: Callable[[], int],
        label: bool = False,
    ) -> None:
        """A label of one column is read as float64; NaN: no label.  Raises BadInput."""
        types = {name: tables.type_of(name) for name in array.columns}
        text = next((n for n, t in types.items() if t.dtype is None), None)
        if text is not None:
            raise BadInput.at(
                f"{tables.where}: column {text}", "text", "numbers, or numbers between commas",
                "make numbers of it, or leave the column out",
            )  # fmt: skip
        single = len(types) == 1 and not next(iter(types.values())).width
        dtypes = [t.dtype for t in types.values() if t.dtype is not None]
        dtype = _FLOAT64 if label and single else np.result_type(*dtypes)
        width = sum(t.width or 1 for t in types.values())
        shape = () if single else (width,)
        self.name, self._tables, self._num_rows = array.name, tables, num_rows
        self._types = {n: ColumnType(dtype, t.width) for n, t in types.items()}
        where = f"{tables.where}: column {', '.join(array.columns)}"
        self._form = SourceRows(array.name, dtype, shape, 0, "dense", where)

    @property
    def form(self) -> SourceRows:
        """Shape and dtype; `num_rows` is the current count of its type or relation."""
        return self._form._replace(num_rows=self._num_rows())

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        return joined(
            self._tables.arrays(self._types, count), self._form.row_shape, self._form.dtype
        )


def split_rows(tables: TableSequence, splits: Splits) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """(split, numbers of rows in it), some rows at a time, in order.  Raises BadInput."""
    for split, column in splits.masks:
        row = 0
        for (flags,) in tables.arrays({column: FLAG}, _SPLIT_ROWS):
            yield split, np.flatnonzero(flags) + row
            row += flags.size
    if not splits.word:
        return
    words, names = list(_WORDS), np.array(list(_WORDS.values()))
    row = 0
    for found in tables.words(splits.word, words, _SPLIT_ROWS):
        if (found < 0).any():
            raise BadInput.at(
                tables.place(row + int(np.argmax(found < 0))),
                f"another word in column {splits.word!r}", "train, valid, test, or nothing",
                "correct the line",
            )  # fmt: skip
        for split in SPLITS:
            yield split, np.flatnonzero(names[found] == split) + row
        row += found.size


class NodeIds:
    """Maps the ids of all types.

    The ids of a type are row numbers from 0 (ROW), or a column of integers equal to them (SAME), or
    INTEGERS or TEXTS that are mapped; the mapped ids of each column of edges are in a file.
    """

    def __init__(self, nodes: Sequence[NodeTables], edges: Sequence[EdgeTables]) -> None:
        self._nodes = {n.name: n for n in nodes}
        self._edges = tuple(edges)
        self._folder = Path()
        self._facts: dict[str, Facts] = {}
        self._counts: dict[int, int] = {}  # rows of each edge table

    def prepare(self, preparation: Preparation) -> None:
        """Map every type, and count the edges.  Raises BadInput, BudgetTooSmall."""
        self._folder = preparation.folder
        for node in self._nodes.values():
            self._facts[node.name] = preparation.record(
                f"ids of {node.name}",
                partial(self._map, node, preparation),
                lambda facts: facts["columns"],
            )
        self._counts.clear()
        counts = preparation.record(
            "count edges", lambda: {str(i): self.num_edges(i) for i in range(len(self._edges))}, ()
        )
        self._counts = {int(number): count for number, count in counts.items()}

    def kind(self, node_type: str) -> str:
        """Kind of a type's ids; "" until they are mapped."""
        return str(self._facts[node_type]["kind"]) if node_type in self._facts else ""

    def num_nodes(self, node_type: str) -> int:
        """Nodes of a type; until ids are mapped, an upper bound if it has no tables."""
        if node_type in self._facts:
            return int(self._facts[node_type]["nodes"])
        tables = self._nodes[node_type].tables
        if tables is not None:
            return tables.num_rows()
        return sum(t.num_rows() for t, _, _ in self._columns(node_type))

    def num_edges(self, number: int) -> int:
        """Rows of an edge table, known from a mapped column; otherwise text is parsed once."""
        if number not in self._counts:
            mapped = self._mapped(number, 0) or self._mapped(number, 1)
            num_rows = mapped[0] if mapped else self._edges[number].tables.num_rows()
            self._counts[number] = num_rows
        return self._counts[number]

    def ends(self, number: int, count: int) -> EdgePieces:
        """(src, dst) of an edge table, in order; ids that are not mapped are not checked."""
        edge, mapped = self._edges[number], [self._mapped(number, end) for end in (0, 1)]
        raw = {key: INTEGER for m, (_, key) in zip(mapped, edge.ends, strict=True) if m is None}
        num_edges, row = self.num_edges(number), 0
        sizes = (min(count, num_edges - first) for first in range(0, num_edges, count))
        pieces: Iterator[tuple[int, dict[str, NDArray[Any]]]] = (
            ((a[0].size, dict(zip(raw, a, strict=True))) for a in edge.tables.arrays(raw, count))
            if raw
            else ((size, {}) for size in sizes)
        )
        for size, read in pieces:
            src, dst = (
                read[edge.ends[end][1]] if m is None
                else self._ids(_file(number, end), m[1], row, size)
                for end, m in enumerate(mapped)
            )  # fmt: skip
            yield src, dst
            row += size

    def keys(self, node_type: str) -> Iterator[Texts]:
        """The user's ids of a mapped type, in the order of the new ones; integers have 8 bytes."""
        node = self._nodes[node_type]
        kind = self.kind(node_type)
        if node.tables is not None:
            yield from _key_pieces(node.tables, node.key, kind)()
            return
        known = 0
        for tables, key, file in self._columns(node_type):
            row, dtype = 0, self._facts[node_type]["columns"][file][1]
            for keys in _key_pieces(tables, key, kind)():
                ids = self._ids(file, dtype, row, len(keys)).astype(np.int64)
                row += len(keys)
                # ids ascend by first appearance: an id above all before it appears here first
                maximum = np.maximum.accumulate(np.concatenate([[known - 1], ids]))
                new = np.flatnonzero(maximum[1:] > maximum[:-1])
                known = int(maximum[-1]) + 1
                yield pick(keys, new)

    def _mapped(self, number: int, end: int) -> tuple[int, str] | None:
        """(rows, dtype) of the ids at an end of an edge table; None if they are not mapped."""
        facts = self._facts.get(self._edges[number].ends[end][0], {})
        found = facts.get("columns", {}).get(_file(number, end))
        return None if found is None else (found[0], found[1])

    def _ids(self, file: str, dtype: str, row: int, count: int) -> NDArray[Any]:
        """`count` ids of a mapped column from a row on."""
        with ArrayFile(self._folder / file, dtype) as held:
            return held.read(row, count)

    def _columns(self, node_type: str) -> list[_Column]:
        """All columns of edge tables that refer to a type, in order."""
        return [
            (edge.tables, key, _file(number, end))
            for number, edge in enumerate(self._edges)
            for end, (name, key) in enumerate(edge.ends)
            if name == node_type
        ]

    def _map(self, node: NodeTables, preparation: Preparation) -> Facts:
        if node.tables is not None and not node.key:
            return {"kind": ROW, "nodes": node.tables.num_rows(), "columns": {}}
        columns = self._columns(node.name)
        held = [(node.tables, node.key)] if node.tables is not None else []
        held += [(tables, key) for tables, key, _ in columns]
        kinds = [tables.type_of(key) for tables, key in held]
        seem = all(k.dtype is not None and k.dtype.kind in "iuf" and not k.width for k in kinds)
        if node.kind == INTEGERS or (node.kind == "" and seem):
            try:
                same = _count_same(node)
                if same is not None:
                    return {"kind": SAME, "nodes": same, "columns": {}}
                return self._map_as(INTEGERS, node, columns, preparation)
            except (BadCell, KeyTwice):  # "x1" somewhere, or "01" and "1"
                if node.kind:
                    raise
        return self._map_as(TEXTS, node, columns, preparation)

    def _map_as(
        self, kind: str, node: NodeTables, columns: list[_Column], preparation: Preparation
    ) -> Facts:
        defined = None
        if node.tables is not None:
            pieces = _key_pieces(node.tables, node.key, kind)
            defined = KeyColumn(pieces, node.tables.place, Path())
        referring = [
            KeyColumn(_key_pieces(tables, key, kind), tables.place, self._folder / file)
            for tables, key, file in columns
        ]
        left = sum(tables.guess_rows() for tables, _, _ in columns)
        left += node.tables.guess_rows() if node.tables else 0
        with preparation.progress.stage(f"ids of {node.name}", left, "ids") as stage:

            def advance(rows: int) -> None:
                """Advance, but not beyond the guessed number of rows."""
                nonlocal left
                stage.advance(min(rows, left))
                left -= min(rows, left)

            found = map_keys(
                defined, referring, self._folder, table_bytes_of(preparation.mem_bytes),
                _show_integer if kind == INTEGERS else _show_text, advance,
            )  # fmt: skip
        return {
            "kind": kind,
            "nodes": found.num_keys,
            "columns": {
                file: [num_rows, found.dtype.name]
                for (_, _, file), num_rows in zip(columns, found.rows, strict=True)
            },
        }


def _file(number: int, end: int) -> str:
    """Name of the file of ids at one end of an edge table."""
    return f"edges-{number}-{_ENDS[end]}"


def _count_same(node: NodeTables) -> int | None:
    """Number of nodes if the ids are 0, 1, 2, ... in order, else None.  Raises BadCell."""
    if node.tables is None:
        return None
    row = 0
    for (ids,) in node.tables.arrays({node.key: INTEGER}, PIECE_ROWS):
        if not np.array_equal(ids, np.arange(row, row + ids.size)):
            return None
        row += ids.size
    return row


def _key_pieces(tables: TableSequence, key: str, kind: str) -> Callable[[], Iterator[Texts]]:
    def integers() -> Iterator[Texts]:
        for (ids,) in tables.arrays({key: INTEGER}, PIECE_ROWS):
            data = np.ascontiguousarray(ids).view(np.uint8)
            yield Texts(np.arange(ids.size + 1, dtype=np.int64) * ids.itemsize, data)

    def texts() -> Iterator[Texts]:
        row = 0
        for keys in tables.texts(key, PIECE_ROWS):
            empty = np.diff(keys.offsets) == 0
            if empty.any():
                raise BadInput.at(
                    tables.place(row + int(np.argmax(empty))), f"nothing in column {key!r}",
                    "the id of a node", "fill it, or drop the row",
                )  # fmt: skip
            yield keys
            row += len(keys)

    return integers if kind == INTEGERS else texts


def _show_integer(key: bytes) -> str:
    return str(int.from_bytes(key, "little", signed=True))


def _show_text(key: bytes) -> str:
    return repr(key.decode(errors="replace"))
