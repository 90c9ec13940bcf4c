"""Sessions with a daemon on this host: its arena is mapped, messages go over pyzmq."""

import contextlib
import fcntl
import functools
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from blockstore.io.mapping import map_shared
from blockstore.kernels.rows import expand_counts, gather_rows
from clients.connection.position import StateMismatch, check_resolved
from loaderd.api import errors
from loaderd.api.endpoint import connect, parse_endpoint
from loaderd.api.errors import DaemonError, NoDaemon, Refused, SessionLost
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    Blob,
    BlobArray,
    ChunkReady,
    DaemonMessage,
    Detach,
    ErrorReply,
    Ids,
    IdsWanted,
    Message,
    Release,
    Resolved,
    RowGroup,
    Skipped,
    Start,
    Welcome,
    decode_daemon,
    encode,
)
from loaderd.plans.chunks import METHOD_OF

WELCOME_TIMEOUT_S = 30.0  # a daemon that listens answers from its event loop
WELCOME_BYTES = 1 << 16
LINGER_MS = 200  # to send the last Detach
MessageT = TypeVar("MessageT", BatchReady, ChunkReady, RowGroup)
_WORD_BYTES = 8
INTACT: NDArray[np.uint64] = np.ones(1, np.uint64)  # stamp if there is no arena
LOOK_MS = 100  # how often a wait looks whether it was halted
_RELEASE_PART = 8  # batches are released together once they are this part of the window
SOON_MS = 1  # the same while a device still reads what the daemon may need back


class Attachment:
    """The arena of one daemon, mapped read-only, and the connection that keeps it leased."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = self.address = endpoint
        self.options: list[tuple[int, int | bytes]] = []  # for sockets that connect to `address`
        self.users = 0
        self.door = connect(parse_endpoint(endpoint), waits=True)
        try:
            welcome, fd = _receive_welcome(self.door, endpoint)
        except BaseException:
            self.door.close()
            raise
        self.token, self.stores = welcome.token, welcome.stores
        self.slot_bytes, self._arena_fd = welcome.slot_bytes, fd
        try:
            num_bytes, stamp = welcome.num_slots * welcome.slot_bytes, welcome.stamp
            mapped = map_shared(fd, stamp + _WORD_BYTES, writable=False)
        except BaseException:
            os.close(fd)
            self.door.close()
            raise
        self.data: NDArray[np.uint8] = mapped.array(num_bytes)
        self.stamp: NDArray[np.uint64] = mapped.array(_WORD_BYTES, stamp).view(np.uint64)
        self.context = zmq.Context()

    def lost(self) -> bool:
        """Whether the daemon has gone: its hang-up is the only event that `door` ever reports."""
        poller = zmq.Poller()
        poller.register(self.door, zmq.POLLIN | zmq.POLLERR)
        return bool(poller.poll(0))

    def hold(self) -> bool:
        """Keep the arena from being emptied after its daemon's end, until this is closed.

        False: it is being emptied, or was.
        """
        try:
            fcntl.flock(self._arena_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return bool(self.stamp[0])

    def close(self) -> None:
        """Hand the arena back: the daemon ends the sessions of this attachment."""
        self.context.term()
        if self._arena_fd >= 0:  # closing it is not enough: the mapping has a descriptor, too
            fcntl.flock(self._arena_fd, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close this process's copy of the connection and its mapping, and nothing else."""
        self.door.close()
        self.data, self.stamp = np.empty(0, np.uint8), INTACT
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1


def _receive_welcome(door: socket.socket, endpoint: str) -> tuple[Welcome, int]:
    """The daemon's greeting and the arena's descriptor, which the caller closes."""
    door.settimeout(WELCOME_TIMEOUT_S)
    try:
        frame, fds, _, _ = socket.recv_fds(door, WELCOME_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise NoDaemon(f"{endpoint}: the daemon does not answer ({error})") from error
    try:
        if not frame:
            raise NoDaemon(f"{endpoint}: the daemon closed the connection")
        message = welcome_of(frame, endpoint)
        if not fds:  # the kernel drops descriptors beyond the limit
            raise Refused(
                f"{endpoint}: the arena's descriptor did not come through: this process has too "
                "many files open; close some, or raise the limit (ulimit -n)"
            )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds[0]


def welcome_of(frame: bytes, endpoint: str) -> Welcome:
    """The daemon's greeting.  Raises NoDaemon, and what the daemon refuses with."""
    message = decode_daemon(frame)
    if isinstance(message, ErrorReply):
        raise error_of(message)
    if not isinstance(message, Welcome):
        raise NoDaemon(f"{endpoint}: the daemon greets with {type(message).__name__}")
    return message


def error_of(reply: ErrorReply) -> DaemonError:
    """The exception that a daemon reports, of the class it names if this side knows that class."""
    named = getattr(errors, reply.error, None)
    if isinstance(named, type) and issubclass(named, DaemonError):
        return named(reply.message)
    return DaemonError(f"{reply.error}: {reply.message}")


@dataclass
class _Registry:
    """The attachments and sessions that this process has open."""

    lock: threading.RLock = field(default_factory=threading.RLock)  # finalizers close sessions, too
    attachments: dict[str, Attachment] = field(default_factory=dict)
    sessions: "weakref.WeakSet[Session]" = field(default_factory=weakref.WeakSet)
    inherited: list["Session"] = field(default_factory=list)  # pyzmq must not finalize them


_registry = _Registry()


def check_stores(endpoint: str, stores: dict[str, str], name: str, expected: Resolved) -> None:
    """Raise StateMismatch: the store that a state belongs to is not served under its name."""
    found = [stores[name]] if name in stores else list(stores.values())
    if expected.fingerprint not in found:
        raise StateMismatch(
            f"{endpoint}: the daemon serves another store, of fingerprint "
            f"{', '.join(found)}, expected {expected.fingerprint}: serve the "
            "store that was trained on, or start from scratch without the saved state"
        )


def _acquire(endpoint: str, make: Callable[[str], Attachment]) -> Attachment:
    """The process's one attachment to `endpoint`; made if there is none, or its daemon is gone."""
    with _registry.lock:
        found = _registry.attachments.get(endpoint)
        if found is None or found.lost():
            found = _registry.attachments[endpoint] = make(endpoint)
        found.users += 1
        return found


def _release(attachment: Attachment) -> None:
    """End one use of an attachment; the last one closes it."""
    with _registry.lock:
        attachment.users -= 1
        if attachment.users:
            return
        if _registry.attachments.get(attachment.endpoint) is attachment:
            del _registry.attachments[attachment.endpoint]
    attachment.close()


def _drop_inherited() -> None:
    """In a forked child: drop the parent's connections and arenas without telling the daemon.

    A child that kept its copy of a connection open would hide the parent's death.
    """
    _registry.lock = threading.RLock()
    for session in _registry.sessions:
        session.attachment.forget()
        _registry.inherited.append(session)
    _registry.attachments = {}
    _registry.sessions = weakref.WeakSet()


os.register_at_fork(after_in_child=_drop_inherited)


@functools.cache
def load_kernels() -> None:
    """Load the compiled code that copies rows, while the daemon works.

    The first kernel that a process calls takes a second, most of it for numba's own modules.
    """
    arena, out = np.zeros(8, np.uint8), np.empty(0, np.uint8)
    arena.flags.writeable = False
    gather_rows(arena, arena.view(np.uint64), 0, 0, 1, out)
    expand_counts(np.zeros(0, np.uint32), 0, np.zeros(0, np.int64))


def views(
    arena: NDArray[np.uint8], slot_bytes: int, blob: Blob, array: BlobArray
) -> Iterator[tuple[int, NDArray[Any]]]:
    """An array of a blob as (first item, view of the arena) pieces, one per run of adjacent slots.

    Items never straddle slots: offsets are multiples of 64, slots of 4096.
    """
    kind = np.dtype(array.dtype)
    begin, end = array.offset, array.offset + array.length * kind.itemsize
    at = begin
    while at < end:
        index, inside = divmod(at, slot_bytes)
        last = index
        while (last + 1) * slot_bytes < end and blob.slots[last + 1] == blob.slots[last] + 1:
            last += 1
        stop = min(end, (last + 1) * slot_bytes)
        address = blob.slots[index] * slot_bytes + inside
        yield (at - begin) // kind.itemsize, arena[address : address + stop - at].view(kind)
        at = stop


class StepsLeftOut(Exception):
    """The daemon skips steps; `to` is the next one that it serves."""

    def __init__(self, to: int) -> None:
        super().__init__(f"steps before {to} are left out")
        self.to = to


class Halted(Exception):
    """Another thread has ended a wait for the daemon."""


class Session:
    """One dataset's conversation with the daemon, used by one process, one thread at a time."""

    attachment_type: Callable[[str], Attachment] = Attachment

    def __init__(
        self,
        endpoint: str,
        request: Attach,
        ids: NDArray[np.int64] | None = None,
        expected: Resolved | None = None,
    ) -> None:
        """Attach with `request` (its token is filled in here), and `ids` if its split is empty.

        expected   what the request was resolved to before

        Raises NoDaemon, Refused, SessionLost; StateMismatch: it is resolved to something else now.
        """
        self.pid = os.getpid()
        self.run = 0
        self.lost = False
        self._halted = False
        # called whenever there is no message; returns whether to call it again soon
        self.before_waiting: Callable[[], bool] = lambda: False
        self._requests = itertools.count(1)
        self._pending: dict[tuple[int, int], BatchReady | ChunkReady | RowGroup] = {}
        self._skips: dict[int, int] = {}  # by skipped step: the next one that is served
        self._releases: list[Release] = []  # not sent yet
        self.attachment = _acquire(endpoint, self.attachment_type)
        self._socket: zmq.Socket[bytes] = self.attachment.context.socket(zmq.DEALER)
        self._closed = False
        try:
            if expected is not None:
                check_stores(endpoint, self.attachment.stores, request.store, expected)
            self._open_socket()
            _registry.sessions.add(self)
            self.attached = self._attach(request, ids)
            if expected is not None:
                check_resolved(expected, self.attached.resolved)
        except BaseException as error:
            # another daemon refuses the token of the first one: that means the first one is gone
            gone = isinstance(error, Refused) and self.attachment.lost()
            self.close()
            if gone:
                raise SessionLost(f"{endpoint}: the daemon went away") from error
            raise

    def _open_socket(self) -> None:
        # unlimited queues: the window bounds what is pushed; and no second daemon at the same
        # path may get what was meant for the first
        for option, value in (
            (zmq.RCVHWM, 0),
            (zmq.SNDHWM, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.LINGER, LINGER_MS),
            *self.attachment.options,
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(self.attachment.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.attachment.door, zmq.POLLIN | zmq.POLLERR)

    def _attach(self, request: Attach, ids: NDArray[np.int64] | None) -> Attached:
        number = next(self._requests)
        numbers = np.empty(0, "<i8") if ids is None else np.ascontiguousarray(ids, "<i8").ravel()
        token = self.attachment.token
        self._send(msgspec.structs.replace(request, token=token, request=number, ids=numbers.size))
        if request.plan not in METHOD_OF:  # those plans copy nothing by address
            load_kernels()
        while True:
            match self._next():
                case IdsWanted(request=echo, first=first, count=count) if echo == number:
                    asked = numbers[first : first + count].tobytes()
                    self._send(Ids(request=number, first=first, numbers=asked))
                case Attached(request=echo) as attached if echo == number:
                    return attached
                case ErrorReply(request=echo) as reply if echo in (-1, number):  # -1: unreadable
                    raise error_of(reply)

    def start(self, epoch: int, step: int, stride: int = 1) -> int:
        """Ask for steps `step`, `step + stride`, ... of `epoch`; ends the previous run."""
        self.run += 1
        self._halted = False
        self._pending.clear()
        self._skips.clear()
        self._releases.clear()  # of the run that ends
        session = self.attached.session
        self._send(Start(session=session, run=self.run, epoch=epoch, step=step, stride=stride))
        return self.run

    def receive(self, kind: type[MessageT], step: int, group: int = 0) -> MessageT:
        """Wait for a batch, with its first row group (`group` 0), or for a further row group."""
        while (found := self._pending.pop((step, group), None)) is None:
            if step in self._skips:
                raise StepsLeftOut(self._skips.pop(step))
            message = self._next()
            match message:
                case BatchReady(run=self.run) | ChunkReady(run=self.run):
                    self._pending[message.step, 0] = message
                case Skipped(run=self.run):
                    self._skips[message.step] = message.to
                case RowGroup(run=self.run):
                    self._pending[message.step, message.group] = message
                case ErrorReply(run=run) if run in (-1, self.run):
                    raise self._failure(message)
        assert isinstance(found, kind)
        return found

    def release(self, step: int, group: int) -> None:
        """Say that a row group is copied (with group 0, the structure too)."""
        self._send(self._release(step, group))

    def release_soon(self, step: int) -> None:
        """Say that a batch is read, with others, or before this waits for the daemon.

        Each message wakes two threads unless others are sent with it.
        """
        self._releases.append(self._release(step, 0))
        if len(self._releases) * _RELEASE_PART >= self.attached.window:
            self._send_releases()

    def _release(self, step: int, group: int) -> Release:
        return Release(session=self.attached.session, run=self.run, step=step, group=group)

    def _send_releases(self) -> None:
        while self._releases:
            self._send(self._releases.pop(0))

    def views(self, blob: Blob, array: BlobArray) -> Iterator[tuple[int, NDArray[Any]]]:
        """An array of a message as (first item, view) pieces, in order."""
        return views(self.attachment.data, self.attachment.slot_bytes, blob, array)

    def check_intact(self) -> None:
        """After the arena was read: raise SessionLost if the daemon died and it was emptied.

        The stamp is zeroed before the first page, so what was read before this check was intact.
        """
        if not self.attachment.stamp[0]:
            raise self._went_away()

    def hold(self) -> None:
        """Keep the arena as it is from now on, for reads that go on after `check_intact`.

        Raises SessionLost: the daemon died, and it is being emptied.
        """
        if not self.attachment.hold():
            raise self._went_away()

    def halt(self) -> None:
        """From any thread: a wait of this run raises Halted, now or when it begins."""
        self._halted = True

    def close(self) -> None:
        """Detach; does nothing the second time, or in a process that inherited the session."""
        if self._closed or self.pid != os.getpid():
            return
        self._closed = True
        _registry.sessions.discard(self)
        attached = getattr(self, "attached", None)
        if attached is not None and not self.lost:
            with contextlib.suppress(SessionLost):
                self._send(Detach(session=attached.session))
        self._close_socket()
        _release(self.attachment)

    def _close_socket(self) -> None:
        self._socket.close(linger=0 if self.lost else LINGER_MS)

    def _send(self, message: Message) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:  # queues are unlimited: there is no peer
            raise self._went_away() from error

    def _failure(self, reply: ErrorReply) -> DaemonError:
        error = error_of(reply)
        self.lost = self.lost or isinstance(error, SessionLost)
        return error

    def _next(self) -> DaemonMessage:
        """The next message; messages that came before a hang-up are still returned."""
        gone = False
        while True:
            try:
                return decode_daemon(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
            if gone:
                raise self._went_away()
            if self._halted:
                raise Halted
            self._send_releases()
            events = dict(self._poller.poll(SOON_MS if self.before_waiting() else LOOK_MS))
            gone = bool(events) and self._socket not in events

    def _went_away(self) -> SessionLost:
        self.lost = True
        return SessionLost(f"{self.attachment.endpoint}: the daemon went away")
