"""Ids of nodes in tables: what their owner calls them, and the numbers from 0 that a store has."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.tables import INTEGER, BadCell, Texts
from preprocess.kernels.edges import first_outside
from preprocess.pipeline import Facts
from preprocess.prepare import Preparation
from preprocess.progress import Stage
from preprocess.sources.columns import EdgeTables, NodeTables, Tables
from preprocess.sources.idmap import PIECE_ROWS, KeyColumn, KeySizes, KeyTwice, map_keys
from preprocess.stages.array_file import ArrayFile

ROW, SAME, INTEGERS, TEXTS = "row", "same", "integer", "text"  # what the ids of a type are
_ENDS = ("src", "dst")
_STEPS = 3  # that `map_keys` counts for a row


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

    def prepare(self, preparation: Preparation) -> None:
        """Map every type.  Raises BadInput, BudgetTooSmall."""
        self._folder = preparation.folder
        for node in self._nodes.values():
            self._facts[node.name] = preparation.step(
                f"ids of {node.name}",
                partial(self._map, node, preparation),
                lambda facts: facts["columns"],
            )

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

    def num_edges(self, number: int) -> int | None:
        """Of an edge table, if a column of it was mapped."""
        for end, (node_type, _) in enumerate(self._edges[number].ends):
            found = self._facts.get(node_type, {}).get("columns", {})
            if _file(number, end) in found:
                return int(found[_file(number, end)][0])
        return None

    def edges(
        self, number: int, num_edges: int, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst) of an edge table, in order.  Raises BadInput: an id out of range."""
        edge = self._edges[number]
        ends = [_Mapped(self._folder / _file(number, i)) for i in (0, 1)]
        mapped = [self.kind(node_type) in (INTEGERS, TEXTS) for node_type, _ in edge.ends]
        raw = {key: INTEGER for m, (_, key) in zip(mapped, edge.ends, strict=True) if not m}
        pieces = edge.tables.arrays(raw, count) if raw else _no_columns(num_edges, count)
        row = 0
        for arrays in pieces:
            read = dict(zip(raw, arrays, strict=True)) if raw else {}
            size = arrays[0].size
            found = []
            for i, (node_type, key) in enumerate(edge.ends):
                if mapped[i]:
                    dtype = self._facts[node_type]["columns"][_file(number, i)][1]
                    found.append(ends[i].read(row, size, dtype))
                else:
                    self._check(read[key], edge.tables, key, row, node_type)
                    found.append(read[key])
            yield found[0], found[1]
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
            row, mapped = 0, _Mapped(self._folder / file)
            dtype = self._facts[node_type]["columns"][file][1]
            for keys in _key_pieces(tables, key, kind)():
                ids = mapped.read(row, len(keys), dtype).astype(np.int64)
                row += len(keys)
                # new ones come in order: an id above all before it is at its first place
                most = np.maximum.accumulate(np.concatenate([[known - 1], ids]))
                new = np.flatnonzero(most[1:] > most[:-1])
                known = int(most[-1]) + 1
                yield _pick(keys, new)

    def _columns(self, node_type: str) -> list[tuple[Tables, str, str]]:
        """(tables, column, file of ids) of all ends of a type, in order."""
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
        self,
        kind: str,
        node: NodeTables,
        columns: list[tuple[Tables, str, str]],
        preparation: Preparation,
    ) -> Facts:
        defined = None
        if node.tables is not None:
            pieces = _key_pieces(node.tables, node.key, kind)
            defined = KeyColumn(pieces, node.tables.place, Path())
        referring = [
            KeyColumn(_key_pieces(tables, key, kind), tables.place, self._folder / file)
            for tables, key, file in columns
        ]
        rows = sum(tables.guess_rows() for tables, _, _ in columns)
        rows += node.tables.guess_rows() if node.tables else 0
        with preparation.progress.stage(f"ids of {node.name}", rows, "ids") as stage:
            found = map_keys(
                defined, referring, self._folder, KeySizes.of(preparation.mem_bytes),
                _show_integer if kind == INTEGERS else _show_text, _Steps(stage, rows),
            )  # fmt: skip
        return {
            "kind": kind,
            "nodes": found.num_keys,
            "columns": {
                file: [ids.num_rows, ids.dtype.name]
                for (_, _, file), ids in zip(columns, found.columns, strict=True)
            },
        }

    def _check(self, ids: NDArray[Any], tables: Tables, key: str, row: int, node_type: str) -> None:
        num_nodes = self.num_nodes(node_type)
        bad = int(first_outside(ids, num_nodes))
        if bad >= 0:
            raise BadInput.at(
                tables.place(row + bad), f"node id {ids[bad]} in column {key!r}",
                f"0 to {num_nodes - 1}", f"there are {num_nodes} nodes of type {node_type}",
            )  # fmt: skip


class _Mapped:
    """Ids of a mapped column, read in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._out = np.empty(0, np.uint32)

    def read(self, row: int, count: int, dtype: str) -> NDArray[Any]:
        """Ids of rows [row, row + count); the array is reused."""
        if self._out.size < count or self._out.dtype != dtype:
            self._out = np.empty(count, dtype)
        out = self._out[:count]
        with ArrayFile(self._path, dtype) as file:
            file.read_into(row, out)
        return out


class _Steps:
    """Tells a stage how many rows are done, of about so many, when each counts three times."""

    def __init__(self, stage: Stage, rows: int) -> None:
        self._stage, self._rows = stage, rows
        self._steps = self._told = 0

    def __call__(self, steps: int) -> None:
        self._steps += steps
        rows = min(self._rows, self._steps // _STEPS)
        self._stage.advance(rows - self._told)
        self._told = rows


def _file(number: int, end: int) -> str:
    """Name of the file of ids of one end of an edge table."""
    return f"edges-{number}-{_ENDS[end]}"


def _no_columns(num_rows: int, count: int) -> Iterator[list[NDArray[Any]]]:
    """Pieces of no column, that only have a size."""
    rows = np.empty(min(num_rows, count), np.uint8)
    for first in range(0, num_rows, count):
        yield [rows[: min(count, num_rows - first)]]


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


def _key_pieces(tables: Tables, key: str, kind: str) -> Callable[[], Iterator[Texts]]:
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


def _pick(keys: Texts, rows: NDArray[np.int64]) -> Texts:
    """Some keys of a piece, in order."""
    sizes = np.diff(keys.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    # byte k of the result: its key's first byte, and how far into the key it is
    shift = np.repeat(keys.offsets[:-1][rows] - offsets[:-1], sizes)
    return Texts(offsets, keys.data[np.arange(offsets[-1]) + shift])


def _show_integer(key: bytes) -> str:
    return str(int.from_bytes(key, "little", signed=True))


def _show_text(key: bytes) -> str:
    return repr(key.decode(errors="replace"))
