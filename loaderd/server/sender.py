"""Batches for another host: gathered out of the arena into pieces, sent against credit."""

import bisect
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.kernels.rows import NO_ROW, gather_rows
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import Refused
from loaderd.api.protocol import (
    Attached,
    BatchReady,
    Blob,
    BlobArray,
    ChunkReady,
    ErrorReply,
    LedgerEntry,
    Piece,
    Release,
    RowGroup,
    Skipped,
)
from loaderd.memory.blob import ALIGN
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.sessions.base import Out
from loaderd.streams.service import StreamService

FRAME_BYTES = 1 << 20  # of a piece, about: larger ones cost the client fresh pages
FRAMES = 8  # buffers of a session; they hold what has not left this host yet
_SHARE = 8  # a session's buffers take at most this part of what is free

Carried = BatchReady | RowGroup | ChunkReady
Send = Callable[[Out | Piece, NDArray[np.uint8] | None], None]
Copy = Callable[[int, int, NDArray[np.uint8]], None]  # bytes [start, stop) of a region into `out`


class _Ended(Exception):
    """The session is closed, or its run has ended."""


class SendBuffers:
    """Buffers of bytes to send; each comes back when the last view of it is gone."""

    def __init__(self, memory: list[NDArray[np.uint8]]) -> None:
        self._memory = memory
        # a SimpleQueue, as finalizers may call `put` at any point
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for buffer in memory:
            self._free.put(buffer)

    @property
    def num_bytes(self) -> int:
        return sum(m.size for m in self._memory)

    def take(self) -> NDArray[np.uint8]:
        """A free buffer, to write to; waits for one."""
        return self._free.get()

    def put(self, buffer: NDArray[np.uint8]) -> None:
        """Give back a buffer that was not lent."""
        self._free.put(buffer)

    def lend(self, buffer: NDArray[np.uint8], part: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Lend a part of a buffer, which is free again when the returned array is gone."""
        array = part.view()
        weakref.finalize(array, self._free.put, buffer).atexit = False
        return array

    def wait_home(self) -> None:
        """Wait until all have come back."""
        for _ in self._memory:
            self._free.get()


class Frames(SendBuffers):
    """Buffers in the arena."""

    def __init__(self, engine: StreamService) -> None:
        """Takes them.  Raises Refused."""
        self._broker, slot = engine.broker, engine.arena.slot_bytes
        room = self._broker.available() // _SHARE
        per = max(1, min(FRAME_BYTES // slot, room // FRAMES))
        count = max(2, min(FRAMES, room // per))
        self._taken: list[int] = []
        while len(firsts := self._take(count, per)) < 2:  # free slots may lie in shorter runs
            per //= 2
        super().__init__([engine.arena.data[f * slot : (f + per) * slot] for f in firsts])
        self.capacity = per * slot

    def _take(self, count: int, per: int) -> list[int]:
        """The first slots of `count` runs, or of as many as there are.

        Raises Refused: there are not two, and none are shorter.
        """
        firsts: list[int] = []
        try:
            for _ in range(count):
                firsts.append(self._broker.take_run(per, SHORT_WAIT_S))
                self._taken += range(firsts[-1], firsts[-1] + per)
        except Refused:
            if len(firsts) < 2:
                self._broker.give(self._taken)
                self._taken, firsts = [], []
                if per == 1:
                    raise
        return firsts

    def basis(self) -> str:
        return f"{len(self._memory)} pieces x {self.capacity:,} B on their way to another host"

    def give_back(self) -> None:
        """Give the slots back to the arena; nobody may use them any more."""
        self._broker.give(self._taken)
        self._taken, self._memory = [], []


class _Array(NamedTuple):
    """An array of what is sent."""

    name: str
    dtype: str
    length: int  # items
    item_bytes: int
    grain: int  # its bytes are cut at multiples of this
    copy: Copy


class _ByteRange(NamedTuple):
    """A run of bytes of what is sent."""

    offset: int
    num_bytes: int
    grain: int  # it is cut at multiples of this
    copy: Copy


class Sender:
    """One session's pieces, made in a thread of its own."""

    def __init__(
        self,
        attached: Attached,
        credit: int,
        engine: StreamService,
        frames: Frames,
        send: Send,
    ) -> None:
        """`credit`: bytes that may be in flight; `send` may be called in any thread, and drops
        its array when it has been sent.  Raises Refused: a buffer does not hold a row."""
        self.session, self.frames = attached.session, frames
        self._specs, self._credit = attached.rows, credit
        # not all nodes have rows of all arrays, or edges have rows
        self._typed = len(attached.types) > 1 or attached.resolved.edge_features
        widest = max((s.row_bytes for s in attached.rows), default=0)
        if widest > frames.capacity:
            raise Refused(
                f"a row has {widest:,} bytes, pieces for other hosts {frames.capacity:,}: close "
                "other sessions, or give more --mem"
            )
        self._data, self._slot_bytes = engine.arena.data, engine.arena.slot_bytes
        self._send, self._release = send, engine.release
        self._queue: queue.SimpleQueue[Out | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._run = -1
        self._sent = self._taken = 0  # bytes of the run
        self._closed = False
        self._thread = threading.Thread(
            target=self._work, name=f"sender-{attached.session}", daemon=True
        )
        self._thread.start()

    # -- from the loop ----------------------------------------------------------------------------

    def push(self, message: Out) -> None:
        """Send a message to the client, after those before it."""
        self._queue.put(message)

    def begin(self, run: int) -> None:
        """Begin a run; call it before the engine takes back what it leased to earlier ones."""
        with self._changed:
            if run > self._run:
                self._run, self._sent, self._taken = run, 0, 0
                self._changed.notify_all()

    def taken(self, run: int, num_bytes: int) -> None:
        """Note that the client has received that much of a run."""
        with self._changed:
            if run == self._run and self._taken < num_bytes <= self._sent:
                self._taken = num_bytes
                self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more; call it before the engine takes back what it leased."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the buffers are back."""
        self._thread.join(timeout_s)

    @property
    def ended(self) -> bool:
        """Whether its buffers are back in the arena."""
        return not self._thread.is_alive()

    def entry(self) -> LedgerEntry:
        """What it takes of the pools."""
        name = f"session {self.session}, pieces, out of the pools"
        return LedgerEntry(name, self.frames.num_bytes, self.frames.basis())

    # -- in the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (message := self._queue.get()) is not None and not self._closed:
            if isinstance(message, Skipped | ErrorReply):
                self._send(message, None)
                continue
            try:
                self._carry(message)
            except _Ended:  # the engine takes back what an older run has, or waits for it
                self._give_back(message)
            except Exception as error:
                self._send(
                    ErrorReply(
                        error="BatchFailed",
                        message=f"step {message.step} could not be sent: {error}",
                        session=self.session, run=message.run, step=message.step,
                    ),
                    None,
                )  # fmt: skip
        self.frames.wait_home()
        self.frames.give_back()

    def _check(self, run: int) -> None:
        """Raises _Ended: what was leased to the run may have been taken back."""
        with self._changed:
            if self._stale(run):
                raise _Ended

    def _carry(self, message: Carried) -> None:
        """Send one message and its bytes, then release them."""
        header, regions = self._parcel(message)
        self._check(message.run)
        self._send(header, None)
        place = {
            "session": self.session, "run": message.run, "step": message.step,
            "group": _group_of(message),
        }  # fmt: skip
        for offset, size, copies in _cut(regions, self.frames.capacity):
            buffer = self.frames.take()
            try:
                for copy, start, stop, at in copies:
                    self._check(message.run)
                    copy(start, stop, buffer[at : at + stop - start])
                self._spend(message.run, size)
            except BaseException:
                self.frames.put(buffer)
                raise
            self._send(Piece(**place, offset=offset), self.frames.lend(buffer, buffer[:size]))
        self._give_back(message)

    def _give_back(self, message: Carried) -> None:
        """Release what was leased for a message: nothing reads it any more."""
        session, run, group = self.session, message.run, _group_of(message)
        self._release(Release(session=session, run=run, step=message.step, group=group))

    def _stale(self, run: int) -> bool:
        return self._closed or run != self._run

    def _spend(self, run: int, num_bytes: int) -> None:
        """Wait for credit; one piece may always be in flight."""
        with self._changed:

            def allowed() -> bool:
                on_the_way = self._sent - self._taken
                return not on_the_way or on_the_way + num_bytes <= self._credit

            self._changed.wait_for(lambda: self._stale(run) or allowed())
            if self._stale(run):
                raise _Ended
            self._sent += num_bytes

    # -- what there is to send --------------------------------------------------------------------

    def _parcel(self, message: Carried) -> tuple[Carried, list[_ByteRange]]:
        """The message as the client gets it, and the bytes that follow it."""
        if isinstance(message, ChunkReady):
            return self._chunk(message)
        if isinstance(message, RowGroup):
            blob, regions = self._rows(message, 0)
            return structs.replace(message, blob=blob), regions
        structure = message.structure
        size = max((a.offset + _num_bytes(a) for a in structure.arrays), default=0)
        blob, regions = self._rows(message.rows, -(-size // ALIGN) * ALIGN)
        header = structs.replace(
            message,
            structure=structs.replace(structure, slots=()),
            rows=structs.replace(message.rows, blob=blob),
        )
        return header, [_ByteRange(0, size, ALIGN, self._in_slots(structure)), *regions]

    def _rows(self, group: RowGroup, offset: int) -> tuple[Blob, list[_ByteRange]]:
        """Positions, if there are any, and rows instead of their addresses."""
        arrays = []
        for array in group.blob.arrays:
            if array.name == "positions":
                copy = self._in_slots(group.blob, array.offset)
                arrays.append(_Array("positions", "uint32", group.num_rows, 4, ALIGN, copy))
        named = {a.name: a for a in group.blob.arrays}
        for spec in self._specs:
            found = named[f"address:{spec.name}"]
            addresses = np.empty(group.num_rows, np.uint64)
            raw = addresses.view(np.uint8)
            self._in_slots(group.blob, found.offset)(0, raw.size, raw)
            self._check(group.run)  # else they may have been written over by now
            if self._typed:
                addresses = addresses[addresses < NO_ROW]
            arrays.append(self._gathered(spec, addresses))
        return _lay_out(arrays, offset)

    def _chunk(self, ready: ChunkReady) -> tuple[Carried, list[_ByteRange]]:
        """Rows in the order of the batch, whatever their form."""
        num = ready.num_rows
        if ready.index >= 0:
            ids = self._data[ready.index : ready.index + 8 * num].copy().view(np.int64)
            self._check(ready.run)
        else:
            ranges = zip(ready.first, ready.counts, strict=True)
            ids = np.concatenate([np.arange(f, f + c, dtype=np.int64) for f, c in ranges])
        raw = ids.view(np.uint8)
        arrays = [_Array("input_id", "int64", num, 8, ALIGN, _runs([0], [raw.size], raw))]
        for spec, places in zip(self._specs, ready.places, strict=True):
            if ready.form == "index":
                addresses = ids.astype(np.uint64) * np.uint64(spec.row_bytes)
                arrays.append(self._gathered(spec, addresses + np.uint64(places[0])))
            else:
                sizes = [count * spec.row_bytes for count in ready.counts or (num,)]
                arrays.append(_rows_of(spec, num, _runs(places, sizes, self._data)))
        blob, regions = _lay_out(arrays, 0)
        header = structs.replace(
            ready, form="pieces", first=(), counts=(), places=(), index=-1, pieces=blob
        )
        return header, regions

    def _gathered(self, spec: RowArraySpec, addresses: NDArray[np.uint64]) -> _Array:
        """Rows from anywhere in the arena."""
        width = spec.row_bytes

        def copy(start: int, stop: int, out: NDArray[np.uint8]) -> None:
            gather = addresses[start // width : stop // width]
            gather_rows(self._data, gather, 0, gather.size, width, out)

        return _rows_of(spec, addresses.size, copy)

    def _in_slots(self, blob: Blob, offset: int = 0) -> Copy:
        """The bytes of a blob from `offset` on."""
        size = self._slot_bytes
        copy = _runs([s * size for s in blob.slots], [size] * len(blob.slots), self._data)
        return lambda start, stop, out: copy(offset + start, offset + stop, out)


def _runs(places: Sequence[int], sizes: Sequence[int], data: NDArray[np.uint8]) -> Copy:
    """Runs of bytes of `data`, one after the other."""
    ends = list(itertools.accumulate(sizes))

    def copy(start: int, stop: int, out: NDArray[np.uint8]) -> None:
        at, run = start, bisect.bisect_right(ends, start)
        while at < stop:
            count = min(stop, ends[run]) - at
            place = places[run] + sizes[run] - (ends[run] - at)
            out[at - start : at - start + count] = data[place : place + count]
            at, run = at + count, run + 1

    return copy


def _rows_of(spec: RowArraySpec, num: int, copy: Copy) -> _Array:
    width = spec.row_bytes
    return _Array(f"rows:{spec.name}", "uint8", num * width, 1, width, copy)


def _group_of(message: Carried) -> int:
    """The row group that a message brings; a chunk is one."""
    rows = message.rows if isinstance(message, BatchReady) else message
    return rows.group if isinstance(rows, RowGroup) else 0


def _num_bytes(array: BlobArray) -> int:
    return array.length * np.dtype(array.dtype).itemsize


def _lay_out(arrays: Sequence[_Array], offset: int) -> tuple[Blob, list[_ByteRange]]:
    """Arrays one after the other."""
    placed, regions = [], []
    for array in arrays:
        num_bytes = array.length * array.item_bytes
        placed.append(BlobArray(array.name, array.dtype, offset, array.length))
        regions.append(_ByteRange(offset, num_bytes, array.grain, array.copy))
        offset += -(-num_bytes // ALIGN) * ALIGN
    return Blob((), tuple(placed)), regions


def _cut(
    regions: Sequence[_ByteRange], capacity: int
) -> Iterator[tuple[int, int, list[tuple[Copy, int, int, int]]]]:
    """Cut pieces of at most `capacity` bytes: offset, size, and what to copy to where in it."""
    copies, first, used = list[tuple[Copy, int, int, int]](), 0, 0
    for region in regions:
        done = 0
        while done < region.num_bytes:
            if not copies:
                first = region.offset + done
            at = region.offset + done - first
            room = (capacity - at) // region.grain * region.grain
            count = min(region.num_bytes - done, room)
            if count > 0:
                copies.append((region.copy, done, done + count, at))
                done, used = done + count, at + count
            else:
                yield first, used, copies
                copies = []
    if copies:
        yield first, used, copies
