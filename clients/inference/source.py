"""Find the store to read: by its path, or as that of a daemon on this machine."""

from pathlib import Path

from blockstore.store import Store, open_store
from loaderd.api.errors import Refused
from loaderd.server.transport import ask_status, parse_either


def find_store(endpoint: str, name: str = "") -> Store:
    """Open the store.

    endpoint   of a daemon, or the path of a store
    name       of one of a daemon's stores; "": its only one

    Raises Refused, NoDaemon, NotAStore, CorruptBlock.
    """
    if "://" not in endpoint:
        return open_store(Path(endpoint))
    address = parse_either(endpoint)
    reply = ask_status(address)
    found = [s for s in reply.stores if not s.retired]
    chosen = [s for s in found if not name or s.name == name]
    if len(chosen) != 1:
        names = ", ".join(s.name for s in found)
        raise Refused(
            f"{endpoint}: found store {name!r}, expected one of {names}; give its name (--store)"
        )
    served = chosen[0]
    path = Path(served.path)
    if not path.is_absolute():  # relative to the daemon's folder
        path = Path(f"/proc/{reply.pid}/cwd").resolve() / path
    if not path.is_dir():
        raise Refused(
            f"{endpoint}: its store {path} is not on this machine; inference reads the whole store "
            "in order: run it where the store lies, or give the path of a copy"
        )
    store = open_store(path)
    if store.manifest.fingerprint != served.fingerprint:
        raise Refused(
            f"{endpoint}: serves fingerprint {served.fingerprint}, found "
            f"{store.manifest.fingerprint} at {path}: have the daemon open it again: loaderd reload"
        )
    return store
