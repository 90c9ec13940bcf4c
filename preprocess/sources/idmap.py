"""Keys of nodes, texts or integers, to ids from 0 in order of first appearance, within a budget.

Where the keys of all nodes fit into memory, one table there has them.  Otherwise keys are spread
over buckets by their hash, in files; a bucket's keys fit, and are numbered bucket by bucket.  Only
the bucket of each key is remembered, in order: it says from which bucket the next number comes, so
everything is brought back in order by reading streams.

A hash only says where to look: keys are equal where their bytes are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall
from blockstore.units import format_bytes
from preprocess.errors import BadInput
from preprocess.files.tables import Texts
from preprocess.kernels.keys import (
    ADD,
    DEFINE,
    DONE,
    LENGTH_BYTES,
    NO_ROOM,
    REFER,
    TWICE,
    UNKNOWN,
    HashedKeys,
    KeyTable,
    fill_slots,
    find_keys,
    hash_keys,
    merge_buckets,
    parse_keys,
    rank_new,
    spread_keys,
    take_ids,
)
from preprocess.stages.array_file import ArrayFile

PIECE_ROWS = 1 << 14  # keys that are asked for at a time
LEAST_BYTES = 16 << 20
_FIXED_BYTES = 8 << 20  # pieces of a table being parsed
_SLOT_BYTES, _KEY_BYTES = 4, 16  # of the table: a slot; hash and start of a key
_FIRST_SLOTS = 1 << 6
_STEPS = 3  # that each row goes through


class KeyColumn(NamedTuple):
    """A column of keys, that can be read again and again."""

    pieces: Callable[[], Iterator[Texts]]  # in order, at most PIECE_ROWS keys each
    place: Callable[[int], str]  # of a row, from 0, for messages
    ids: Path  # file that gets the ids, unless the column is the one that defines


class IdFile(NamedTuple):
    """Ids of a column, one a row."""

    num_rows: int
    dtype: np.dtype[Any]  # uint32, or uint64 where there are more nodes than that


class KeyMap(NamedTuple):
    """What a type's keys became."""

    num_keys: int
    defined: int  # rows of the column that defines, 0 where there is none
    columns: tuple[IdFile, ...]  # of those that refer


@dataclass(frozen=True, slots=True)
class KeySizes:
    """How the memory is shared out."""

    table_bytes: int  # of the keys in memory at a time
    buckets: int  # a power of two, from 2 to 2**16
    buffer_bytes: int  # of each bucket

    @classmethod
    def of(cls, mem_bytes: int) -> "KeySizes":
        """Raises BudgetTooSmall."""
        if mem_bytes < LEAST_BYTES:
            raise BudgetTooSmall(
                f"--mem {format_bytes(mem_bytes)}: expected at least --mem "
                f"{LEAST_BYTES >> 20}M to map the ids of nodes"
            )
        spare = mem_bytes - _FIXED_BYTES
        most = spare // 4 // (16 << 10)
        return cls(spare // 2, min(2048, 1 << (most.bit_length() - 1)), 16 << 10)


class KeyTwice(BadInput):
    """A key is defined again."""


class _Full(Exception):
    """The table may not grow any more."""


def map_keys(
    defined: KeyColumn | None,
    referring: Sequence[KeyColumn],
    folder: Path,
    sizes: KeySizes,
    show: Callable[[bytes], str],
    advance: Callable[[int], None],
) -> KeyMap:
    """Number the keys of a node type, and write the ids of each column that refers to them.

    defined    keys of all nodes, each once; None: nodes are what the others name, in order of
               first appearance, column after column
    folder     for temporary files
    show       a key, for a person
    advance    takes the rows that are done; each row counts three times

    Raises BadInput: a key is defined twice, or named but not defined; BudgetTooSmall.
    """
    columns = _Columns(defined, tuple(referring), show)
    try:
        return _in_memory(columns, sizes.table_bytes, advance)
    except _Full:
        return _Buckets(columns, folder, sizes, advance).run()


class _Columns(NamedTuple):
    """What is to be mapped."""

    defined: KeyColumn | None
    referring: tuple[KeyColumn, ...]
    show: Callable[[bytes], str]

    def each(self) -> Iterator[tuple[KeyColumn, int]]:
        """Every column and what is asked of its keys, in order."""
        if self.defined is not None:
            yield self.defined, DEFINE
        for column in self.referring:
            yield column, ADD if self.defined is None else REFER

    def twice(self, key: bytes, row: int, first: int) -> BadInput:
        """The error of a key that is defined again."""
        assert self.defined is not None
        return KeyTwice.at(
            self.defined.place(row),
            f"node id {self.show(key)} again, first in {self.defined.place(first)}",
            "each node once", "remove one",
        )  # fmt: skip

    def unknown(self, key: bytes, column: KeyColumn, row: int) -> BadInput:
        """The error of a key that no node has."""
        return BadInput.at(
            column.place(row), f"node id {self.show(key)}", "one that the table of nodes has",
            "add the node, or remove the edge",
        )  # fmt: skip


class _Table:
    """Keys in memory, numbered as they come, within `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.counts = np.zeros(1, np.int64)
        self._slots = np.zeros(_FIRST_SLOTS, np.uint32)
        self._hashes = np.empty(_room(_FIRST_SLOTS), np.uint64)
        self._starts = np.zeros(self._hashes.size + 1, np.int64)
        self._held = np.empty(_FIRST_SLOTS, np.uint8)

    def find(self, keys: Texts, hashed: NDArray[np.uint64], how: int) -> "_Found":
        """Numbers of keys, as far as they are found or may be added.  Raises _Full."""
        out = np.empty(len(keys), np.uint32)
        asked, at, why = HashedKeys(keys.offsets, keys.data, hashed), 0, NO_ROOM
        while why == NO_ROOM:
            table = KeyTable(self._slots, self._hashes, self._starts, self._held, self.counts)
            at, why = find_keys(table, asked, at, how, out)
            del table  # arrays that anything refers to would not grow in place
            if why == NO_ROOM:
                self._grow(int(keys.offsets[at + 1] - keys.offsets[at]))
        return _Found(out, int(at), int(why))

    def _grow(self, key_bytes: int) -> None:
        """Room for one more key of so many bytes at least."""
        count = int(self.counts[0])
        slots, held = self._slots.size, self._held.size
        if count == self._hashes.size:
            slots *= 2
        need = int(self._starts[count]) + key_bytes
        if need > held:
            spare = self._most - _table_bytes(slots, 0)
            held = max(need, min(2 * held, spare))
        if _table_bytes(slots, held) > self._most or slots > 1 << 32:
            raise _Full
        if held > self._held.size:
            self._held.resize(held, refcheck=False)  # in place: the old one is not kept beside it
        if slots > self._slots.size:
            self._hashes.resize(_room(slots), refcheck=False)
            self._starts.resize(_room(slots) + 1, refcheck=False)
            self._slots = np.zeros(0, np.uint32)
            self._slots = np.zeros(slots, np.uint32)
            fill_slots(self._slots, self._hashes, count)


class _Found(NamedTuple):
    """Of a piece of keys."""

    numbers: NDArray[np.uint32]
    at: int  # how far it went
    why: int  # DONE, TWICE or UNKNOWN


def _room(slots: int) -> int:
    return slots // 8 * 5


def _table_bytes(slots: int, held: int) -> int:
    return slots * _SLOT_BYTES + _room(slots) * _KEY_BYTES + held


def _in_memory(columns: _Columns, most_bytes: int, advance: Callable[[int], None]) -> KeyMap:
    """With one table.  Raises _Full."""
    table, rows = _Table(most_bytes), []
    for column, how in columns.each():
        row = 0
        with _id_file(column, how, np.dtype(np.uint32)) as put:
            for keys in column.pieces():
                found = table.find(keys, _hashed(keys), how)
                if found.why == TWICE:
                    raise columns.twice(
                        _key(keys, found.at), row + found.at, int(found.numbers[found.at])
                    )
                if found.why == UNKNOWN:
                    raise columns.unknown(_key(keys, found.at), column, row + found.at)
                put(found.numbers)
                row += len(keys)
                advance(_STEPS * len(keys))
        rows.append(row)
    files = tuple(
        IdFile(r, np.dtype(np.uint32)) for r in rows[len(rows) - len(columns.referring) :]
    )
    return KeyMap(int(table.counts[0]), rows[0] if columns.defined is not None else 0, files)


class _Buckets:
    """With files.  What they hold, in the folder, b being a bucket and c a column:

    keys-b     keys with their lengths, column after column
    order-c    uint16, the bucket of each row's key
    numbers-b  uint32, the number in the bucket of each key, column after column
    names-b    uint64, the id of each number in the bucket
    ids-b      uint32 or uint64, the id of each key, column after column, without the defining one
    """

    def __init__(
        self, columns: _Columns, folder: Path, sizes: KeySizes, advance: Callable[[int], None]
    ) -> None:
        self._columns, self._folder, self._sizes = columns, folder, sizes
        self._advance = advance
        self._each = list(columns.each())
        self._rows = [0] * len(self._each)
        # rows[c, b]: how many keys of column c are in bucket b
        self._counts = np.zeros((len(self._each), sizes.buckets), np.int64)
        self._piece_bytes = 16 * sizes.buffer_bytes
        self._num_keys = 0

    def run(self) -> KeyMap:
        self._remove()
        try:
            self._spread()
            for b in range(self._sizes.buckets):
                self._number(b)
            self._rank()
            dtype = np.dtype(np.uint32 if self._num_keys < 2**32 else np.uint64)
            for b in range(self._sizes.buckets):
                self._name(b, dtype)
            self._merge(dtype)
        finally:
            self._remove()
        first = len(self._each) - len(self._columns.referring)
        files = tuple(IdFile(rows, dtype) for rows in self._rows[first:])
        return KeyMap(self._num_keys, self._rows[0] if first else 0, files)

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"keymap-{kind}-{number}"

    def _remove(self) -> None:
        for path in self._folder.glob("keymap-*"):
            path.unlink()

    def _spread(self) -> None:
        """Tables to keys-b and order-c."""
        sizes = self._sizes
        shift = np.uint64(64 - sizes.buckets.bit_length() + 1)
        buffers = np.empty((sizes.buckets, sizes.buffer_bytes), np.uint8)
        filled = np.zeros(sizes.buckets, np.int64)

        def flush(b: int) -> None:
            self._append("keys", b, buffers[b, : filled[b]])
            filled[b] = 0

        for c, (column, _) in enumerate(self._each):
            with ArrayFile(self._path("order", c), np.uint16) as order:
                for keys in column.pieces():
                    hashed, at = _hashed(keys), 0
                    bucket = np.empty(len(keys), np.uint16)
                    while True:
                        stopped = spread_keys(
                            keys.offsets, keys.data, hashed, shift, at, buffers, filled, bucket
                        )
                        at = int(stopped)
                        if at == len(keys):
                            break
                        b = int(bucket[at])
                        if filled[b] == 0:  # longer than a buffer: it goes alone
                            key = np.frombuffer(_key(keys, at), np.uint8)
                            self._append("keys", b, np.array([key.size], "<u4").view(np.uint8))
                            self._append("keys", b, key)
                            at += 1
                        else:
                            flush(b)
                    order.append(bucket)
                    self._counts[c] += np.bincount(bucket, minlength=sizes.buckets)
                    self._rows[c] += len(keys)
                    self._advance(len(keys))
        for left in np.flatnonzero(filled):
            flush(int(left))

    def _append(self, kind: str, number: int, values: NDArray[Any]) -> None:
        with ArrayFile(self._path(kind, number), values.dtype) as file:
            file.append(values)

    def _number(self, b: int) -> None:
        """keys-b to numbers-b."""
        table, keys = _Table(self._sizes.table_bytes), self._keys(b)
        with ArrayFile(self._path("numbers", b), np.uint32) as out:
            for c, (column, how) in enumerate(self._each):
                done = 0
                while done < self._counts[c, b]:
                    piece = keys(int(self._counts[c, b]) - done)
                    try:
                        found = table.find(piece, _hashed(piece), how)
                    except _Full as error:
                        raise BudgetTooSmall(
                            f"{column.place(0)}: too many keys to map with "
                            f"{format_bytes(self._sizes.table_bytes)}, expected a larger --mem; "
                            "give twice as much"
                        ) from error
                    if found.why != DONE:
                        self._refuse(b, c, done, found, _key(piece, found.at))
                    out.append(found.numbers)
                    done += len(piece)
                    self._advance(len(piece))
        self._path("keys", b).unlink(missing_ok=True)

    def _refuse(self, b: int, c: int, done: int, found: _Found, key: bytes) -> None:
        row = self._row(c, b, done + found.at)
        if found.why == TWICE:
            raise self._columns.twice(key, row, self._row(c, b, int(found.numbers[found.at])))
        raise self._columns.unknown(key, self._each[c][0], row)

    def _row(self, c: int, b: int, number: int) -> int:
        """Row of column c that holds its `number`-th key of bucket b."""
        row = 0
        for bucket in self._order(c):
            places = np.flatnonzero(bucket == b)
            if number < places.size:
                return row + int(places[number])
            number -= places.size
            row += bucket.size
        raise AssertionError("more keys in a bucket than were put there")

    def _order(self, c: int) -> Iterator[NDArray[np.uint16]]:
        with ArrayFile(self._path("order", c), np.uint16) as file:
            yield from file.pieces(0, file.size, PIECE_ROWS)

    def _keys(self, b: int) -> Callable[[int], Texts]:
        """A function that gives the next keys of a bucket, at most so many."""
        path = self._path("keys", b)
        size = path.stat().st_size if path.exists() else 0
        at, piece_bytes = 0, self._piece_bytes

        def next_keys(most: int) -> Texts:
            nonlocal at, piece_bytes
            while True:
                with ArrayFile(path, np.uint8) as file:
                    raw = file.read(at, min(piece_bytes, size - at))
                offsets = np.empty(min(most, raw.size // LENGTH_BYTES) + 1, np.int64)
                data = np.empty(raw.size, np.uint8)
                count, used = parse_keys(raw, offsets, data)
                if count:
                    at += used
                    return Texts(offsets[: count + 1], data)
                piece_bytes *= 2  # a key longer than the piece

        return next_keys

    def _rank(self) -> None:
        """numbers-b and order-c to names-b: ids by first appearance."""
        buckets = self._sizes.buckets
        room = self._sizes.buffer_bytes // 8
        seen, counts = np.zeros(buckets, np.int64), np.zeros(1, np.int64)
        buffers, filled = np.empty((buckets, room), np.uint64), np.zeros(buckets, np.int64)
        numbers = _Streams(self._path, "numbers", np.uint32, buckets, self._sizes.buffer_bytes)
        # the defining column has all keys; without one, every column may bring new ones
        for c in range(1 if self._columns.defined is not None else len(self._each)):
            for bucket in self._order(c):
                values, at = numbers.take(bucket), 0
                while True:
                    at = int(rank_new(bucket, values, at, seen, counts, buffers, filled))
                    if at == bucket.size:
                        break
                    b = int(bucket[at])
                    self._append("names", b, buffers[b, : filled[b]])
                    filled[b] = 0
        for left in np.flatnonzero(filled):
            self._append("names", int(left), buffers[left, : filled[left]])
        self._num_keys = int(counts[0])

    def _name(self, b: int, dtype: np.dtype[Any]) -> None:
        """numbers-b and names-b to ids-b."""
        with (
            ArrayFile(self._path("numbers", b), np.uint32) as numbers,
            ArrayFile(self._path("names", b), np.uint64) as names,
            ArrayFile(self._path("ids", b), dtype) as out,
        ):
            ids = names.read(0, names.size)
            first = int(self._counts[0, b]) if self._columns.defined is not None else 0
            values = np.empty(PIECE_ROWS, dtype)
            for piece in numbers.pieces(first, numbers.size, PIECE_ROWS):
                take_ids(piece, ids, values)
                out.append(values[: piece.size])
        self._path("numbers", b).unlink()
        self._path("names", b).unlink()

    def _merge(self, dtype: np.dtype[Any]) -> None:
        """ids-b and order-c to the file of each column."""
        streams = _Streams(self._path, "ids", dtype, self._sizes.buckets, self._sizes.buffer_bytes)
        for c, (column, how) in enumerate(self._each):
            if how == DEFINE:
                continue
            with _id_file(column, how, dtype) as put:
                for bucket in self._order(c):
                    put(streams.take(bucket))
                    self._advance(bucket.size)


class _Streams:
    """A file of values for each bucket, read in the order of their keys."""

    def __init__(
        self, path: Callable[[str, int], Path], kind: str, dtype: Any, buckets: int, size: int
    ) -> None:
        self._path, self._kind, self._dtype = path, kind, np.dtype(dtype)
        self._buffers = np.empty((buckets, max(1, size // self._dtype.itemsize)), self._dtype)
        self._taken, self._filled = np.zeros(buckets, np.int64), np.zeros(buckets, np.int64)
        self._read = np.zeros(buckets, np.int64)

    def take(self, bucket: NDArray[np.uint16]) -> NDArray[Any]:
        """The next value of each bucket named."""
        out, at = np.empty(bucket.size, self._dtype), 0
        while True:
            stopped = merge_buckets(bucket, at, self._buffers, self._taken, self._filled, out)
            at = int(stopped)
            if at == bucket.size:
                return out
            b = int(bucket[at])
            with ArrayFile(self._path(self._kind, b), self._dtype) as file:
                count = min(self._buffers.shape[1], file.size - int(self._read[b]))
                file.read_into(int(self._read[b]), self._buffers[b, :count])
            self._read[b] += count
            self._taken[b], self._filled[b] = 0, count


def _hashed(keys: Texts) -> NDArray[np.uint64]:
    out = np.empty(len(keys), np.uint64)
    hash_keys(keys.offsets, keys.data, out)
    return out


def _key(keys: Texts, i: int) -> bytes:
    return keys.data[keys.offsets[i] : keys.offsets[i + 1]].tobytes()


@contextmanager
def _id_file(
    column: KeyColumn, how: int, dtype: np.dtype[Any]
) -> Iterator[Callable[[NDArray[Any]], None]]:
    """What takes the ids of a column, in order."""
    if how == DEFINE:
        yield lambda _: None
        return
    column.ids.unlink(missing_ok=True)
    with ArrayFile(column.ids, dtype) as file:
        yield file.append
