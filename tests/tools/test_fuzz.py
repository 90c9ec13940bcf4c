"""Spoilt messages: what reads them, a daemon that takes them, and a fuzzer that sees defects."""

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.store import open_store
from loaderd.api.peers import PeerAddresses
from loaderd.api.protocol import Attach, Detach, Start, StatusRequest, decode_client, encode
from loaderd.api.tcp import parse_tcp
from tests.daemons import daemon
from tests.graphs import make_csc
from tests.loaderd.harness import Shell
from tests.loaderd.parts import make_parts, partition_owners, write_whole
from tests.loaderd.threaded import serving
from tests.remotes import free_address
from tests.stores import write_store
from tools.fuzz import frames as fuzz_frames
from tools.fuzz.frames import (
    TOKEN,
    VICTIM,
    Attacker,
    Defect,
    base_messages,
    bind,
    join,
    split,
    spoil,
    verdict,
)

torch = pytest.importorskip("torch")
from clients.torch import NeighborDataset  # noqa: E402
from tools.faults.trainers import digest  # noqa: E402

NODES = 2000
VERDICTS = {"BadMessage", "status-reply", "", "unexpected", "?"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "store"
    degrees = np.random.default_rng(4).integers(0, 12, NODES)
    write_store(path, make_csc(degrees, 5), np.arange(NODES), offsets=(0, 700, 1500, NODES))
    return path


@pytest.fixture(scope="module")
def opened(store):
    return open_store(store)


@pytest.fixture(scope="module")
def manifest(opened):
    return opened.manifest


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=20),
    st.binary(max_size=20), st.sampled_from([TOKEN, VICTIM, "train", "macrobatch", "rows"]),
)  # fmt: skip
values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=5), scalars)
kinds = st.sampled_from(
    [Attach(token=1, request=2), Start(session=1, run=1, epoch=0, step=0), Detach(session=1),
     StatusRequest()]
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    kinds, st.dictionaries(st.sampled_from(Attach.__struct_fields__), values, max_size=3), values
)
def test_any_values_in_any_fields_are_a_message_or_a_bad_one(manifest, message, fields, version):
    """Nothing but BadMessage and Refused comes of them: `verdict` lets all others through."""
    body = msgspec.to_builtins(message) | fields
    for number in (1, version):
        assert verdict([msgspec.msgpack.encode((number, body)), b"x" * 8], manifest) in VERDICTS


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_spoilt_messages_are_a_message_or_a_bad_one(manifest, seed, times):
    random = Random(seed)
    data = join(random.choice(base_messages()))
    for _ in range(times):
        data = spoil(data, random)
        assert verdict(bind(split(data), (1, 2, 3)), manifest) in VERDICTS


def test_base_messages_are_all_read_and_bound(manifest):
    for frames in base_messages():
        assert split(join(frames)) == frames
        message = decode_client(bind(frames, (17, 18, 19))[0])
        numbers = {getattr(message, name, 17) for name in ("token", "session")}
        assert numbers <= {17, 18, 19}
        assert verdict(frames, manifest) != "BadMessage"


def test_spoiling_reaches_every_kind_and_every_verdict(manifest):
    random = Random(2)
    found, seen = [join(f) for f in base_messages()], []
    for _ in range(1500):
        found.append(spoil(random.choice(found), random))
        seen.append(verdict(split(found[-1]), manifest))
    assert set(seen) == VERDICTS
    assert 0.1 < seen.count("BadMessage") / len(seen) < 0.7


def test_a_daemon_takes_anything_and_a_trainer_beside_it_sees_nothing(store, opened, monkeypatch):
    monkeypatch.setattr(fuzz_frames, "LIFE", 200)
    random = Random(3)
    inputs = [join(f) for f in base_messages()]
    with daemon(store, "32M", 2) as endpoint:
        data = NeighborDataset(endpoint, num_neighbors=[3, 2], batch_size=64, seed=3, window=4)
        expected = [digest(batch) for batch in data]
        data.set_epoch(0)
        attacker = Attacker(endpoint, opened, data._connect().session.attached.session, random)
        for number, batch in enumerate(data):
            assert digest(batch) == expected[number]
            for _ in range(20):
                inputs.append(spoil(random.choice(inputs), random))
                attacker.send(inputs[-1])
        attacker.check()
        assert attacker.sent == 20 * len(expected) > 500
        assert attacker.noise > 0
        assert {"BadMessage", "Refused", "SessionLost", "status-reply", "attached"} <= set(
            attacker.replies
        )
        attacker.close()
        data.close()


def test_a_part_takes_anything_from_its_peers(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_frames, "EVERY", 10)
    monkeypatch.setattr(fuzz_frames, "LIFE", 30)  # ids that are wrong end what a peer is given
    path = write_whole(tmp_path / "store")
    parts = make_parts(path, tmp_path / "m", partition_owners(open_store(path), 2), 2)
    part, address, random = open_store(parts[0]), free_address(), Random(4)
    peers = PeerAddresses({1: (parse_tcp(free_address()),)}, 0.5)
    asked = [join(f) for f in base_messages() if b"rows-wanted" in f[0]]
    assert len(asked) == 1
    with serving(parts[0], tmp_path, 4 << 20, peers=peers, listen=address) as (_, service):
        attacker = Attacker(address, part, 0, random)
        for number in range(300):
            attacker.send(spoil(asked[0], random) if number % 10 else asked[0])
        attacker.check()
        assert {"rows-given", "BadMessage", "Refused", "status-reply"} <= set(attacker.replies)
        assert attacker.noise > 0
        attacker.close()
        assert service.status()[2]["peer_rows_asked"] == 0


def test_an_answer_that_is_missing_is_seen(tmp_path, opened, monkeypatch):
    with Shell(tmp_path) as shell:
        attacker = Attacker(str(shell.endpoint), opened, 1, Random(1))
        attacker.check()
        monkeypatch.setattr(fuzz_frames, "verdict", lambda frames, manifest: "BadMessage")
        attacker.send(encode(Detach(session=1)))  # is never answered
        with pytest.raises(Defect, match="1 answers 'BadMessage' were due, 0 came"):
            attacker.check()
        attacker.close()


def test_an_exception_that_nobody_foresaw_is_seen(tmp_path, opened):
    with Shell(tmp_path) as shell:
        attacker = Attacker(str(shell.endpoint), opened, 1, Random(1))
        attacker.check()
        shell.engine.failure = RuntimeError("boom")
        attacker.send(encode(Start(session=1, run=1, epoch=0, step=0)))
        with pytest.raises(Defect, match="RuntimeError: boom"):
            attacker.check()
        attacker.close()
