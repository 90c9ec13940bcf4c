"""Clients that attach to a daemon to make it take more memory than it has."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import Any, NamedTuple

import numpy as np
import zmq
from msgspec import structs

from clients.connection.session import Attachment, Session
from loaderd.api.errors import DaemonError, Refused
from loaderd.api.protocol import (
    Attach,
    ErrorReply,
    Ids,
    SeedEdges,
    Temporal,
    decode_daemon,
    encode,
)

_KINDS = ("ids", "times", "mask", "edges", "fanouts", "none", "others", "large", "late")
_PLANS = ("auto", "minibatch", "minibatch", "minibatch")  # `auto` samples before it is open
_LATE_S = 30.0  # that a late client keeps its numbers back, unless it is refused before


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
    asked = Attach(
        token=0, request=0, split="", num_neighbors=(5, 5), batch_size=random.choice((64, 1024)),
        seed=number, plan=random.choice(_PLANS),
    )  # fmt: skip
    huge = random.choice((((1 << 16,) * 16, 1 << 24), ((1 << 16,) * 2, 64), ((100, 100), 64)))
    variants: dict[str, dict[str, Any]] = {
        "ids": {},
        "times": {"temporal": Temporal()},
        "edges": {"edges": SeedEdges()},
        "mask": {"mask_size": random.choice((nodes, nodes, nodes + 1, 1 << 62))},
        "fanouts": {"num_neighbors": huge[0], "batch_size": huge[1]},
    }
    end, text = "served", ""
    try:
        if kind in variants:
            ids = np.random.default_rng(number).integers(0, nodes, count)
            _take_batch(endpoint, structs.replace(asked, **variants[kind]), ids)
        else:
            end = "odd"
            _send_odd(endpoint, kind, asked, random)
    except Refused as error:
        end, text = "refused", str(error)
    except DaemonError as error:
        end, text = "failed", f"{type(error).__name__}: {error}"
    return Attempt(kind, end, time.monotonic() - begun, text)


def _take_batch(endpoint: str, request: Attach, ids: Any) -> None:
    with closing(Session(endpoint, request, ids)) as session:
        session.start(0, 0)
        batch = session.receive_batch(0)
        session.release(0, batch.rows.group)


def _send_odd(endpoint: str, kind: str, asked: Attach, random: Random) -> None:
    """Attaches of a client that does not keep to the protocol; it leaves without a word."""
    with _connected(endpoint) as (token, dealer):
        if kind == "late":  # announces numbers, is asked for them, and stays without sending any
            ids = 1 << random.randint(0, 20)
            dealer.send(encode(structs.replace(asked, token=token, request=1, ids=ids)))
            end = time.monotonic() + _LATE_S
            while (left := end - time.monotonic()) > 0 and dealer.poll(int(1000 * left) + 1):
                if isinstance(decode_daemon(dealer.recv()), ErrorReply):
                    return
            return
        for request in range(20):
            ids = 1 << random.randint(0, 24)
            dealer.send(encode(structs.replace(asked, token=token, request=request, ids=ids)))
            if kind == "others":
                size = random.choice((7, 8, 1 << 17))
                dealer.send(encode(Ids(request=request, first=0, numbers=bytes(size))))
            if kind == "large":
                dealer.send(bytes(random.choice((1 << 18, 1 << 19, 1 << 27))))
        dealer.poll(1000)


@contextmanager
def _connected(endpoint: str) -> Iterator[tuple[int, "zmq.Socket[bytes]"]]:
    """A token, and a socket of its own."""
    with closing(Attachment(endpoint)) as attachment:
        dealer: zmq.Socket[bytes] = attachment.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        with closing(dealer):
            yield attachment.token, dealer
