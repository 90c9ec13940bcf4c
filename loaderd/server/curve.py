"""CURVE: new keys, options of sockets, and who may come in (ZAP, by pyzmq's authenticator)."""

import asyncio
import logging

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from loaderd.api.errors import Refused
from loaderd.api.keys import Authorized, KeyPair, client_keys
from loaderd.api.tcp import TcpAddress
from loaderd.monitoring.logs import Throttle, tell

DOMAIN = b"loaderd"
TURNED_AWAY_LOGGED = 20  # a second
log = logging.getLogger(__name__)
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


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


def watched(dealer: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket on which the end of a DEALER's connection is told; ask before it connects."""
    monitor: zmq.Socket[bytes] = dealer.get_monitor_socket(_ENDS)
    return monitor


class KeyAuthenticator(AsyncioAuthenticator):
    """Lets in clients whose keys are authorized; a ROUTER with CURVE speaks to nobody without."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", authorized: Authorized) -> None:
        """`start` it inside the loop, before the ROUTER of this context is bound."""
        super().__init__(context)
        self._authorized, self._told = authorized, Throttle(TURNED_AWAY_LOGGED)
        self._address = ""
        self.configure_curve_callback(DOMAIN.decode(), self)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(int(self.zap_socket.getsockopt(zmq.FD)))
        super().stop()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """`msg`: version, request, domain, address, identity, mechanism, credentials."""
        self._address = b"".join(msg[3:4]).decode("ascii", "replace")
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client of this public key may come in; a log entry, if it may not."""
        del domain  # there is one
        if self._authorized.name_of(key.decode()) is not None:
            return True
        if (left_out := self._told.admit()) is not None:
            tell(
                log, logging.WARNING, "client turned away", address=self._address[:64],
                key=key.decode(), problem=self._authorized.problem, left_out=left_out,
            )  # fmt: skip
        return False
