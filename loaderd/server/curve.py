"""CURVE keys over tcp, connections to daemons, and which clients are let in (ZAP, by pyzmq)."""

import asyncio
import logging
from collections.abc import Sequence

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from loaderd.api.errors import NoDaemon, Refused
from loaderd.api.keys import Authorized, KeyPair, client_keys
from loaderd.api.protocol import Message, encode
from loaderd.api.tcp import TcpAddress
from loaderd.monitoring.logs import Throttle, log_event

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
    """Socket options of a client, with keys if the daemon's key is known.

    Raises Refused: it is not, and the address is not loopback; or this side has no keys.
    """
    keys = client_keys(address)
    options: list[tuple[int, int | bytes]] = [(zmq.IPV6, int(address.is_v6))]
    if keys is not None:
        daemon, own = keys
        options += [
            (zmq.CURVE_SERVERKEY, daemon.encode()),
            (zmq.CURVE_PUBLICKEY, own.public.encode()),
            (zmq.CURVE_SECRETKEY, own.secret.encode()),
        ]
    return options


def watched(dealer: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket that reports the end of a DEALER's connection; call it before that connects."""
    monitor: zmq.Socket[bytes] = dealer.get_monitor_socket(_ENDS)
    return monitor


class TcpConnection:
    """A DEALER's connection to a daemon on another host; one thread at a time."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: TcpAddress,
        options: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Begins to connect, once.  Raises Refused: there are no keys for that address."""
        self.address = address
        keys = client_options(address)
        self.dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.monitor = watched(self.dealer)
        self._poller = zmq.Poller()
        for option, value in ((zmq.RECONNECT_IVL, -1), (zmq.LINGER, 0), *options, *keys):
            self.dealer.setsockopt(option, value)
        self.dealer.connect(address.place)
        self._poller.register(self.dealer, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Raises NoDaemon: the connection has ended meanwhile."""
        try:
            self.dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise NoDaemon(f"{self.address.place}: no daemon answers there") from error

    def receive(self, wait_s: float) -> list[memoryview] | None:
        """The frames of the next message; None: none came in that time.

        Raises NoDaemon: the connection has ended; Refused: the key is not let in.
        """
        ready = dict(self._poller.poll(int(1000 * wait_s)))
        if self.dealer in ready:
            return [frame.buffer for frame in self.dealer.recv_multipart(copy=False)]
        if self.monitor in ready:
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise Refused(
                    f"{self.address.place}: this side's key is not let in; add the line of its "
                    "public.key to authorized_keys there"
                )
            raise NoDaemon(
                f"{self.address.place}: no daemon answers there; if one serves, do both sides have "
                "each other's keys?"
            )
        return None

    def close(self) -> None:
        self.dealer.disable_monitor()
        self.monitor.close(0)
        self.dealer.close(0)


class KeyAuthenticator(AsyncioAuthenticator):
    """Lets in clients whose keys are authorized; without keys, a CURVE ROUTER speaks to nobody."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", authorized: Authorized) -> None:
        """`start` it inside the loop, before the ROUTER of this context is bound."""
        super().__init__(context)
        self._authorized, self._throttle = authorized, Throttle(TURNED_AWAY_LOGGED)
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
        """Whether the client of this public key may come in; logs it if it may not."""
        del domain  # there is one
        if self._authorized.name_of(key.decode()) is not None:
            return True
        if (left_out := self._throttle.admit()) is not None:
            log_event(
                log, logging.WARNING, "client turned away", address=self._address[:64],
                key=key.decode(), problem=self._authorized.problem, left_out=left_out,
            )  # fmt: skip
        return False
