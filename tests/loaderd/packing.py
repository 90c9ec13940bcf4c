"""Packs of stores, and a daemon in this process that may serve them."""

import asyncio
import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockstore.store import open_store
from clients.connection.request import fanout_fields
from clients.torch import sampling_request
from loaderd.api.endpoint import Endpoint, claim
from loaderd.api.protocol import Attach
from loaderd.server.daemon import Daemon
from loaderd.sessions.engine import default_settings
from loaderd.sessions.stores import Stores
from loaderd.streams.service import StreamService
from preprocess.packs.packs import PackResult, pack_epochs
from preprocess.packs.plan import PackOptions
from tests.golden_cases import update
from tests.preprocess.quiet import QUIET

WAIT_S = 30


def request_of(options: Mapping[str, Any]) -> Attach:
    """What a dataset with these options asks for."""
    own = dict(options)
    own.pop("plan", None)
    fields = fanout_fields(own.pop("num_neighbors"))
    names = {"split": own.pop("split", "train"), "seed_type": own.pop("input_type", "")}
    return sampling_request(own, "", **fields, **names, batch_size=own.pop("batch_size"))


def pack(
    store: Path, options: Mapping[str, Any], epochs: int = 2, hot: int = 20_000,
    group: int = 16_000, mem: int = 64 << 20, threads: int = 2,
) -> PackResult:  # fmt: skip
    """Pack what a dataset with these options would be sent."""
    asked = PackOptions(request_of(options), epochs, hot, group, mem, threads)
    return pack_epochs(store, asked, QUIET)


@contextmanager
def serving(store: Path, folder: Path, mem: int = 24 << 20) -> Iterator[tuple[str, StreamService]]:
    """A daemon in a thread: its endpoint, and its streams."""
    ready, ended = threading.Event(), threading.Event()
    endpoint, loops = Endpoint(folder / "d.sock"), []
    with (
        Stores([open_store(store)], default_settings(mem, 2, 2)) as stores,
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
            thread.join()
            assert ended.is_set()


def digests(data: Any, epoch: int, first: int = 0) -> list[str]:
    """sha256 of every field of the batches of an epoch, from a step on."""
    data.set_epoch(epoch)
    if first:
        data.load_state_dict(data.state_dict() | {"epoch": epoch, "step": first - 1})
    found = []
    for batch in data:
        assert batch.epoch == epoch
        total = hashlib.sha256()
        batch.epoch = 0  # those of a cycle are equal but for it
        update(total, "batch", batch)
        found.append(total.hexdigest())
    return found


def is_packed(streams: StreamService) -> bool:
    """Whether a session that is open reads a pack."""
    ledger, _, _ = streams.status()
    return any("packed epochs" in entry.basis for entry in ledger)


def counters(streams: StreamService) -> dict[str, int]:
    return streams.status()[2]
