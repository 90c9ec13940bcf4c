"""Who may attach on this machine, and how much each user gets."""

import grp
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attached, ErrorReply, decode_daemon
from loaderd.server.daemon import Access
from loaderd.server.owners import (
    Credentials,
    UserLimits,
    UserShare,
    admit,
    check_folder,
    group_id,
    peer_credentials,
    room_left,
    user_name,
)
from tests.loaderd.harness import Shell, client_of

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root to become it")


def as_nobody(action: Callable[[], int], groups: tuple[int, ...] = ()) -> int:
    """What an action gives, as an exit code, in a process of user nobody."""
    child = os.fork()
    if not child:
        code = 99
        try:
            os.setgroups(list(groups))
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def connects(path: Path) -> Callable[[], int]:
    """0: let in with a descriptor; 1: the kernel refuses; 2: the daemon says that it may not."""

    def connect() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(10)
            try:
                door.connect(str(path))
            except PermissionError:
                return 1
            frame, fds, _, _ = socket.recv_fds(door, 4096, 1)
            message = decode_daemon(frame)
            if isinstance(message, ErrorReply) and "may not attach" in message.message:
                return 2 if not fds else 98
            return 0 if fds else 97

    return connect


@pytest.fixture
def folder(tmp_path_factory):
    """One that anybody can enter."""
    path = tmp_path_factory.mktemp("open")
    for part in (path, *path.parents):
        if part == Path("/tmp") or part.stat().st_uid != os.geteuid():
            break
        part.chmod(0o755)
    return path


@as_root
def test_another_user_is_kept_out_by_the_files_modes(folder):
    with Shell(folder) as shell:
        assert as_nobody(connects(shell.endpoint.door)) == 1
        for path in (shell.endpoint.door, shell.endpoint.path, shell.endpoint.lock):
            assert path.stat().st_mode & 0o077 == 0


@as_root
def test_another_user_is_kept_out_by_its_credentials(folder):
    with Shell(folder) as shell:
        shell.endpoint.door.chmod(0o666)
        assert as_nobody(connects(shell.endpoint.door)) == 2


@as_root
def test_a_group_lets_its_members_in(folder):
    team = next(g.gr_gid for g in grp.getgrall() if g.gr_gid not in (0, NOBODY))
    with Shell(folder, Access(team)) as shell:
        door = shell.endpoint.door
        assert (door.stat().st_mode & 0o777, door.stat().st_gid) == (0o660, team)
        assert shell.endpoint.path.stat().st_mode & 0o777 == 0o660
        assert as_nobody(connects(door)) == 1
        assert as_nobody(connects(door), groups=(team,)) == 0
        door.chmod(0o666)
        assert as_nobody(connects(door)) == 2


def test_credentials_are_the_other_ends():
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        found = peer_credentials(one)
    assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
    assert {os.getegid(), *os.getgroups()} >= found.groups >= {os.getegid()}


def test_who_may_come_in():
    mine = Credentials(1, os.geteuid(), frozenset({5}))
    other = Credentials(1, os.geteuid() + 4321, frozenset({5, 6}))
    assert admit(mine, None) == user_name(os.geteuid())
    assert admit(mine._replace(uid=0), None) == "root"
    assert admit(other, 6) == str(other.uid)
    for gid in (None, 7):
        with pytest.raises(Refused, match=r"may not attach.*--group"):
            admit(other, gid)


def test_groups_and_folders_that_cannot_be(tmp_path):
    with pytest.raises(Refused, match="no-such-group: no such group"):
        group_id("no-such-group")
    tmp_path.chmod(0o777)
    with pytest.raises(Refused, match="anybody may replace files"):
        check_folder(tmp_path, None)
    tmp_path.chmod(0o1777)
    check_folder(tmp_path, None)
    tmp_path.chmod(0o700)
    check_folder(tmp_path, None)
    with pytest.raises(Refused, match="cannot enter it"):
        check_folder(tmp_path, os.getegid() + 4321)
    tmp_path.chmod(0o711)
    check_folder(tmp_path, os.getegid() + 4321)


def test_what_is_left_for_a_user():
    limits = UserLimits(sessions=3, window=10, share=0.5)
    assert room_left(limits, 1000, "ann", [UserShare(4, 100), UserShare(2, 50)]) == (4, 350)
    assert room_left(limits, 1000, "ann", [UserShare(4, 600)]).num_bytes == 0
    with pytest.raises(Refused, match=r"ann has 3 sessions.*--user-sessions"):
        room_left(limits, 1000, "ann", [UserShare(1, 0)] * 3)
    with pytest.raises(Refused, match=r"ann have 10 batches in flight.*--user-window"):
        room_left(limits, 1000, "ann", [UserShare(6, 0), UserShare(4, 0)])


def test_a_user_has_so_many_sessions_and_batches(tmp_path):
    limits = UserLimits(sessions=3, window=5)
    with Shell(tmp_path, Access(limits=limits)) as shell, client_of(shell) as client:
        first = client.attach()
        assert isinstance(first, Attached)
        assert shell.engine.seen()[1].window == 5  # of what it may have
        client.attach(window=4)
        assert shell.engine.seen()[1].window == 3  # the fake's sessions have 2 each
        client.attach()
        assert "--user-sessions" in client.attach().message
