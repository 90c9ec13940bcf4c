"""Ids of nodes in tables: what their owner calls them, and the numbers from 0 that a store has."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.arrow import INTEGER, Texts
from preprocess.files.tables import BadCell
from preprocess.ingest.prepare import Preparation
from preprocess.pipeline.stage import Facts
from preprocess.sources.columns import EdgeTables, NodeTables, TableSequence
from preprocess.sources.idmap import PIECE_ROWS, KeyColumn, KeyTwice, map_keys, pick, table_bytes_of
from preprocess.sources.source import EdgePieces

ROW, SAME, INTEGERS, TEXTS = "row", "same", "integer", "text"  # what the ids of a type are
_ENDS = ("src", "dst")

# of an end of an edge table: tables, column, and the file of its ids
_Column = tuple[TableSequence, str, str]


class NodeIds:
    """The ids of all types, once they are mapped.

    Of each type they are numbers of rows, from 0; or integers that say the same; or integers, or
    texts, that are mapped.  Files in the folder hold the ids of each mapped column of edges.
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
            "count edges", lambda: {str(i): self.num_edges(i) for i in range(len(self._edges))},
            lambda _: (),
        )  # fmt: skip
        self._counts = {int(number): count for number, count in counts.items()}

    def kind(self, node_type: str) -> str:
        """What the ids of a type are; "" until they are mapped."""
        return str(self._facts[node_type]["kind"]) if node_type in self._facts else ""

    def num_nodes(self, node_type: str) -> int:
        """Of a type; where edges name the nodes at most so many, until they are mapped."""
        if node_type in self._facts:
            return int(self._facts[node_type]["nodes"])
        tables = self._nodes[node_type].tables
        if tables is not None:
            return tables.num_rows()
        return sum(t.num_rows() for t, _, _ in self._columns(node_type))

    def num_edges(self, number: int) -> int:
        """Of an edge table: as many as a column has that was mapped, else text is parsed once."""
        if number not in self._counts:
            mapped = self._mapped(number, 0) or self._mapped(number, 1)
            num_rows = mapped[0] if mapped else self._edges[number].tables.num_rows()
            self._counts[number] = num_rows
        return self._counts[number]

    def ends(self, number: int, count: int) -> EdgePieces:
        """(src, dst) of an edge table, in order; those that are not mapped are not checked."""
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
        """The owner's ids of a mapped type, in the order of the store's; integers are 8 bytes."""
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
                # new ones come in order: an id above all before it is at its first place
                most = np.maximum.accumulate(np.concatenate([[known - 1], ids]))
                new = np.flatnonzero(most[1:] > most[:-1])
                known = int(most[-1]) + 1
                yield pick(keys, new)

    def _mapped(self, number: int, end: int) -> tuple[int, str] | None:
        """(rows, dtype) of the ids of an end of an edge table; None where they are not mapped."""
        facts = self._facts.get(self._edges[number].ends[end][0], {})
        found = facts.get("columns", {}).get(_file(number, end))
        return None if found is None else (found[0], found[1])

    def _ids(self, file: str, dtype: str, row: int, count: int) -> NDArray[Any]:
        """Ids of a mapped column from a row on."""
        with ArrayFile(self._folder / file, dtype) as held:
            return held.read(row, count)

    def _columns(self, node_type: str) -> list[_Column]:
        """All ends of a type, in order."""
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
            defined = KeyColumn(pieces, node.tables.place, self._folder / "keymap-defined")
        referring = [
            KeyColumn(_key_pieces(tables, key, kind), tables.place, self._folder / file)
            for tables, key, file in columns
        ]
        left = sum(tables.guess_rows() for tables, _, _ in columns)
        left += node.tables.guess_rows() if node.tables else 0
        with preparation.progress.stage(f"ids of {node.name}", left, "ids") as stage:

            def advance(rows: int) -> None:
                """No further than the number that was guessed."""
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
    """Name of the file of ids of one end of an edge table."""
    return f"edges-{number}-{_ENDS[end]}"


def _count_same(node: NodeTables) -> int | None:
    """How many nodes there are, if the ids are 0, 1, 2, ... in order.  Raises BadCell."""
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
