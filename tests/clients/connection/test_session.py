"""Sessions against a made-up daemon: the door, refusals, runs, hang-ups, forks."""

import os
import socket

import numba
import numpy as np
import pytest

from clients.connection import session
from clients.connection.session import Session, error_of
from loaderd.api.errors import BatchFailed, DaemonError, NoDaemon, Refused, SessionLost
from loaderd.api.protocol import Attach, BatchReady, Detach, ErrorReply, Release, Start
from tests.clients.fake import fake_daemon


def attach(**fields):
    return Attach(token=0, request=0, num_neighbors=(4, 3), **fields)


@pytest.fixture
def pair(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        session = Session(daemon.endpoint, attach())
        yield daemon, session
        session.close()


def test_kernels_of_a_batch_are_loaded_while_the_daemon_works(tmp_path, monkeypatch):
    """As they are called later: numba loads, or compiles, for other types once more."""
    torch = pytest.importorskip("torch")
    from clients import batch  # imports torch
    from clients.torch import NeighborDataset

    asked: dict[str, set[object]] = {}

    def noting(module, name):
        kernel = getattr(module, name)

        def call(*arguments):
            types = tuple(map(numba.typeof, arguments))
            asked.setdefault(f"{module.__name__} {name}", set()).add(types)
            return kernel(*arguments)

        monkeypatch.setattr(module, name, call)

    for name in ("gather_rows", "expand_counts"):
        noting(session, name)
        noting(batch, name)
    session.load_kernels.cache_clear()
    with fake_daemon(tmp_path) as daemon:
        data = NeighborDataset(daemon.endpoint, num_neighbors=[4, 3], batch_size=8)
        assert not asked
        data.attached()
        loaded = {name.split()[1]: types for name, types in asked.items()}
        assert loaded.keys() == {"gather_rows", "expand_counts"}
        assert isinstance(next(iter(data)).x, torch.Tensor)
        data.close()
    for name, types in loaded.items():
        assert asked[f"clients.batch {name}"] == types


def test_nothing_listens(tmp_path):
    with pytest.raises(NoDaemon, match=r"nothing: no daemon listens there \(No such file"):
        Session(f"ipc://{tmp_path}/nothing", attach())


def test_a_socket_file_that_nobody_serves(tmp_path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{tmp_path}/dead.door")
    listener.close()
    with pytest.raises(NoDaemon, match="refused"):
        Session(f"ipc://{tmp_path}/dead", attach())


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5", "/run/x", "ipc://"])
def test_other_endpoints_are_refused(endpoint):
    with pytest.raises(Refused, match="expected ipc:///path"):
        Session(endpoint, attach())


def test_a_refusal_is_raised_and_hangs_up(tmp_path):
    refusing = fake_daemon(tmp_path, refusal="no split 'x'; there are: train")
    with refusing as daemon, pytest.raises(Refused, match="no split 'x'"):
        Session(daemon.endpoint, attach())
    assert daemon.hang_ups == 1


def test_the_arena_is_mapped_read_only(pair):
    data = pair[1].attachment.data
    assert data.size == pair[0].num_slots * pair[0].slot_bytes
    assert not data.flags.writeable


def test_sessions_of_a_process_share_one_attachment(pair):
    daemon, first = pair
    second = Session(daemon.endpoint, attach(), np.array([3, 1]))
    assert second.attachment is first.attachment
    assert second.attached.session != first.attached.session
    np.testing.assert_array_equal(daemon.ids, [[3, 1]])
    second.close()
    assert not first.attachment.lost()


def test_the_last_session_hangs_up(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        for _ in range(2):
            Session(daemon.endpoint, attach()).close()
    assert daemon.hang_ups == 2
    assert len(daemon.received(Detach)) == 2


def test_a_closed_session_can_be_closed_again(pair):
    pair[1].close()
    pair[1].close()


def test_batches_come_in_the_order_asked_for(pair):
    daemon, session = pair
    session.start(epoch=3, step=1, stride=2)
    for step in (1, 3):
        batch = session.receive(BatchReady, step)
        assert (batch.epoch, batch.step) == (3, step)
        session.release(step, 0)
    session.close()
    daemon.stop()
    assert [m.step for m in daemon.received(Release)] == [1, 3]


def test_batches_are_released_together_or_before_a_wait(tmp_path, monkeypatch):
    with fake_daemon(tmp_path, window=16, num_steps=30) as daemon:
        session = Session(daemon.endpoint, attach())
        sent, send = list[int](), session._send

        def note(message):
            sent.extend([message.step] if isinstance(message, Release) else [])
            send(message)

        monkeypatch.setattr(session, "_send", note)
        session.start(epoch=0, step=0)
        session.receive(BatchReady, 15)  # after all before it
        for step in range(3):
            session.receive(BatchReady, step)
            session.release_soon(step)
            assert sent == ([] if step == 0 else [0, 1])  # an eighth of the window
        session.receive(BatchReady, 18)  # comes when a third one is given back
        assert sent == [0, 1, 2]
        session.release_soon(3)
        session.start(epoch=1, step=0)
        assert session.receive(BatchReady, 0).epoch == 1
        session.close()
        daemon.stop()
    assert [m.step for m in daemon.received(Release)] == [0, 1, 2]


def test_batches_of_an_older_run_are_dropped(tmp_path):
    with fake_daemon(tmp_path, stale=True) as daemon:
        session = Session(daemon.endpoint, attach())
        for run in (1, 2, 3):
            session.start(epoch=run, step=0)
            assert session.receive(BatchReady, 0).epoch == run
        assert [m.run for m in daemon.received(Start)] == [1, 2, 3]
        session.close()


def test_a_failed_batch_is_raised_and_the_session_goes_on(tmp_path):
    with fake_daemon(tmp_path, fail_at=2) as daemon:
        session = Session(daemon.endpoint, attach())
        session.start(0, 2)
        with pytest.raises(BatchFailed, match=r"8192: crc32c is 1, expected 2"):
            session.receive(BatchReady, 2)
        session.start(0, 3)
        assert session.receive(BatchReady, 3).step == 3
        session.close()


def test_a_daemon_that_dies_is_noticed(tmp_path):
    with fake_daemon(tmp_path, die_at=2) as daemon:
        session = Session(daemon.endpoint, attach())
        session.start(0, 0)
        for step in (0, 1):  # were pushed before it died
            session.receive(BatchReady, step)
        session.release(0, 0)
        with pytest.raises(SessionLost, match="fake: the daemon went away"):
            session.receive(BatchReady, 2)
        assert session.lost
        session.close()


def test_a_new_daemon_at_the_same_path_gets_a_new_attachment(tmp_path):
    with fake_daemon(tmp_path, die_at=0) as daemon:
        old = Session(daemon.endpoint, attach())
        old.start(0, 0)
        with pytest.raises(SessionLost):
            old.receive(BatchReady, 0)
    for name in ("fake", "fake.door"):
        (tmp_path / name).unlink(missing_ok=True)
    with fake_daemon(tmp_path) as daemon:
        new = Session(daemon.endpoint, attach())
        assert new.attachment is not old.attachment
        old.close()
        new.start(0, 0)
        assert new.receive(BatchReady, 0).step == 0
        new.close()


def test_a_forked_child_lets_go_without_a_word(pair):
    daemon, session = pair
    child = os.fork()
    if child == 0:
        door_closed = session.attachment.door.fileno() == -1
        session.close()
        os._exit(0 if door_closed and session.attachment.data.size == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    session.start(0, 0)
    assert session.receive(BatchReady, 0).step == 0
    session.close()
    daemon.stop()
    assert daemon.received(Detach) == [Detach(session=session.attached.session)]


def test_errors_are_of_the_class_that_the_daemon_names():
    assert type(error_of(ErrorReply(error="Refused", message="m"))) is Refused
    for unknown in ("Later", "encode", "Any"):
        error = error_of(ErrorReply(error=unknown, message="m"))
        assert type(error) is DaemonError
        assert str(error) == f"{unknown}: m"
