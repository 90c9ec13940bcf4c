"""A daemon in a thread of this process, for tests that look at its streams."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from blockstore.store import open_store
from loaderd.api.endpoint import Endpoint, claim
from loaderd.api.peers import PeerAddresses
from loaderd.api.tcp import parse_tcp
from loaderd.server.daemon import Access, Daemon
from loaderd.server.peer_answers import peers_bytes
from loaderd.server.peer_rows import peer_source
from loaderd.server.remote import Listening
from loaderd.sessions.engine import default_settings
from loaderd.sessions.stores import Stores
from loaderd.streams.service import StreamService

WAIT_S = 30


@contextmanager
def serving(
    store: Path,
    folder: Path,
    mem: int = 24 << 20,
    threads: int = 2,
    peers: PeerAddresses | None = None,
    listen: str = "",
) -> Iterator[tuple[str, StreamService]]:
    """A daemon in a thread: its endpoint, and its streams.  Raises StoreError, Refused.

    peers    of a part of a store, which take their memory beside `mem`
    listen   where it serves other hosts, without keys
    """
    ready, ended = threading.Event(), threading.Event()
    endpoint, loops = Endpoint(folder / "d.sock"), []
    opened = [open_store(store)]
    more = peers_bytes(opened)
    settings = replace(default_settings(mem + more, threads, threads), peer_bytes=more)
    access = Access(listening=Listening(parse_tcp(listen)) if listen else None)
    with (
        Stores(opened, settings, peer_source(peers)) as stores,
        StreamService(stores) as streams,
    ):

        async def run() -> None:
            stop, hurry = asyncio.Event(), asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            with claim(endpoint):
                daemon = Daemon(streams, endpoint, access)
                ready.set()
                await stop.wait()
                await daemon.drain(hurry)
            ended.set()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            yield str(endpoint), streams
        finally:
            loop, stop = loops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(WAIT_S)
            assert ended.is_set()
