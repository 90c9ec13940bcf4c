"""Files of CURVE keys: the clients a daemon lets in over tcp, and the daemons a client knows."""

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from loaderd.api.errors import Refused
from loaderd.api.tcp import TcpAddress

FOLDER_VARIABLE = "LOADERD_KEYS"
DEFAULT_FOLDER = "~/.config/loaderd"
SECRET, PUBLIC = "secret.key", "public.key"
AUTHORIZED, KNOWN = "authorized_keys", "known_daemons"
MAX_FILE_BYTES = 1 << 20
MAX_NAME = 64  # characters of the name after a key
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85


class KeyPair(NamedTuple):
    """A pair of CURVE keys in Z85, 40 characters each."""

    public: str
    secret: str


def keys_folder(given: str | Path | None = None) -> Path:
    """The folder of keys: `given`, else $LOADERD_KEYS, else ~/.config/loaderd."""
    return Path(given or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def write_pair(folder: Path, pair: KeyPair, name: str) -> None:
    """New key files, for this user's eyes only.  Raises Refused: there is a key already."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    texts = {
        SECRET: f"# secret key of loaderd: it stays on this machine\n{pair.secret}\n",
        PUBLIC: f"{pair.public} {name}\n",
    }
    for file in texts:
        if (folder / file).exists():
            raise Refused(f"{folder / file}: is there already; remove it first, or choose another")
    for file, text in texts.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(folder / file, flags, 0o600), "w") as stream:
            stream.write(text)


def read_pair(folder: Path) -> KeyPair:
    """This side's keys.  Raises Refused: none, unreadable, or others may read the secret one."""
    path = folder / SECRET
    lines = _read(path, "make one with: loaderd keygen", secret=True)
    if len(lines) != 1:
        raise Refused(f"{path}: has {len(lines)} keys, expected one; make it with: loaderd keygen")
    public = _read(folder / PUBLIC, "make one with: loaderd keygen")
    if len(public) != 1:
        raise Refused(f"{folder / PUBLIC}: has {len(public)} keys, expected one")
    return KeyPair(public[0][0], lines[0][0])


def read_authorized(folder: Path) -> dict[str, str]:
    """Public keys of clients that are let in, with the names after them.  Raises Refused."""
    hint = f"expected a line for each client: the text of its {PUBLIC}"
    lines = _read(folder / AUTHORIZED, hint)
    return {key: rest[:MAX_NAME] or key[:8] for key, rest in lines}


def daemon_key(folder: Path, address: TcpAddress) -> str:
    """The public key of the daemon at an address; "": none is known.  Raises Refused."""
    path = folder / KNOWN
    if not path.exists():
        return ""
    place = f"{address.host}:{address.port}"
    known = {
        rest.split(" ")[0] or "*": key
        for key, rest in reversed(_read(path, "expected lines of keys"))
    }
    return known.get(place) or known.get(address.host) or known.get("*", "")


def client_keys(address: TcpAddress) -> tuple[str, KeyPair] | None:
    """The public key of the daemon at an address, and this side's own keys.

    None: the address is loopback, and no key is known for it.

    Raises Refused: none is known for another address, or this side has none.
    """
    folder = keys_folder(address.keys)
    daemon = daemon_key(folder, address)
    if daemon:
        return daemon, read_pair(folder)
    if address.is_loopback():
        return None
    raise Refused(
        f"{folder / KNOWN}: no key of the daemon at {address.place}, and without keys only "
        f"loopback is spoken to; add a line with the first word of the daemon's {PUBLIC} and "
        f"{address.host}:{address.port}"
    )


def _read(path: Path, hint: str, secret: bool = False) -> list[tuple[str, str]]:
    """(key, what stands after it) of each line that is neither empty nor a comment."""
    lines, mode = read_lines(path, str(path), hint)
    if secret and stat.S_IMODE(mode) & 0o077:
        raise Refused(
            f"{path}: has mode {stat.S_IMODE(mode):04o}, expected 0600: others may read it; "
            "make new keys, or: chmod 600"
        )
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or (words[0].startswith("#") and not _KEY.fullmatch(words[0])):
            continue
        if not _KEY.fullmatch(words[0]):
            raise Refused(f"{path}:{number}: {words[0][:8]!r}... is no key, expected 40 characters")
        rest = " ".join(words[1:])
        found.append((words[0], "".join(c for c in rest if c.isprintable())))
    return found


def read_lines(path: Path, name: str, hint: str) -> tuple[list[str], int]:
    """Lines of a small file, and its mode.  Raises Refused: it cannot be read, or is large."""
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Refused(f"{name}: {error.strerror or error}; {hint}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise Refused(f"{name}: is larger than {MAX_FILE_BYTES} bytes; {hint}")
    return raw.decode("utf-8", "replace").splitlines(), mode


class Authorized:
    """The clients that are let in: `authorized_keys`, read again whenever it changes.

    A file that cannot be read any more lets nobody in.
    """

    def __init__(self, folder: Path) -> None:
        """Raises Refused: it cannot be read."""
        self._folder, self._path = folder, folder / AUTHORIZED
        self._stamp = self._read_stamp()
        self._names = read_authorized(folder)
        self.problem = ""  # why nobody is let in

    def name_of(self, key: str) -> str | None:
        """The name of a client's public key; None: it is not let in."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._names, self.problem = read_authorized(self._folder), ""
            except Refused as error:
                self._names, self.problem = {}, str(error)
        return self._names.get(key)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
