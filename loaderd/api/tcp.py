"""Addresses of daemons on other hosts: `tcp://HOST:PORT`, and which of them are this host."""

import ipaddress
import socket
from typing import NamedTuple

from loaderd.api.errors import NoDaemon, Refused

SCHEME = "tcp://"
CONNECT_S = 5.0  # for a host to answer
ANY = "*"  # every address of the host


class TcpAddress(NamedTuple):
    """A host and a port."""

    host: str  # name or number; of IPv6 without brackets
    port: int
    keys: str = ""  # folder of the client's keys, if it is not the usual one

    def __str__(self) -> str:
        return f"{self.place}?keys={self.keys}" if self.keys else self.place

    @property
    def place(self) -> str:
        """The address as sockets take it, without the folder of keys."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"

    @property
    def is_v6(self) -> bool:
        return ":" in self.host

    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def numeric(self) -> "TcpAddress":
        """The same with the host as a number, to listen at.  Raises Refused: no such host."""
        return self if self.host == ANY else self._replace(host=_resolve(self))


def parse_tcp(text: str) -> TcpAddress:
    """The address that `text` names: `tcp://HOST:PORT` or `tcp://HOST:PORT?keys=FOLDER`.

    Raises Refused: it is none.
    """
    place, _, keys = text.partition("?keys=")
    scheme, found, rest = place.partition("://")
    host, colon, port = rest.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if in_brackets else host
    right = found and scheme == "tcp" and name and colon and port.isascii() and port.isdigit()
    if not right or (":" in name) != in_brackets or not _is_plain(name) or int(port) > 65535:
        raise Refused(f"address {text!r}: expected tcp://HOST:PORT, such as tcp://10.0.0.5:7000")
    return TcpAddress(name, int(port), keys)


def _is_plain(name: str) -> bool:
    """Whether a host's name has nothing odd in it."""
    return len(name) <= 253 and all(c.isascii() and (c.isalnum() or c in "-._:*%") for c in name)


def check_reachable(address: TcpAddress) -> None:
    """Raises NoDaemon at once if nobody listens."""
    try:
        socket.create_connection((address.host, address.port), CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        raise NoDaemon(
            f"{address}: no daemon listens there ({getattr(error, 'strerror', '') or error}); "
            "start one with: loaderd serve STORE --endpoint ipc:///path/of/the/socket --listen "
            f"{address}"
        ) from error


def _resolve(address: TcpAddress) -> str:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Refused(f"{address}: {error}; expected a name or number of this host") from error
    return str(found[0][4][0])
