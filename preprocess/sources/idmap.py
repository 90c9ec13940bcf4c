"""Map keys of nodes (texts or integers) to ids from 0 by first appearance, within a memory budget.

A pass numbers keys in a table in memory until the table is full.  Later keys that are not in it are
written to files for the next pass, which continues with an empty table.  So ids follow the order of
first appearance whatever the memory, and each pass reads only the keys left over by the last one.

Keys are equal only if their bytes are; hashes just find candidates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall
from blockstore.units import format_bytes
from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.arrow import Texts
from preprocess.kernels.keys import (
    ADD,
    DEFINE,
    DONE,
    NO_ROOM,
    REFER,
    TWICE,
    WAITS,
    HashedKeys,
    KeyTable,
    fill_slots,
    find_keys,
    hash_keys,
)

PIECE_ROWS = 1 << 14  # keys looked up at a time
MIN_BYTES = 16 << 20
_FIXED_BYTES = 8 << 20  # pieces of a table being parsed
_SLOT_BYTES, _KEY_BYTES = 4, 16  # of the table, for a slot, and for the hash and start of a key
_FIRST_SLOTS = 1 << 6
_NARROW = 2**32 - 1  # number of ids that fit in uint32, except the mark of waiting keys


class KeyColumn(NamedTuple):
    """A column of keys that can be read repeatedly."""

    pieces: Callable[[], Iterator[Texts]]  # in order, at most PIECE_ROWS keys each
    place: Callable[[int], str]  # place of a row (from 0) for messages
    ids: Path  # file to write the ids to, unused for the defining column


class KeyMap(NamedTuple):
    num_keys: int
    dtype: np.dtype[Any]  # of ids: uint32, or uint64 if there are too many nodes
    rows: tuple[int, ...]  # number of rows of each referring column


class KeyTwice(BadInput):
    """A key is defined twice."""


class _TooMany(Exception):
    """More keys than ids of the dtype."""


def table_bytes_of(mem_bytes: int) -> int:
    """Memory of the table.  Raises BudgetTooSmall."""
    if mem_bytes < MIN_BYTES:
        raise BudgetTooSmall(
            f"--mem {format_bytes(mem_bytes)}: expected at least --mem "
            f"{MIN_BYTES >> 20}M to map the ids of nodes"
        )
    return (mem_bytes - _FIXED_BYTES) * 3 // 4


def map_keys(
    defined: KeyColumn | None,
    referring: Sequence[KeyColumn],
    folder: Path,
    table_bytes: int,
    show: Callable[[bytes], str],
    advance: Callable[[int], None],
) -> KeyMap:
    """Number the keys of a node type, and write the ids of each column that refers to them.

    defined    keys of all nodes, each once; None: nodes are the keys in the other columns, in order
               of first appearance, column after column
    folder     for temporary files
    show       formats a key for messages
    advance    called with the number of rows that are done

    Raises BadInput: a key is defined twice, or named but not defined; BudgetTooSmall.
    """
    how = ADD if defined is None else REFER
    columns = [(column, how) for column in referring]
    if defined is not None:
        columns.insert(0, (defined, DEFINE))
    for dtype in (np.dtype(np.uint32), np.dtype(np.uint64)):
        passes = _Passes(columns, folder, table_bytes, show, dtype)
        try:
            while passes.left:
                passes.run(advance)
        except _TooMany:
            continue
        finally:
            for path in folder.glob("keymap-*"):
                path.unlink()
        rows = passes.rows[len(columns) - len(referring) :]
        return KeyMap(passes.num_keys, dtype, tuple(rows))
    raise AssertionError("more keys than uint64 can count")


class _Passes:
    """Passes over columns of keys.  Files in the folder, for column number c:

    keymap-c-sizes, keymap-c-bytes    lengths and bytes of the keys that wait for the next pass
    keymap-c-ids                      ids after the last pass, the largest number for a waiting key;
                                      the defining column has no such file
    """

    def __init__(
        self,
        columns: Sequence[tuple[KeyColumn, int]],
        folder: Path,
        table_bytes: int,
        show: Callable[[bytes], str],
        dtype: np.dtype[Any],
    ) -> None:
        self._columns, self._folder, self._table_bytes = columns, folder, table_bytes
        self._show, self._dtype, self._none = show, dtype, np.iinfo(dtype).max
        self._is_first = True
        self.num_keys = 0
        self.rows = [0] * len(columns)
        self._waiting = [1] * len(columns)  # waiting rows of each column; unknown before a pass

    @property
    def left(self) -> bool:
        """Whether keys wait for another pass."""
        return any(self._waiting)

    def run(self, advance: Callable[[int], None]) -> None:
        """Run one pass.  Raises _TooMany."""
        table = _Table(self._table_bytes)
        for c, (column, how) in enumerate(self._columns):
            if self._waiting[c]:
                self._map_column(c, column, how, table, advance)
        added = int(table.counts[0])
        if not added and self.left:
            raise BudgetTooSmall(
                f"{self._columns[0][0].place(0)}: a key too long to map with "
                f"{format_bytes(self._table_bytes)}, expected a larger --mem; give twice as much"
            )
        self.num_keys += added
        self._is_first = False

    def _map_column(
        self, c: int, column: KeyColumn, how: int, table: "_Table", advance: Callable[[int], None]
    ) -> None:
        # in the defining column ids are row numbers, and all rows before this pass have theirs
        row = self.num_keys if how == DEFINE else 0
        waiting = 0
        pieces = self._first_pieces(column) if self._is_first else self._waiting_pieces(c, how)
        if how != DEFINE and self._is_first:
            column.ids.unlink(missing_ok=True)
        elif how != DEFINE:
            column.ids.rename(self._path(c, "ids"))
        with ExitStack() as held:
            out, sizes, data = (
                held.enter_context(ArrayFile(path, dtype))
                for path, dtype in (
                    (self._path(c, "new") if how == DEFINE else column.ids, self._dtype),
                    (self._path(c, "new-sizes"), np.uint32), (self._path(c, "new-bytes"), np.uint8),
                )
            )  # fmt: skip
            for keys, ids in pieces:
                places = np.flatnonzero(ids == self._none)
                numbers = self._find(keys, places + row, column, how, table)
                late = np.flatnonzero(numbers == WAITS)
                found = numbers.astype(self._dtype, copy=False)
                found += self._dtype.type(self.num_keys)
                found[late] = self._none
                if places.size == ids.size:  # the usual case: none has an id yet
                    ids = found
                else:
                    ids[places] = found
                if late.size:
                    some = pick(keys, late)
                    sizes.append(np.diff(some.offsets))
                    data.append(some.data)
                if how != DEFINE:
                    out.append(ids)
                waiting += late.size
                row += ids.size
                advance(len(keys) - late.size)
        self._path(c, "new-sizes").replace(self._path(c, "sizes"))
        self._path(c, "new-bytes").replace(self._path(c, "bytes"))
        self._waiting[c], self.rows[c] = waiting, row

    def _find(
        self, keys: Texts, rows: NDArray[np.int64], column: KeyColumn, how: int, table: "_Table"
    ) -> NDArray[np.uint32]:
        """Numbers in the table, or WAITS.  Raises BadInput, with the row; _TooMany."""
        found = table.find(keys, how)
        if self.num_keys + int(table.counts[0]) > _NARROW and self._dtype == np.uint32:
            raise _TooMany
        if found.why == DONE:
            return found.numbers
        place = column.place(int(rows[found.at]))
        key = self._show(keys.data[keys.offsets[found.at] : keys.offsets[found.at + 1]].tobytes())
        if found.why == TWICE:
            first = column.place(self.num_keys + int(found.numbers[found.at]))
            raise KeyTwice.at(
                place, f"node id {key} again, first in {first}", "each node once", "remove one"
            )
        raise BadInput.at(
            place, f"node id {key}", "one that the table of nodes has",
            "add the node, or remove the edge",
        )  # fmt: skip

    def _path(self, c: int, kind: str) -> Path:
        return self._folder / f"keymap-{c}-{kind}"

    def _first_pieces(self, column: KeyColumn) -> Iterator[tuple[Texts, NDArray[Any]]]:
        for keys in column.pieces():
            yield keys, np.full(len(keys), self._none, self._dtype)

    def _waiting_pieces(self, c: int, how: int) -> Iterator[tuple[Texts, NDArray[Any]]]:
        """Waiting keys in order, each piece with the ids so far of all rows around them."""
        with ExitStack() as held:
            sizes, data, old = (
                held.enter_context(ArrayFile(self._path(c, kind), dtype))
                for kind, dtype in (("sizes", np.uint32), ("bytes", np.uint8), ("ids", self._dtype))
            )
            row = at = 0
            num_rows = sizes.size if how == DEFINE else old.size
            for first in range(0, num_rows, PIECE_ROWS):
                count = min(PIECE_ROWS, num_rows - first)
                none = np.full(count, self._none, self._dtype)
                ids = none if how == DEFINE else old.read(first, count)
                num_keys = int(np.count_nonzero(ids == self._none))
                ends = np.cumsum(sizes.read(row, num_keys), dtype=np.int64)
                offsets = np.concatenate([np.zeros(1, np.int64), ends])
                yield Texts(offsets, data.read(at, int(offsets[-1]))), ids
                row, at = row + num_keys, at + int(offsets[-1])


class _Found(NamedTuple):
    numbers: NDArray[np.uint32]
    at: int  # position of the key at which the search stopped
    why: int  # DONE, TWICE or UNKNOWN


class _Table:
    """A hash table of keys, numbered by first appearance, within `max_bytes`.

    It holds all keys seen before it was full; then no more are added.
    """

    def __init__(self, max_bytes: int) -> None:
        self._maximum = max_bytes
        self.counts = np.zeros(1, np.int64)
        self.is_full = _table_bytes(_FIRST_SLOTS, _FIRST_SLOTS) > max_bytes
        self._slots = np.zeros(_FIRST_SLOTS, np.uint32)
        self._hashes = np.empty(_room(_FIRST_SLOTS), np.uint64)
        self._starts = np.zeros(self._hashes.size + 1, np.int64)
        self._held = np.empty(_FIRST_SLOTS, np.uint8)

    def find(self, keys: Texts, how: int) -> _Found:
        """Find or add keys up to the first error; WAITS for keys not in the table if it is full."""
        out, hashed = np.empty(len(keys), np.uint32), np.empty(len(keys), np.uint64)
        hash_keys(keys.offsets, keys.data, hashed)
        asked = HashedKeys(keys.offsets, keys.data, hashed)
        at, why = 0, NO_ROOM
        while why == NO_ROOM:
            table = KeyTable(self._slots, self._hashes, self._starts, self._held, self.counts)
            at, why = find_keys(table, asked, at, how, self.is_full, out)
            del table  # arrays can be resized in place only if nothing refers to them
            if why == NO_ROOM:
                self._grow(int(keys.offsets[at + 1] - keys.offsets[at]))
        return _Found(out, int(at), int(why))

    def _grow(self, key_bytes: int) -> None:
        """Make room for at least one more key of `key_bytes`, or mark the table as full."""
        count = int(self.counts[0])
        slots, held = self._slots.size, self._held.size
        if count == self._hashes.size:
            slots *= 2
        need = int(self._starts[count]) + key_bytes
        if need > held:
            spare = self._maximum - _table_bytes(slots, 0)
            held = max(need, min(2 * held, spare))
        if _table_bytes(slots, held) > self._maximum or slots > 1 << 32:
            self.is_full = True
            return
        if held > self._held.size:
            self._held.resize(held, refcheck=False)  # in place: not both copies at the same time
        if slots > self._slots.size:
            self._hashes.resize(_room(slots), refcheck=False)
            self._starts.resize(_room(slots) + 1, refcheck=False)
            self._slots = np.zeros(0, np.uint32)
            self._slots = np.zeros(slots, np.uint32)
            fill_slots(self._slots, self._hashes, count)


def pick(keys: Texts, rows: NDArray[np.int64]) -> Texts:
    """Select some keys of a piece, in order."""
    sizes = np.diff(keys.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    # added to the position of a byte in the result, this gives its position in `keys.data`
    shift = np.repeat(keys.offsets[:-1][rows] - offsets[:-1], sizes)
    return Texts(offsets, keys.data[np.arange(offsets[-1]) + shift])


def _room(slots: int) -> int:
    return slots // 8 * 5


def _table_bytes(slots: int, held: int) -> int:
    return slots * _SLOT_BYTES + _room(slots) * _KEY_BYTES + held
