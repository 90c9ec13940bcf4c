"""Fetch rows from other servers, with one request at a time on each connection.

A peer keeps no state of a request, so a request without an answer is sent again, to the next
replica or to the same daemon after it has come back.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from blockstore.closing import Closing
from blockstore.errors import AbsentRows
from blockstore.io.elsewhere import Take
from blockstore.io.threads import ReadThreads, Task
from blockstore.part import StorePart, split_arrays
from blockstore.store import Store
from loaderd.api.errors import BadMessage, DaemonError, NoDaemon, Refused, ShuttingDown
from loaderd.api.peers import PeerAddresses, part_with_peers
from loaderd.api.protocol import ErrorReply, RowsGiven, RowsWanted, decode_daemon
from loaderd.api.requests import MAX_ROW_BYTES, max_rows
from loaderd.api.tcp import TcpAddress
from loaderd.server.curve import TcpConnection
from loaderd.server.transport import Sockets

THREADS = 8  # each has one request of MAX_ROW_BYTES in flight: 8 MiB, of all peers
ANSWER_S = 5.0  # for a peer to answer; then its connection is given up
RETRY_S = 0.2  # between two attempts
_POLL_S = 0.2  # between two checks whether this side ends


class PeerRows(Closing):
    """The rows of one store that other servers have, as a `RemoteRows` of its reader."""

    def __init__(self, store: Store, part: StorePart, peers: PeerAddresses) -> None:
        self._part, self._peers = part, peers
        self._fingerprint = store.manifest.fingerprint
        self._arrays = {a.path: (first, a) for first, a in split_arrays(store.manifest)}
        self._numbers = 0
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._idle: dict[TcpAddress, list[TcpConnection]] = {}
        self._replica: dict[int, int] = {}  # of each server: the one that answered last
        self._counts = dict.fromkeys(
            ("peer_requests", "peer_rows_asked", "peer_bytes_asked", "peer_retries"), 0
        )
        self._stack = ExitStack()
        self._sockets = Sockets()
        self._stack.callback(self._sockets.close)
        self._stack.callback(self._hang_up)
        self._threads = ReadThreads(THREADS)
        self._stack.callback(self._threads.close)
        self._stack.callback(self._ending.set)

    def close(self) -> None:
        self._stack.close()

    def hurry(self) -> None:
        """Stop waiting for peers: this side ends."""
        self._ending.set()

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    # -- as the reader asks -----------------------------------------------------------------------

    def put(self, task: Task) -> None:
        self._threads.put(task)

    def num_rows(self, path: str) -> int:
        return self._arrays[path][1].num_rows

    def max_rows(self, path: str) -> int:
        return max_rows(self._arrays[path][1].row_bytes)

    def ask(self, server: int, path: str, rows: NDArray[np.int64], take: Take) -> None:
        """Fetch rows.  Raises AbsentRows: the peer does not come back in time, or refuses."""
        first, array = self._arrays[path]
        with self._lock:
            self._numbers += 1
            self._counts["peer_requests"] += 1
            wanted = RowsWanted(
                request=self._numbers, fingerprint=self._fingerprint, digest=self._part.digest,
                server=self._part.server, array=path, ids=(rows + first).astype("<u8").tobytes(),
            )  # fmt: skip
        begun, addresses = time.monotonic(), self._peers.by_server[server]
        attempt = self._replica.get(server, 0)
        while True:
            address = addresses[attempt % len(addresses)]
            try:
                self._once(address, wanted, rows.size * array.row_bytes, take)
            except (NoDaemon, ShuttingDown) as error:
                waited = time.monotonic() - begun
                if waited >= self._peers.wait_s or self._ending.is_set():
                    raise AbsentRows(
                        f"server {server} at {', '.join(a.place for a in addresses)}: gave no rows "
                        f"of {path} in {waited:.0f} s ({error}); expected it to serve its part: "
                        "start it again, or give --peer-wait more"
                    ) from error
            except DaemonError as error:
                raise AbsentRows(f"server {server} at {address.place}: {error}") from error
            else:
                self._replica[server] = attempt
                with self._lock:
                    self._counts["peer_rows_asked"] += rows.size
                    self._counts["peer_bytes_asked"] += rows.size * array.row_bytes
                return
            attempt += 1
            with self._lock:
                self._counts["peer_retries"] += 1
            if attempt % len(addresses) == 0:
                self._ending.wait(RETRY_S)

    # -- connections ------------------------------------------------------------------------------

    def _once(self, address: TcpAddress, wanted: RowsWanted, size: int, take: Take) -> None:
        """One attempt.  Raises NoDaemon, ShuttingDown: another may succeed; other DaemonErrors."""
        with self._lock:
            idle = self._idle.setdefault(address, [])
            connection = idle.pop() if idle else None
        connection = connection or self._sockets.connect(address)
        try:
            connection.send(wanted)
            self._answer(connection, wanted, size, take)
        except BaseException:
            connection.close()
            with self._lock:  # the others are as old
                stale, self._idle[address] = self._idle[address], []
            for one in stale:
                one.close()
            raise
        with self._lock:
            self._idle[address].append(connection)

    def _answer(self, connection: TcpConnection, wanted: RowsWanted, size: int, take: Take) -> None:
        place, end = connection.address.place, time.monotonic() + ANSWER_S
        frames = None
        while frames is None:
            if self._ending.is_set():
                raise ShuttingDown("this daemon is shutting down")
            if time.monotonic() > end:
                raise NoDaemon(f"{place}: no answer in {ANSWER_S:g} s")
            frames = connection.receive(_POLL_S)
        message = decode_daemon(frames[0])
        if isinstance(message, ErrorReply):
            known = ShuttingDown if message.error == ShuttingDown.__name__ else Refused
            raise known(message.message)
        right = isinstance(message, RowsGiven) and message.request == wanted.request
        if not right or len(frames) != 2 or len(frames[1]) != size:
            raise BadMessage(
                f"{type(message).__name__} with {[len(f) for f in frames[1:]]} bytes, expected "
                f"{size} bytes of rows"
            )
        assert isinstance(message, RowsGiven)
        if take(np.frombuffer(frames[1], np.uint8)) != message.crc32c:
            raise NoDaemon(f"{place}: rows with another crc32c than they were sent with")

    def _hang_up(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()


def peer_source(peers: PeerAddresses | None) -> Callable[[Store], PeerRows | None]:
    """A function that opens, for each store, the source of its rows that are not here.

    It raises Refused: a part needs peers, or a whole store needs none.
    """

    def open_source(store: Store) -> PeerRows | None:
        part = part_with_peers(store, peers)
        if part is None or peers is None:
            return None
        check_widths(store)
        return PeerRows(store, part, peers)

    return open_source


def check_widths(store: Store) -> None:
    """Raises Refused: a row does not fit a message."""
    for _, array in split_arrays(store.manifest):
        if not max_rows(array.row_bytes):
            raise Refused(
                f"{store.path}: a row of {array.path} has {array.row_bytes:,} bytes, peers send at "
                f"most {MAX_ROW_BYTES:,} at once; serve the whole store"
            )
