"""The daemon's shell around an engine that only writes down what it is asked for."""

import asyncio
import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from blockstore.io.arena import Arena
from loaderd.api.endpoint import Endpoint, claim
from loaderd.api.protocol import (
    Attach,
    Attached,
    Ids,
    IdsWanted,
    LedgerEntry,
    Message,
    StoreStatus,
    decode_daemon,
    encode,
)
from loaderd.memory.ledger import EngineSettings
from loaderd.memory.slots import RequestArea
from loaderd.server.daemon import Access, Daemon
from tests.loaderd.samples import RESOLVED

WAIT_S = 10


class FakeEngine:
    """Puts (name, argument) into `events`; `failure` is what its methods raise."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.may_attach, self.may_idle = threading.Event(), threading.Event()
        self.may_attach.set()
        self.may_idle.set()
        self.failure: Exception | None = None
        self.sessions = 0
        self.ids: Any = None
        self.borrowed = 0
        self.arena = Arena(2, 4096)
        self.reload_error = ""
        self.settings = EngineSettings(1 << 20)
        self.deliver = None

    def _note(self, name: str, argument: Any) -> None:
        self.events.put((name, argument))
        if self.failure is not None:
            raise self.failure

    def attach(self, request: Attach, seeds: Any) -> Attached:
        self.ids = None if seeds is None else seeds.copy()
        self._note("attach", request)
        assert self.may_attach.wait(WAIT_S)
        self.sessions += 1
        return Attached(
            request=request.request, session=self.sessions, resolved=RESOLVED, plan="minibatch",
            num_steps=10, window=2, rows=(), types=("node",),
            relations=(("node", "to", "node"),),
        )  # fmt: skip

    def check(self, request: Attach) -> None:
        pass

    def borrow(self, request: Attach) -> Any:
        self.borrowed += 1
        numbers = np.zeros(request.ids, "<i8")
        return RequestArea(numbers, range(0), 1, self)  # type: ignore[arg-type]

    def give(self, slots: list[int]) -> None:
        """As the broker of a `RequestArea`."""
        self.borrowed -= 1

    def detach(self, session: int) -> None:
        self.events.put(("detach", session))

    def start(self, start: Message) -> None:
        self._note("start", start)

    def release(self, release: Message) -> None:
        self._note("release", release)

    def parts(self):
        return []

    def stores(self) -> Any:
        return (StoreStatus("x", "/x", "f00d", "O_DIRECT", self.sessions),)

    def at_most(self, share_bytes: int) -> Any:
        return contextlib.nullcontext()

    def reload(self) -> list[str]:
        self._note("reload", None)
        return ["x: dropped"]

    def drain(self) -> None:
        self.events.put(("drain", None))
        self.may_idle.wait(WAIT_S)

    def status(self) -> Any:
        return (LedgerEntry("arena", 8192, "2 slots"),), (), {"batches": 0}

    def seen(self) -> tuple[str, Any]:
        """The next thing that happened."""
        return self.events.get(timeout=WAIT_S)


class Client:
    """A raw client: a connection at the door and one DEALER."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door.settimeout(WAIT_S)
        self.door.connect(str(endpoint.door))
        frame, (self.fd,), _, _ = socket.recv_fds(self.door, 4096, 1)
        self.welcome = decode_daemon(frame)
        self.context = zmq.Context()
        self.dealer = self.dial(endpoint)
        self.requests = 0

    def dial(self, endpoint: Endpoint) -> "zmq.Socket[bytes]":
        """One more DEALER."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        dealer.connect(str(endpoint))
        return dealer

    def send(self, message: Message, *frames: bytes) -> None:
        self.dealer.send_multipart([encode(message), *frames])

    def receive(self) -> Any:
        return decode_daemon(self.dealer.recv())

    def ask(self, message: Message, *frames: bytes) -> Any:
        self.send(message, *frames)
        return self.receive()

    def attach(self, numbers: bytes = b"", **fields: Any) -> Any:
        """The answer to an Attach with these fields; numbers are sent as they are asked for."""
        self.requests += 1
        request = Attach(token=self.welcome.token, request=self.requests, ids=len(numbers) // 8)
        found = self.ask(msgspec.structs.replace(request, **fields))
        while isinstance(found, IdsWanted):
            piece = numbers[8 * found.first : 8 * (found.first + found.count)]
            self.send(Ids(request=found.request, first=found.first, numbers=piece))
            found = self.receive()
        return found

    def hung_up(self) -> bool:
        """Waits for the daemon's hang-up."""
        return self.door.recv(1) == b""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.door.close()
        self.dealer.close(0)
        self.context.destroy(0)


class Shell:
    """A daemon in a thread of its own, with a fake engine."""

    def __init__(self, folder: Path, access: Access | None = None) -> None:
        self.access = access
        self.endpoint = Endpoint(folder / "d.sock")
        self.engine = FakeEngine()
        self.errors: list[Any] = []  # that reached the loop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        with claim(self.endpoint):
            self.daemon = Daemon(self.engine, self.endpoint, self.access)
            self._ready.set()
            await self._stop.wait()
            await self.daemon.drain(self._hurry)

    def __enter__(self) -> "Shell":
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def hurry(self) -> None:
        self.loop.call_soon_threadsafe(self._hurry.set)

    def call(self, function: Any, *arguments: Any) -> Any:
        """What a function returns that is run in the loop's thread."""
        answer: queue.Queue[Any] = queue.Queue()
        self.loop.call_soon_threadsafe(lambda: answer.put(function(*arguments)))
        return answer.get(timeout=WAIT_S)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __exit__(self, *error: object) -> None:
        self.engine.may_attach.set()
        self.engine.may_idle.set()
        with contextlib.suppress(RuntimeError):  # it has stopped already
            self.stop()
        self.join()
        os.close(self.engine.arena.fd)


@contextlib.contextmanager
def client_of(shell: Shell) -> Iterator[Client]:
    """A client of the shell's daemon."""
    client = Client(shell.endpoint)
    try:
        yield client
    finally:
        client.close()
