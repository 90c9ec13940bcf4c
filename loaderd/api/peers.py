"""The file of peers: addresses of the servers that have the other parts of a store."""

from pathlib import Path
from typing import NamedTuple

from blockstore.part import StorePart
from blockstore.store import Store
from loaderd.api.errors import Refused
from loaderd.api.keys import read_lines
from loaderd.api.tcp import TcpAddress, parse_tcp

WAIT_S = 60.0  # for a peer to come back


class PeerAddresses(NamedTuple):
    """The replicas of each server, in the order in which they are tried."""

    by_server: dict[int, tuple[TcpAddress, ...]]
    wait_s: float = WAIT_S


def read_peers(path: Path, keys: Path | None, wait_s: float = WAIT_S) -> PeerAddresses:
    """Read a line for each server: its number and its addresses; # begins a comment.

    keys   folder of this side's keys; None: the usual one

    Raises Refused: it cannot be read, or names a server twice.
    """
    lines, _ = read_lines(path, f"--peers {path}", "expected a line for each server")
    found: dict[int, tuple[TcpAddress, ...]] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--peers {path}:{number}"
        if not (words[0].isascii() and words[0].isdigit()) or len(words) < 2 or len(words[0]) > 6:
            raise Refused(
                f"{where}: {line[:60]!r}, expected a server's number and its addresses, such as "
                "1 tcp://10.0.0.6:7000"
            )
        server = int(words[0])
        if server in found:
            raise Refused(f"{where}: server {server} was named before, expected one line for each")
        try:
            places = tuple(parse_tcp(word) for word in words[1:])
        except Refused as error:
            raise Refused(f"{where}: {error}") from error
        found[server] = tuple(
            p if p.keys or keys is None else p._replace(keys=str(keys)) for p in places
        )
    return PeerAddresses(found, wait_s)


def part_with_peers(store: Store, peers: PeerAddresses | None) -> StorePart | None:
    """The part of a larger store that a store is; None: it is a whole one.

    Raises Refused: it needs peers and has none, or some are missing; or it needs none.
    """
    part = store.part
    if part is None:
        if peers is not None:
            raise Refused(
                f"{store.path}: is a whole store, --peers is for parts; leave it out, or serve a "
                "part made by `blockstore part`"
            )
        return None
    if peers is None:
        raise Refused(
            f"{store.path}: is the {part}; expected --peers FILE with the addresses of the others, "
            "beside --listen"
        )
    expected = set(range(part.servers))
    named = set(peers.by_server)
    if missing := sorted(expected - named - {part.server}):
        raise Refused(f"--peers: no line of server {missing[0]}, expected 0 to {part.servers - 1}")
    if foreign := sorted(named - expected):
        raise Refused(f"--peers: server {foreign[0]}, expected 0 to {part.servers - 1}")
    return part
