"""The port of peers: what it answers, what it refuses, and what ends a connection."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import google_crc32c
import numpy as np
import pytest

from blockstore.errors import AbsentRows
from blockstore.kernels.crc import crc_bytes
from blockstore.store import open_store, read_rows
from loaderd.api.peers import PeerAddresses
from loaderd.api.protocol import ErrorReply, RowsGiven, RowsWanted, decode_daemon, encode
from loaderd.api.requests import MAX_ROW_IDS
from loaderd.api.tcp import parse_tcp
from loaderd.server import peer_answers
from loaderd.server.peer_rows import PeerRows
from loaderd.server.transport import Sockets
from tests.graphs import make_csc
from tests.loaderd.parts import make_parts
from tests.loaderd.threaded import serving
from tests.remotes import free_address, introduce, make_keys, remote_daemon
from tests.stores import write_store

NODES, WIDTH = 600, 64
MEM = 2 << 20


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two servers: nodes below 320, and the others."""
    folder = tmp_path_factory.mktemp("peers")
    write_store(folder / "whole", make_csc([3] * NODES, 1), [1, 2], width=WIDTH)
    return make_parts(folder / "whole", folder / "m", np.arange(NODES) // 320, 2)


@pytest.fixture
def served(parts: list[Path], tmp_path: Path) -> Iterator[str]:
    """Where server 0 answers."""
    address = free_address()
    peers = PeerAddresses({1: (parse_tcp(free_address()),)}, 0.5)
    with serving(parts[0], tmp_path, MEM, peers=peers, listen=address):
        yield address


class Asking:
    """A peer by hand."""

    def __init__(self, part: Path, address: str) -> None:
        self.store, self.sockets = open_store(part), Sockets()
        self.connection = self.sockets.connect(parse_tcp(address))

    def wanted(self, ids: list[int], **other: object) -> RowsWanted:
        part = self.store.part
        assert part is not None
        fields = {
            "request": 3, "fingerprint": part.fingerprint, "digest": part.digest, "server": 1,
            "array": next(iter(part.rows)), "ids": np.array(ids, "<u8").tobytes(),
        }  # fmt: skip
        return RowsWanted(**(fields | other))  # type: ignore[arg-type]

    def answer(self, message: RowsWanted, wait_s: float = 5.0) -> list[memoryview] | None:
        self.connection.send(message)
        return self.connection.receive(wait_s)

    def close(self) -> None:
        self.connection.close()
        self.sockets.close()


def test_rows_are_those_of_the_store(parts: list[Path], served: str):
    peer, rng = Asking(parts[1], served), np.random.default_rng(0)
    whole = open_store(parts[0].parent.parent / "whole")
    rows = read_rows(whole, whole.manifest.types[0].features["x"])
    for size in (1, 5, 100, 320):
        ids = np.sort(rng.choice(320, size, replace=False))
        frames = peer.answer(peer.wanted(ids.tolist()))
        assert frames is not None
        given = decode_daemon(frames[0])
        assert isinstance(given, RowsGiven)
        assert (given.request, given.count) == (3, size)
        assert given.crc32c == google_crc32c.value(bytes(frames[1]))
        assert np.array_equal(np.frombuffer(frames[1], np.float32).reshape(-1, WIDTH), rows[ids])
    peer.close()


def test_rows_that_arrive_with_another_crc32c_are_asked_for_again(
    parts: list[Path], served: str, monkeypatch: pytest.MonkeyPatch
):
    store, whole = open_store(parts[1]), open_store(parts[0].parent.parent / "whole")
    wrong, taken, ids = [1, 1], list[np.ndarray](), np.array([1, 3])

    def crc(rows: np.ndarray) -> int:
        return int(crc_bytes(rows)) ^ (wrong.pop() if wrong else 0)

    def take(rows: np.ndarray) -> int:
        taken.append(rows.view(np.float32).reshape(-1, WIDTH).copy())
        return int(crc_bytes(rows))

    monkeypatch.setattr(peer_answers, "crc_bytes", crc)
    assert store.part is not None
    peers = PeerAddresses({0: (parse_tcp(served),)}, 5.0)
    with PeerRows(store, store.part, peers) as rows:
        rows.ask(0, next(iter(store.part.rows)), ids, take)
        assert rows.counters()["peer_retries"] == 2
    assert len(taken) == 3
    expected = read_rows(whole, whole.manifest.types[0].features["x"])
    assert np.array_equal(taken[-1], expected[ids])


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([5, 4], "expected ascending ones from 0 to 599"),
        ([5, 5], "expected ascending"),
        ([1, 599], "id 599 is with server 1, this is server 0"),
        ([1, 2**63], "expected ascending ones from 0"),
        ([], "0 bytes of ids"),
        (list(range(MAX_ROW_IDS + 1)), "bytes of ids, expected 8 each, 1 to 4096"),
    ],
)
def test_wrong_ids_end_the_connection(parts: list[Path], served: str, ids: list[int], match: str):
    peer = Asking(parts[1], served)
    frames = peer.answer(peer.wanted(ids))
    assert frames is not None
    reply = decode_daemon(frames[0])
    assert isinstance(reply, ErrorReply)
    assert reply.error == "BadMessage"
    assert match in reply.message
    assert peer.answer(peer.wanted([1]), 0.4) is None  # nothing more is answered
    peer.close()
    again = Asking(parts[1], served)
    assert again.answer(again.wanted([1])) is not None
    again.close()


def test_what_is_refused(parts: list[Path], served: str):
    for other, match in (
        ({"fingerprint": "0" * 32}, "rows of fingerprint 000"),
        ({"digest": "0" * 32}, "by owner map 000"),
        ({"array": "nodes/node/label"}, "'nodes/node/label' by owner map"),
        ({"server": 0}, "server 0 asks server 0"),
        ({"server": 2}, "server 2 asks server 0"),
    ):
        peer = Asking(parts[1], served)
        frames = peer.answer(peer.wanted([1], **other))
        assert frames is not None
        reply = decode_daemon(frames[0])
        assert isinstance(reply, ErrorReply)
        assert match in reply.message
        peer.close()


def test_damaged_frames_do_no_harm(parts: list[Path], served: str):
    random, good = Random(1), Asking(parts[1], served)
    for _ in range(300):
        raw = bytearray(encode(good.wanted([1, 2, 3])))
        for _ in range(random.randint(1, 4)):
            raw[random.randrange(len(raw))] = random.randrange(256)
        peer = Asking(parts[1], served)
        peer.connection.dealer.send(bytes(raw[: random.randint(1, len(raw))]))
        peer.close()
    assert good.answer(good.wanted([1])) is not None
    good.close()


def test_a_peer_whose_key_is_not_known(parts: list[Path], tmp_path: Path):
    keys = make_keys(tmp_path, "here", "there")
    other = tmp_path / "peers"
    other.write_text(f"1 {free_address()}\n")
    (keys["here"] / "authorized_keys").write_text("")
    options = ("--keys", str(keys["here"]), "--peers", str(other))
    with remote_daemon(parts[0], "64M", *options) as (_, address):
        with (keys["there"] / "known_daemons").open("a") as stream:
            stream.write(f"{(keys['here'] / 'public.key').read_text().split()[0]} *\n")
        store = open_store(parts[1])
        place = parse_tcp(f"{address}?keys={keys['there']}")
        assert store.part is not None
        array = next(iter(store.part.rows))
        with PeerRows(store, store.part, PeerAddresses({0: (place,)}, 5.0)) as rows:
            with pytest.raises(AbsentRows, match=f"server 0 at {address}: .* key is not let in"):
                rows.ask(0, array, np.array([1]), crc_bytes)
            introduce(keys["here"], keys["there"])
            sizes: list[int] = []
            rows.ask(0, array, np.array([1]), lambda r: (sizes.append(r.size), crc_bytes(r))[1])
            assert sizes == [4 * WIDTH]
