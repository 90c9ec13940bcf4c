"""A daemon in a thread of this process, for tests that look at its streams."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockstore.store import open_store
from loaderd.api.endpoint import Endpoint, claim
from loaderd.server.daemon import Daemon
from loaderd.sessions.engine import default_settings
from loaderd.sessions.stores import Stores
from loaderd.streams.service import StreamService

WAIT_S = 30


@contextmanager
def serving(
    store: Path, folder: Path, mem: int = 24 << 20, threads: int = 2
) -> Iterator[tuple[str, StreamService]]:
    """A daemon in a thread: its endpoint, and its streams.  Raises StoreError."""
    ready, ended = threading.Event(), threading.Event()
    endpoint, loops = Endpoint(folder / "d.sock"), []
    with (
        Stores([open_store(store)], default_settings(mem, threads, threads)) as stores,
        StreamService(stores) as streams,
    ):

        async def run() -> None:
            stop, hurry = asyncio.Event(), asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            with claim(endpoint):
                daemon = Daemon(streams, endpoint)
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
