"""Rows of this daemon's part for its peers.

Nothing here waits for a session: threads, buffers and readers are separate, taken at the start, and
only rows that are on this disk are given.  So daemons cannot wait for each other in a cycle.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from blockstore.io.threads import CallingThreads
from blockstore.kernels.crc import crc_bytes, join_crcs
from blockstore.kernels.reads import PAGES, PLACE, cut_tasks
from blockstore.kernels.rowcache import plan_extents
from blockstore.kernels.rows import move_rows, row_layout
from blockstore.part import split_arrays
from blockstore.store import BlockedFile, Store
from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import ErrorReply, RowsGiven, RowsWanted
from loaderd.api.requests import MAX_ROW_BYTES, MAX_ROW_IDS, check_rows
from loaderd.server.sender import SendBuffers
from loaderd.streams.registry import utf8_text

OUTSTANDING = 8  # requests of a peer; one more drops the oldest: its sender has given it up
_BUFFER_BYTES = MAX_ROW_BYTES + 2 * PAGE_BYTES  # of pages: rows of an answer, wherever they begin
_BUFFERS_BYTES = (OUTSTANDING + 1) * _BUFFER_BYTES  # of a peer; pages pass through the last one
PEER_BYTES = OUTSTANDING * (MAX_ROW_BYTES + 8 * MAX_ROW_IDS) + _BUFFERS_BYTES
_JOIN_S = 1.0

Answer = RowsGiven | ErrorReply
Send = Callable[[bytes, Answer, NDArray[np.uint8] | None], None]  # to an identity, in any thread


class _Request(NamedTuple):
    identity: bytes
    wanted: RowsWanted
    rows: NDArray[np.int64]
    served: "_Served"


class _Served:
    """The rows of one store's part."""

    def __init__(self, store: Store, memory: NDArray[np.uint8], threads: CallingThreads) -> None:
        """`memory`: holds the buffers of all peers."""
        assert store.part is not None
        self.store, self.part, self._memory = store, store.part, memory
        self.arrays = {a.path: (i, first, a)
                       for i, (first, a) in enumerate(split_arrays(store.manifest))}  # fmt: skip
        self.files: list[BlockedFile] = [store.rows(a) for _, _, a in self.arrays.values()]
        self.reader = BlockReader(self.files, memory, PAGE_BYTES, threads)

    def check(self, wanted: RowsWanted) -> NDArray[np.int64]:
        """The rows that a peer wants.

        Raises Refused: of another store, map or array; BadMessage: not here, or not ascending.
        """
        part = self.part
        if wanted.digest != part.digest or wanted.array not in self.arrays:
            raise Refused(
                f"rows of {wanted.array[:256]!r} by owner map {wanted.digest[:64]}, this is the "
                f"{part}, digest {part.digest}; make all parts by one map"
            )
        if not 0 <= wanted.server < part.servers or wanted.server == part.server:
            raise BadMessage(
                f"server {wanted.server} asks server {part.server}, expected another one of "
                f"{part.servers}"
            )
        number, first, array = self.arrays[wanted.array]
        rows = check_rows(wanted, first, array.num_rows, array.row_bytes)
        holes, geometry = self.files[number].holes, self.files[number].geometry
        if holes is None:
            return rows
        per_block = geometry.rows_per_block
        low, high = int(rows[0]) // per_block, int(rows[-1]) // per_block
        here = holes.keepers[low : high + 1] == holes.server
        if not here.all():  # rows are looked at only if a block between them is elsewhere
            away = rows[~here[rows // per_block - low]]
            if away.size:
                raise BadMessage(
                    f"rows of {array.path}: id {first + away[0]} is with server "
                    f"{holes.keepers[away[0] // per_block]}, this is server {part.server}"
                )
        return rows

    def read(
        self, request: _Request, out: NDArray[np.uint8], transit: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8], int]:
        """Read the rows of a request into a buffer, one after the other; also returns their crc32c.

        out, transit   buffers of the peer; pages of rows that are not adjacent pass through the
                       second

        Raises StoreError, OSError.
        """
        number, _, array = self.arrays[request.wanted.array]
        file, rows, size = self.files[number], request.rows, request.rows.size * array.row_bytes
        geometry, layout = file.geometry, row_layout(file.geometry, array.row_bytes)
        (low, first), (high, last) = (
            divmod(int(r), geometry.rows_per_block) for r in rows[[0, -1]]
        )
        begin = low % geometry.blocks_per_shard * geometry.slot_bytes + first * array.row_bytes
        end = high % geometry.blocks_per_shard * geometry.slot_bytes + (last + 1) * array.row_bytes
        same = low // geometry.blocks_per_shard == high // geometry.blocks_per_shard
        if same and rows[-1] - rows[0] == rows.size - 1 and end - begin == size:
            # they follow each other on disk, too: they are sent from where they are read
            page, skip = divmod(begin, PAGE_BYTES)
            pages = -(-end // PAGE_BYTES) - page
            shard = low // geometry.blocks_per_shard
            self._fetch(number, np.array([[shard, page, pages]]), out)
            answer = out[skip : skip + size]
            if skip or size % PAGE_BYTES:
                return answer, int(crc_bytes(answer))
            page += shard * geometry.pages_per_shard  # these were compared with the pages' own
            return answer, int(join_crcs(file.crcs[page : page + pages]))
        runs = np.empty((rows.size, 5), np.int64)
        # no pages between the rows: these may be holes
        max_pages = transit.size // PAGE_BYTES
        runs = runs[: plan_extents(rows, 0, rows.size, layout, 0, max_pages, runs)]
        ends = np.empty(len(runs) + 1, np.int64)
        ends = ends[: cut_tasks(runs, len(runs), max_pages, ends) + 1]
        for low, high in pairwise(ends.tolist()):
            pieces = self._fetch(number, runs[low:high], transit)
            start, stop = int(runs[low, 3]), int(runs[high - 1, 4])
            part = out[start * array.row_bytes : stop * array.row_bytes]
            move_rows(part, rows[start:stop], pieces, layout, transit, False)
        return out[:size], int(crc_bytes(out[:size]))

    def _fetch(
        self, number: int, runs: NDArray[np.int64], buffer: NDArray[np.uint8]
    ) -> NDArray[np.int64]:
        """Read runs of pages into a buffer, one after the other; where each went, as pieces."""
        pieces = np.empty((len(runs), PLACE + 1), np.int64)
        pieces[:, :PLACE] = runs[:, :PLACE]
        pieces[:, PLACE] = (np.cumsum(runs[:, PAGES]) - runs[:, PAGES]) * PAGE_BYTES
        base = buffer.ctypes.data - self._memory.ctypes.data
        self.reader.fetch(number, runs, pieces[:, PLACE] + base).wait()
        return pieces


class _Peer:
    """What is kept for one peer: its requests, and the buffers of its answers."""

    def __init__(
        self,
        server: int,
        memory: NDArray[np.uint8],
        threads: CallingThreads,
        answer: Callable[["_Peer", _Request], None],
    ) -> None:
        self._requests: deque[_Request] = deque(maxlen=OUTSTANDING)
        self._come: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        *answers, self.transit = np.split(memory, OUTSTANDING + 1)
        self.buffers = SendBuffers(answers)
        self._threads, self._answer = threads, answer
        self.thread = threading.Thread(target=self._work, name=f"peer-{server}", daemon=True)
        self.thread.start()

    def put(self, request: _Request) -> None:
        self._requests.append(request)
        self._come.put(True)

    def end(self) -> None:
        self._come.put(False)

    def _work(self) -> None:
        with contextlib.closing(self._threads):
            while self._come.get():
                with contextlib.suppress(IndexError):  # a later one took its place
                    self._answer(self, self._requests.popleft())


class PeerAnswers:
    """Answers `RowsWanted`.  `ask` belongs to the event loop's thread."""

    def __init__(self, stores: Callable[[], Sequence[Store]], send: Send) -> None:
        """Takes all memory.

        stores   those that are served now
        """
        self._stores, self._send = stores, send
        self._threads = CallingThreads()
        self._served: dict[str, _Served] = {}  # by fingerprint
        self._closed: deque[bytes] = deque(maxlen=1024)  # identities that are not answered any more
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("peer_rows_given", "peer_bytes_given"), 0)
        parts = [store.part for store in stores() if store.part is not None]
        servers = [
            server
            for server in range(max((p.servers for p in parts), default=0))
            if any(p.server != server for p in parts)
        ]
        self._memory = aligned_buffer(len(servers) * _BUFFERS_BYTES)
        shares = self._memory.reshape(len(servers), _BUFFERS_BYTES)
        self._peers = {
            server: _Peer(server, memory, self._threads, self._answer)
            for server, memory in zip(servers, shares, strict=True)
        }

    def close(self) -> None:
        for peer in self._peers.values():
            peer.end()
        for peer in self._peers.values():
            peer.thread.join(_JOIN_S)
        for served in self._served.values():
            served.reader.close()

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def ask(self, identity: bytes, wanted: RowsWanted) -> None:
        """Begin to answer.  Raises Refused; BadMessage: nothing more of this peer is answered."""
        if identity in self._closed:
            return
        served = self._find(wanted.fingerprint)
        try:
            rows = served.check(wanted)
        except BadMessage:
            self._closed.append(identity)
            raise
        if wanted.server not in self._peers:  # a store that a reload opened has more servers
            raise Refused(f"server {wanted.server}: has no buffers here; start this daemon again")
        self._peers[wanted.server].put(_Request(identity, wanted, rows, served))

    def _find(self, fingerprint: str) -> _Served:
        parts = {s.manifest.fingerprint: s for s in self._stores() if s.part is not None}
        store = parts.get(fingerprint)
        if store is None:
            raise Refused(
                f"rows of fingerprint {fingerprint[:64]}, parts are served here of "
                f"{', '.join(parts) or 'none'}; make all parts of one store"
            )
        known = self._served.get(fingerprint)
        if known is None or known.store is not store:
            self._served[fingerprint] = known = _Served(store, self._memory, self._threads)
        return known

    def _answer(self, peer: _Peer, request: _Request) -> None:
        """Read and send the answer to a request, in the peer's thread."""
        wanted, buffer = request.wanted, peer.buffers.take()
        try:
            rows, crc = request.served.read(request, buffer, peer.transit)
        except (StoreError, OSError) as error:
            peer.buffers.put(buffer)
            reply = ErrorReply(
                error=Refused.__name__, message=utf8_text(str(error)), request=wanted.request,
                session=-1, run=-1,
            )  # fmt: skip
            self._send(request.identity, reply, None)
            return
        given = RowsGiven(
            request=wanted.request, array=wanted.array, count=request.rows.size, crc32c=crc
        )
        with self._lock:
            self._counts["peer_rows_given"] += request.rows.size
            self._counts["peer_bytes_given"] += rows.size
        self._send(request.identity, given, peer.buffers.lend(buffer, rows))


def peers_bytes(stores: Sequence[Store]) -> int:
    """Memory that peers take of --mem: requests and answers of each other server, by the largest
    part, and the server of each block."""
    parts = [store.part for store in stores if store.part is not None]
    blocks = [store.rows(a).geometry.num_blocks for store in stores if store.part is not None
              for _, a in split_arrays(store.manifest)]  # fmt: skip
    return max((p.servers - 1 for p in parts), default=0) * PEER_BYTES + 2 * sum(blocks)
