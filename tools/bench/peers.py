"""Rows from a peer over loopback against a plain zmq copy of as many bytes, both with CURVE.

`rows of a peer`: the reader of a daemon asks a real daemon for every row that is not in its own
part; that one reads them from disk, and verifies them.

`plain copy`: a process sends the same number of bytes out of memory, by messages of the same size
over connections as many; each is copied once.  `heaps tuned`: the same with the daemon's heaps, as
what glibc does by itself costs libzmq a quarter of its time: it gives pages back after a message.

Each side has two processes with one thread of zmq each, and the options of the daemon's sockets. A
round is 256 MB, so that the first and the last messages of connections count little, and the sides
take turns.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import zmq

from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader, make_transit
from blockstore.kernels.rowcache import plan_extents
from blockstore.kernels.rows import row_layout
from blockstore.store import open_store
from loaderd.api.keys import KeyPair, read_pair
from loaderd.api.peers import read_peers
from loaderd.api.requests import MAX_ROW_BYTES
from loaderd.api.tcp import parse_tcp
from loaderd.server.curve import client_options, server_options
from loaderd.server.peer_rows import THREADS, PeerRows
from loaderd.server.process import share_heaps
from loaderd.server.transport import Sockets
from tools.bench.harness import CONTEXT, BenchPlan, GraphOptions, Ratio, Run, Side
from tools.bench.setup import free_port, make_keys, make_parts, rate, serving

ROWS, PLAIN, TUNED = "rows of a peer", "plain copy", "plain copy, heaps tuned"


@dataclass(frozen=True)
class PeersOptions(GraphOptions):
    nodes: int = 1_000_000
    degree: int = 2
    features: Annotated[int, "of 4 bytes each"] = 128
    rounds: int = 9


def open_rows(given: PeersOptions) -> Iterator[Run]:
    """Our reader of part 0, with a daemon that serves part 1."""
    share_heaps()
    mine, theirs = make_parts(given.store(), 2)
    place = given.folder / "peers"
    place.mkdir(exist_ok=True)
    daemon, client = make_keys(place / "keys")
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    lines = place / "lines"
    lines.write_text("".join(f"{server} {a}\n" for server, a in enumerate(addresses)))
    options = ["--listen", addresses[1], "--keys", str(daemon), "--peers", str(lines)]
    store, peers = open_store(mine), read_peers(lines, client)
    array = next(iter(store.manifest.types[0].features.values()))
    file, part = store.rows(array), store.part
    assert part is not None
    assert file.holes is not None
    keepers = np.repeat(file.holes.keepers, file.geometry.rows_per_block)[: array.num_rows]
    rows = np.flatnonzero(keepers == 1)
    memory = aligned_buffer(THREADS * MAX_ROW_BYTES)
    transit = make_transit(np.split(memory, THREADS))
    layout = row_layout(file.geometry, array.row_bytes)
    runs = np.empty((rows.size, 5), np.int64)
    runs = runs[: plan_extents(rows, 0, rows.size, layout, 0, transit.pages, runs)]

    def read() -> None:
        reader.stream(0, runs, transit, lambda _low, _high, _pages: None, rows=rows).wait()

    with (
        serving(theirs, place, "64M", *options),
        PeerRows(store, part, peers) as source,
        BlockReader([file], memory, MAX_ROW_BYTES, 1, source) as reader,
    ):
        yield lambda: {
            **rate(rows.size * array.row_bytes, read),
            "requests": source.counters()["peer_requests"],
        }  # fmt: skip


def _serve_plain(place: str, pair: KeyPair, tuned: bool) -> None:
    """Answer every message with as many bytes as a peer sends at most, until killed."""
    if tuned:
        share_heaps()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router, data = context.socket(zmq.ROUTER), np.ones(MAX_ROW_BYTES, np.uint8)
    router.copy_threshold = 0
    for option, value in server_options(pair):
        router.setsockopt(option, value)
    router.bind(place)
    while True:
        identity, _ = router.recv_multipart()
        router.send(identity, zmq.SNDMORE)
        router.send(data.data, copy=False)


def _copy_plain(dealer: "zmq.Socket[bytes]", count: int) -> None:
    memory = np.empty(MAX_ROW_BYTES, np.uint8)
    for _ in range(count):
        dealer.send(b"")
        memory[:] = np.frombuffer(dealer.recv(copy=False).buffer, np.uint8)


def open_plain(given: PeersOptions, tuned: bool) -> Iterator[Run]:
    """A plain copy of the size of half of the nodes' rows; `tuned`: with the daemon's heaps."""
    if tuned:
        share_heaps()
    daemon, client = make_keys(given.folder / "peers" / "keys")
    address = parse_tcp(f"tcp://127.0.0.1:{free_port()}?keys={client}")
    count = -(-given.nodes * given.features * 4 // (2 * THREADS * MAX_ROW_BYTES))
    server = CONTEXT.Process(target=_serve_plain, args=(address.place, read_pair(daemon), tuned))
    server.start()
    with ExitStack() as stack:
        stack.callback(server.join)
        stack.callback(server.kill)
        sockets = stack.enter_context(closing(Sockets()))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        dealers = [stack.enter_context(sockets.context.socket(zmq.DEALER)) for _ in range(THREADS)]
        for dealer in dealers:
            for option, value in (*client_options(address), (zmq.LINGER, 0)):
                dealer.setsockopt(option, value)
            dealer.connect(address.place)

        def copy() -> None:
            list(pool.map(_copy_plain, dealers, [count] * THREADS))

        yield lambda: rate(THREADS * count * MAX_ROW_BYTES, copy)


def peers(given: PeersOptions) -> Iterator[BenchPlan]:
    make_parts(given.store(), 2)
    make_keys(given.folder / "peers" / "keys")
    yield BenchPlan(
        [
            Side(ROWS, open_rows, (given,)),
            Side(PLAIN, open_plain, (given, False)),
            Side(TUNED, open_plain, (given, True)),
        ],
        ratios=[
            Ratio("over_plain", ROWS, "GB_per_s", PLAIN),
            Ratio("over_tuned", ROWS, "GB_per_s", TUNED),
        ],
    )
