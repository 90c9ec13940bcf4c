"""A request whose turn comes when the daemon is ending."""

import asyncio
from types import SimpleNamespace
from typing import Any

from loaderd.api.errors import ShuttingDown
from loaderd.api.protocol import Attach
from loaderd.server.opening import SessionOpener
from loaderd.server.owners import UserLimits
from loaderd.server.registry import Peer


def test_who_waited_for_its_turn_is_told_that_the_daemon_ends():
    refused = list[Exception]()

    async def attach_late() -> None:
        engine: Any = SimpleNamespace(
            check=lambda _: None, arena=SimpleNamespace(num_slots=9, slot_bytes=4096)
        )
        registry: Any = SimpleNamespace(
            is_opening=lambda *_: False, begin=lambda *_: None, failed=lambda *_: None,
            windows=lambda _: {},
        )  # fmt: skip
        daemon: Any = SimpleNamespace(
            sessions=tuple, refuse=lambda _caller, error, _request: refused.append(error)
        )
        clients: Any = SimpleNamespace(owner_of=lambda _: "root", is_open=lambda _: True)
        opener = SessionOpener(engine, UserLimits(), registry, daemon)
        peer: Any = Peer(SimpleNamespace(remote=False), 1)
        async with opener._attaching:  # as while another session is opened
            opener.attach(peer, Attach(token=1, request=1), clients)
            (task,) = opener._tasks
            await asyncio.sleep(0)
            opener.close()
        await task

    asyncio.run(attach_late())
    (error,) = refused
    assert isinstance(error, ShuttingDown)
