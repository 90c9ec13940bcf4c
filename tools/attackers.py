"""Clients that attach to a daemon to make it take more memory than it has, and an honest one."""

import threading
import time
from random import Random
from typing import Any, NamedTuple

import numpy as np
import zmq
from msgspec import structs

from clients.connection.session import Attachment, Session
from loaderd.errors import DaemonError, Refused
from loaderd.protocol import (
    Attach,
    ErrorReply,
    Ids,
    LedgerEntry,
    SeedEdges,
    Temporal,
    decode_daemon,
    encode,
)
from loaderd.wire.endpoint import parse_endpoint
from loaderd.wire.transport import ask_status

_KINDS = ("ids", "times", "mask", "edges", "fanouts", "none", "others", "large", "late")
_PLANS = ("auto", "minibatch", "minibatch", "minibatch")  # `auto` samples before it is open
_ODD = ("none", "others", "large")  # what no dataset does
_LATE_S = 30.0  # that a late client keeps its numbers back, unless it is refused before
_END_S = 30.0  # for sessions to give back what they hold


class Attempt(NamedTuple):
    """What came of one attach."""

    kind: str
    end: str  # "served", "refused", "odd" of what no dataset does, or "failed"
    seconds: float
    text: str = ""  # of the refusal, or the error


def attempt(endpoint: str, number: int, nodes: int) -> Attempt:
    """One client, whose kind and sizes follow from `number`, of a graph of `nodes`."""
    begun, random = time.monotonic(), Random(number)
    kind, count = _KINDS[number % len(_KINDS)], 1 << random.randint(10, 24)
    ids = np.random.default_rng(number).integers(0, nodes, count)
    asked = Attach(
        token=0, request=0, split="", num_neighbors=(5, 5), batch_size=random.choice((64, 1024)),
        seed=number, plan=random.choice(_PLANS),
    )  # fmt: skip
    variants: dict[str, dict[str, Any]] = {
        "times": {"temporal": Temporal()},
        "edges": {"edges": SeedEdges()},
        "mask": {"mask_size": random.choice((nodes, nodes, nodes + 1, 1 << 62))},
        "fanouts": random.choice(
            (
                {"num_neighbors": (1 << 16,) * 16, "batch_size": 1 << 24},
                {"num_neighbors": (1 << 16,) * 2},
                {"num_neighbors": (100, 100)},
            )
        ),
    }
    end, text = "served", ""
    try:
        if kind in _ODD:
            _send_odd(endpoint, kind, asked, random)
            end = "odd"
        elif kind == "late":
            _keep_back(endpoint, asked, random)
            end = "odd"
        else:
            _take_batch(endpoint, structs.replace(asked, **variants.get(kind, {})), ids)
    except Refused as error:
        end, text = "refused", str(error)
    except DaemonError as error:
        end, text = "failed", f"{type(error).__name__}: {error}"
    return Attempt(kind, end, time.monotonic() - begun, text)


def _take_batch(endpoint: str, request: Attach, ids: Any = None) -> None:
    session = Session(endpoint, request, ids)
    try:
        session.start(0, 0)
        batch = session.receive_batch(0)
        session.release(0, batch.rows.group)
    finally:
        session.close()


class Honest:
    """A trainer that takes batches of a split all the time, in a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        self.batches, self.longest_s = 0, 0.0
        self.error = ""
        self._endpoint, self._ended = endpoint, threading.Event()
        self._thread = threading.Thread(target=self._train, name="honest")
        self._thread.start()

    def close(self) -> None:
        """End it; what it met is in `error`."""
        self._ended.set()
        self._thread.join()

    def _train(self) -> None:
        asked = Attach(token=0, request=0, split="train", num_neighbors=(5, 5), batch_size=256)
        try:
            session = Session(self._endpoint, asked)
            try:
                self._take_epochs(session)
            finally:
                session.close()
        except DaemonError as error:
            self.error = f"{type(error).__name__}: {error}"

    def _take_epochs(self, session: Session) -> None:
        epoch, step = 0, 0
        session.start(epoch, step)
        since = time.monotonic()
        while not self._ended.is_set():
            message: Any = session.receive_batch(step)
            rows = message.rows
            session.release(step, rows.group)
            while not rows.last:
                rows = session.receive_rows(step, rows.group + 1)
                session.release(step, rows.group)
            now = time.monotonic()
            self.longest_s, since = max(self.longest_s, now - since), now
            self.batches += 1
            step += 1
            if step == session.attached.num_steps:
                epoch, step = epoch + 1, 0
                session.start(epoch, step)


def ledger(endpoint: str) -> tuple[LedgerEntry, ...]:
    """The ledger of a daemon once it has no session; that of a time limit later if it has one."""
    end = time.monotonic() + _END_S
    while True:
        status = ask_status(parse_endpoint(endpoint))
        own = any(entry.name.startswith("session ") for entry in status.ledger)
        pinned = status.counters["slots_pinned"]
        if not (own or status.sessions or pinned) or time.monotonic() > end:
            return status.ledger
        time.sleep(0.05)


def _send_odd(endpoint: str, kind: str, asked: Attach, random: Random) -> None:
    """Attaches of a client that does not keep to the protocol; it leaves without a word."""
    attachment = Attachment(endpoint)
    dealer = _dealer(attachment, endpoint)
    try:
        for request in range(20):
            message = structs.replace(
                asked, token=attachment.token, request=request, ids=1 << random.randint(0, 24)
            )
            dealer.send(encode(message))
            if kind == "others":
                size = random.choice((7, 8, 1 << 17))
                dealer.send(encode(Ids(request=request, first=0, numbers=bytes(size))))
            if kind == "large":
                dealer.send(bytes(random.choice((1 << 18, 1 << 19, 1 << 27))))
        dealer.poll(1000)
    finally:
        dealer.close()
        attachment.close()


def _keep_back(endpoint: str, asked: Attach, random: Random) -> None:
    """Announce numbers, be asked for them, and stay without sending any."""
    attachment = Attachment(endpoint)
    dealer = _dealer(attachment, endpoint)
    try:
        ids = 1 << random.randint(0, 20)
        dealer.send(encode(structs.replace(asked, token=attachment.token, request=1, ids=ids)))
        end = time.monotonic() + _LATE_S
        while (left := end - time.monotonic()) > 0 and dealer.poll(int(1000 * left) + 1):
            if isinstance(decode_daemon(dealer.recv()), ErrorReply):
                return
    finally:
        dealer.close()
        attachment.close()


def _dealer(attachment: Attachment, endpoint: str) -> "zmq.Socket[bytes]":
    dealer: zmq.Socket[bytes] = attachment.context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(endpoint)
    return dealer
