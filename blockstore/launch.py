"""Daemons that a process starts for itself: `loaderd serve` as a child that ends with its users.

A user of a daemon holds a shared lock on a file as long as it lives; the kernel lets go of it
however the process ends, and children that it forks hold it too.  The daemon waits for the
exclusive lock (`--while-used FILE`) and ends when it has it.  So nobody counts users.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockstore.errors import NotServed
from blockstore.root import read_root

_START_S = 600.0  # for a daemon to take its memory
_END_S = 30.0  # for a daemon to drain
_LOG_LINES, _LOG_BYTES = 5, 4096  # of a log, in an error
_MAX_BASE_BYTES = 60  # of a folder in which paths of sockets are short enough
_USERS, _START, _LOG, _SOCKET = "users", "start", "daemon.log", "daemon.sock"
_OWN = "own-"  # of the name of a folder, before what makes it unlike others
_log = logging.getLogger(__name__)


class Served(str):
    """The endpoint of a daemon that this process started."""

    __slots__ = ("log",)
    log: Path  # of the daemon


@contextmanager
def serve(store: str | Path, mem: str = "2G", **options: object) -> Iterator[Served]:
    """Serve a store inside a `with`, by a daemon of its own that ends with it; gives the endpoint.

        with blockstore.serve("/data/store", mem="4G") as endpoint:
            loader = NeighborLoader(endpoint, [15, 10], "train")

    mem       memory of the daemon, such as 512M or 32G
    options   further options of `loaderd serve`: `workers=4` is `--workers 4`

    The daemon also ends with this process, even if that is killed.  Raises NotAStore; NotServed: it
    did not start; the message has the last lines of its log.
    """
    read_root(Path(store))
    words = ["--mem", mem]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    folder, users = _make_folder()
    process = None
    try:
        process = _start(Path(store), folder, words)
        endpoint = Served(_endpoint(folder))
        endpoint.log = folder / _LOG
        _log.info("%s: served at %s, log at %s", store, endpoint, endpoint.log)
        yield endpoint
    finally:
        os.close(users)
        if process is not None:
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _make_folder() -> tuple[Path, int]:
    """A folder for the daemon of one process, and its lock.  Raises NotServed.

    Folders that killed processes have left are deleted.
    """
    base = runtime_folder()
    start = _lock(base / _START, fcntl.LOCK_EX)  # no other process meets the new one unlocked
    try:
        for left in base.glob(f"{_OWN}*"):
            # it is used, or its daemon is ending; or its process has deleted it meanwhile
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                os.close(_lock(left / _USERS, fcntl.LOCK_EX | fcntl.LOCK_NB))
                if not _listens(left):
                    shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_OWN, dir=base))
        return folder, _lock(folder / _USERS, fcntl.LOCK_SH)
    finally:
        os.close(start)


class SharedDaemon:
    """The daemon of a store that all processes of this user share; made by `shared_daemon`.

    This process uses it until it ends; one in which a copy is unpickled does so, too.
    """

    def __init__(self, store: Path) -> None:
        """Start a daemon at this store, or join one that runs.  Raises NotAStore, NotServed."""
        self.store = store
        manifest = read_root(store)
        name = f"{os.path.realpath(store)} {manifest.fingerprint}"
        key = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
        self._folder = runtime_folder() / key
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self.endpoint = _endpoint(self._folder)
        # waits while a daemon whose last user has gone is ending
        self._users = _lock(self._folder / _USERS, fcntl.LOCK_SH)
        try:
            self.ensure()
        except BaseException:
            os.close(self._users)
            raise

    def ensure(self) -> None:
        """Start the daemon if nobody listens.  Raises NotServed."""
        start = _lock(self._folder / _START, fcntl.LOCK_EX)  # of several processes one starts it
        try:
            if _listens(self._folder):
                return
            process = _start(self.store, self._folder, [])
            _log.warning(
                "%s: started a daemon at %s; it ends with its last user, log at %s",
                self.store, self.endpoint, self._folder / _LOG,
            )  # fmt: skip
            # somebody has to ask for its exit code
            threading.Thread(target=process.wait, name="served", daemon=True).start()
        finally:
            os.close(start)

    def __reduce__(self) -> tuple[object, ...]:
        return shared_daemon, (self.store,)


_shared: dict[tuple[str, str], SharedDaemon] = {}  # by path and fingerprint, to the end


def shared_daemon(store: str | Path) -> SharedDaemon:
    """The daemon of a store, started if no process of this user has done so.

    Its options are those of the environment: LOADERD_MEM, ...  Raises NotAStore, NotServed.
    """
    path = Path(store).absolute()
    key = os.path.realpath(path), read_root(path).fingerprint
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = SharedDaemon(path)
    return found


def runtime_folder() -> Path:
    """A folder of this user alone, that a reboot empties.  Raises NotServed."""
    user = os.geteuid()
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        if base and len(base) <= _MAX_BASE_BYTES and os.access(base, os.W_OK):
            folder = Path(base) / "loaderd"
            break
    else:
        folder = Path(tempfile.gettempdir()) / f"loaderd-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    held = folder.lstat()
    if held.st_uid != user or held.st_mode & 0o077 or folder.is_symlink():
        raise NotServed(
            f"{folder}: others can reach it, expected a folder of mode 700 of one's own"
        )
    return folder


def _endpoint(folder: Path) -> str:
    return f"ipc://{folder / _SOCKET}"


def _lock(path: Path, kind: int) -> int:
    """A descriptor that holds a lock on a file; waits for it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _listens(folder: Path) -> bool:
    """Whether a daemon is there: it holds the lock of its endpoint as long as it lives."""
    try:
        fd = os.open(folder / f"{_SOCKET}.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _start(store: Path, folder: Path, options: list[str]) -> "subprocess.Popen[bytes]":
    """Start a daemon, and wait until it serves.  Raises NotServed."""
    words = ["serve", str(store), "--endpoint", _endpoint(folder), *options]
    words += ["--while-used", str(folder / _USERS)]
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 a module of ours, by this interpreter
            [sys.executable, "-m", "loaderd", *words], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    timer = threading.Timer(_START_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        timer.cancel()
        process.stdout.close()
    if not line.startswith(b"serving"):
        code = process.wait()
        raise NotServed(
            f"{store}: `loaderd serve` ended with code {code}: {_last_lines(folder / _LOG)}"
        )
    return process


def _last_lines(log: Path) -> str:
    text = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LOG_LINES:]) or "it said nothing"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have the daemon drain; kill it if it takes too long."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
