"""CURVE: new keys, sockets' options, and answers to libzmq's question who may come in (ZAP)."""

import logging
from collections.abc import Sequence

import zmq
from zmq.utils import z85

from loaderd.errors import Refused
from loaderd.logs import Throttle, tell
from loaderd.wire.keys import Authorized, KeyPair, client_keys
from loaderd.wire.tcp import TcpAddress

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"loaderd"
TURNED_AWAY_LOGGED = 20  # a second
log = logging.getLogger(__name__)


def new_pair() -> KeyPair:
    """A new pair of keys.  Raises Refused: this libzmq cannot."""
    if not zmq.has("curve"):
        raise Refused("this libzmq has no CURVE; install the pyzmq of PyPI")
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def server_options(pair: KeyPair) -> list[tuple[int, int | bytes]]:
    """Socket options of a ROUTER that speaks to nobody without keys."""
    return [
        (zmq.CURVE_SERVER, 1),
        (zmq.CURVE_SECRETKEY, pair.secret.encode()),
        (zmq.ZAP_DOMAIN, DOMAIN),
    ]


def client_options(address: TcpAddress) -> list[tuple[int, int | bytes]]:
    """Socket options of a client: with keys where the daemon's is known.

    Raises Refused: it is not, and the address is not loopback; or this side has no keys.
    """
    keys = client_keys(address)
    options: list[tuple[int, int | bytes]] = [(zmq.IPV6, int(address.is_v6))]
    if keys is not None:
        options += [
            (zmq.CURVE_SERVERKEY, keys.daemon.encode()),
            (zmq.CURVE_PUBLICKEY, keys.own.public.encode()),
            (zmq.CURVE_SECRETKEY, keys.own.secret.encode()),
        ]
    return options


class Gate:
    """Answers libzmq's questions; says in the log who is turned away, if not too often."""

    def __init__(self, authorized: Authorized) -> None:
        """`authorized`: who may come in."""
        self._authorized, self._told = authorized, Throttle(TURNED_AWAY_LOGGED)

    def answer(self, frames: Sequence[bytes]) -> list[bytes]:
        """The reply to a question: 200 and the client's key as its user, or 400.

        frames   delimiter, version, request, domain, address, identity, mechanism, credentials
        """
        request = frames[2] if len(frames) > 2 else b""
        key = ""
        if len(frames) == 8 and frames[1] == ZAP_VERSION and frames[6] == b"CURVE":
            key = z85.encode(frames[7]).decode() if len(frames[7]) == 32 else ""
        if key and self._authorized.name_of(key) is not None:
            return [b"", ZAP_VERSION, request, b"200", b"OK", key.encode(), b""]
        address = frames[4].decode("ascii", "replace") if len(frames) > 4 else ""
        if (left_out := self._told.admit()) is not None:
            tell(
                log, logging.WARNING, "client turned away", address=address[:64],
                key=key or "none", problem=self._authorized.problem, left_out=left_out,
            )  # fmt: skip
        return [b"", ZAP_VERSION, request, b"400", b"not authorized", b"", b""]
