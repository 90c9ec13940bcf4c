"""Owners of sessions: users of this machine by their credentials, and their limits."""

import grp
import os
import pwd
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loaderd.api.errors import Refused

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59  # Linux 4.13; Python does not name it
_GROUPS_BYTES = 1024  # of 256 groups: the most that Python asks the kernel for
LOOPBACK = "loopback"  # owner of sessions over tcp without keys


class Credentials(NamedTuple):
    """Credentials of a process at the moment when it connected."""

    pid: int
    uid: int
    groups: frozenset[int]


def peer_credentials(connection: socket.socket) -> Credentials:
    """Credentials of the other end of a Unix socket, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    try:
        more = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        groups = set(struct.unpack(f"{len(more) // 4}I", more))
    except OSError:  # an older kernel, or more of them
        groups = set(os.getgrouplist(user_name(uid), gid))
    return Credentials(pid, uid, frozenset({gid, *groups}))


def user_name(uid: int) -> str:
    """A user's name, or number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_id(name: str) -> int:
    """The number of a group.  Raises Refused: there is none, or its files cannot be made."""
    try:
        gid = int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise Refused(f"--group {name}: no such group; expected one of this machine") from None
    if os.geteuid() and gid not in {os.getegid(), *os.getgroups()}:
        raise Refused(f"--group {name}: this user is not in it, expected one of its own groups")
    return gid


def admit(peer: Credentials, gid: int | None) -> str:
    """The name of the user that connects: this user, root, or a member of a group.

    Raises Refused: somebody else.
    """
    if peer.uid in (0, os.geteuid()) or gid in peer.groups:
        return user_name(peer.uid)
    allowed = "the daemon's user" if gid is None else f"members of group {gid}"
    raise Refused(
        f"user {user_name(peer.uid)} may not attach, expected {allowed}; the daemon can be opened "
        "to a team by: loaderd serve --group NAME"
    )


def share_file(path: Path, gid: int | None) -> None:
    """Let a group use a socket that only its user could reach."""
    if gid is not None:
        os.chown(path, -1, gid)
        path.chmod(0o660)


def check_folder(folder: Path, gid: int | None) -> None:
    """Raises Refused: others could put their own sockets there, or the group cannot enter."""
    found = folder.stat()
    if found.st_mode & 0o002 and not found.st_mode & 0o1000:
        raise Refused(
            f"{folder}: anybody may replace files in it (mode {found.st_mode & 0o7777:04o}); "
            "expected a folder of one user: chmod o-w, or choose another one"
        )
    enters = found.st_mode & 0o001 or (found.st_gid == gid and found.st_mode & 0o010)
    if gid is not None and not enters:
        raise Refused(
            f"{folder}: group {gid} cannot enter it (mode {found.st_mode & 0o7777:04o}); "
            f"expected: chgrp {gid} {folder} and chmod g+x {folder}"
        )


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What one user may have at a time."""

    sessions: int = 256
    window: int = 1 << 20  # batches in flight, of all sessions
    share: float = 1.0  # of the arena, of all sessions


class UserShare(NamedTuple):
    """How much of these one session of a user has, or the user may still take."""

    window: int
    num_bytes: int


def room_left(
    limits: UserLimits, arena_bytes: int, owner: str, held: Iterable[UserShare]
) -> UserShare:
    """What is left for one more session.  Raises Refused, with the limit: nothing is left."""
    all_held = list(held)
    if len(all_held) >= limits.sessions:
        raise Refused(
            f"user {owner} has {len(all_held)} sessions open, the most that --user-sessions "
            "allows; close one first"
        )
    window = limits.window - sum(h.window for h in all_held)
    if window < 1:
        raise Refused(
            f"sessions of user {owner} have {limits.window} batches in flight, the most that "
            "--user-window allows; close one, or ask for a smaller window"
        )
    whole = int(limits.share * arena_bytes)
    return UserShare(window, max(0, whole - sum(h.num_bytes for h in all_held)))
