"""Addresses and files of keys."""

import asyncio
import stat
from types import SimpleNamespace

import pytest
import zmq

from loaderd.api.errors import NoDaemon, Refused
from loaderd.api.keys import (
    AUTHORIZED,
    KNOWN,
    PUBLIC,
    SECRET,
    Authorized,
    client_keys,
    keys_folder,
    read_pair,
    write_pair,
)
from loaderd.api.tcp import TcpAddress, check_reachable, parse_tcp
from loaderd.server.curve import KeyAuthenticator, new_pair
from tests.remotes import free_address

z85 = pytest.importorskip("zmq.utils.z85")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://10.0.0.5:7000", TcpAddress("10.0.0.5", 7000)),
        ("tcp://node-1.lab:0", TcpAddress("node-1.lab", 0)),
        ("tcp://[::1]:7000", TcpAddress("::1", 7000)),
        ("tcp://*:7000", TcpAddress("*", 7000)),
        ("tcp://h:1?keys=/k", TcpAddress("h", 1, "/k")),
    ],
)
def test_addresses(text, found):
    assert parse_tcp(text) == found
    assert str(parse_tcp(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://h", "tcp://h:", "tcp://:7", "tcp://h:70000", "tcp://::1:7", "ipc:///x",
     "tcp://h:-1", "tcp://h/x:7", "tcp://a;b:7", "tcp://h:7\n", "tcp://h:٧", "tcp://[h]:7"],
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(Refused, match="expected tcp://HOST:PORT"):
        parse_tcp(text)


def test_what_is_loopback():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert TcpAddress(host, 1).is_loopback()
    for host in ("*", "0.0.0.0", "::", "10.0.0.5", "localhost.evil.org", "127.0.0.1.nip.io"):
        assert not TcpAddress(host, 1).is_loopback()


def test_nobody_listens():
    with pytest.raises(NoDaemon, match="no daemon listens there"):
        check_reachable(parse_tcp(free_address()))


def test_keys_are_for_this_users_eyes(tmp_path):
    pair = new_pair()
    write_pair(tmp_path / "k", pair, "ann@host")
    assert read_pair(tmp_path / "k") == pair
    for name in (SECRET, PUBLIC):
        assert stat.S_IMODE((tmp_path / "k" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o700
    with pytest.raises(Refused, match="is there already"):
        write_pair(tmp_path / "k", new_pair(), "ann")
    assert pair.secret not in (tmp_path / "k" / PUBLIC).read_text()
    (tmp_path / "k" / SECRET).chmod(0o640)
    with pytest.raises(Refused, match="mode 0640, expected 0600"):
        read_pair(tmp_path / "k")


def test_files_that_are_no_keys(tmp_path):
    with pytest.raises(Refused, match=r"secret\.key: No such file.*loaderd keygen"):
        read_pair(tmp_path)
    (tmp_path / AUTHORIZED).write_text("# team\n\nshort key\n")
    with pytest.raises(Refused, match=r"authorized_keys:3: 'short'"):
        Authorized(tmp_path)
    (tmp_path / AUTHORIZED).write_bytes(b"\xff" * (2 << 20))
    with pytest.raises(Refused, match="is larger than"):
        Authorized(tmp_path)


def test_a_client_finds_the_key_of_its_daemon(tmp_path, monkeypatch):
    keys = [new_pair().public for _ in range(3)]
    write_pair(tmp_path, new_pair(), "me")
    monkeypatch.setenv("LOADERD_KEYS", str(tmp_path))
    assert keys_folder() == tmp_path
    assert client_keys(TcpAddress("127.0.0.1", 7000)) is None
    (tmp_path / KNOWN).write_text(f"{keys[0]} a:7000\n{keys[1]} a\n# all others\n{keys[2]}\n")
    for host, port, key in (("a", 7000, keys[0]), ("a", 7001, keys[1]), ("b", 7000, keys[2])):
        assert client_keys(TcpAddress(host, port)) == (key, read_pair(tmp_path))


def test_authorized_keys_are_read_again_when_they_change(tmp_path):
    ann, bob = new_pair().public, new_pair().public
    path = tmp_path / AUTHORIZED
    path.write_text(f"{ann} ann of the lab\n")
    authorized = Authorized(tmp_path)
    assert (authorized.name_of(ann), authorized.name_of(bob)) == ("ann of the lab", None)
    path.write_text(f"{ann} ann of the lab\n{bob}\n")
    assert authorized.name_of(bob) == bob[:8]
    path.write_text("nonsense that is not a key\n")
    assert authorized.name_of(ann) is None
    assert "authorized_keys:1" in authorized.problem
    path.unlink()
    assert authorized.name_of(ann) is None


@pytest.fixture
def context():
    with zmq.Context() as opened:
        yield opened


def test_answers_to_who_may_come_in(tmp_path, caplog, context):
    ann, eve = new_pair().public, new_pair().public
    (tmp_path / AUTHORIZED).write_text(f"{ann} ann\n")
    answers = []
    gate = KeyAuthenticator(context, Authorized(tmp_path))
    gate.zap_socket = SimpleNamespace(send_multipart=answers.append)

    def ask(key: bytes, version: bytes = b"1.0") -> tuple[bytes, bytes]:
        """Code, and user of the connection."""
        frames = [version, b"7", b"loaderd", b"10.0.0.9", b"", b"CURVE", key]
        asyncio.run(gate.handle_zap_message(frames))
        (answer,) = answers
        answers.clear()
        assert answer[:2] == [b"1.0", b"7"]
        return answer[2], answer[4]

    raw = z85.decode(ann.encode())
    assert ask(raw) == (b"200", ann.encode())
    assert not caplog.records
    assert ask(z85.decode(eve.encode())) == (b"400", b"")
    (record,) = [r for r in caplog.records if r.message == "client turned away"]
    assert (record.fields["address"], record.fields["key"]) == ("10.0.0.9", eve)
    assert ask(raw, version=b"2.0") == (b"400", b"")
