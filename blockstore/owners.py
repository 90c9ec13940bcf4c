"""Owner maps of a store: which of several trainers owns each node.  FORMAT.md, "Owner maps".

A map lies in a folder of the store, and appears by one rename.  Neither manifest nor fingerprint
know it: it decides which trainer gets which part of a batch, not what is in a batch.
"""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock, StoreError
from blockstore.format import OWNERS_FOLDER, PAGE_BYTES
from blockstore.io.buffers import byte_view
from blockstore.io.files import appearing, check_free, flush, naming
from blockstore.kernels.crc import find_bad_page, page_crcs
from blockstore.root import read_digested, write_digested
from blockstore.store import Store, corrupt_page
from blockstore.validate import inside

MAP_FILES = OWNER, MAP = "owner", "map.json"
MAX_OWNERS = 1 << 16
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class OwnerFacts(msgspec.Struct, frozen=True):
    """The metadata of a map."""

    format: int
    fingerprint: str  # of its store
    owners: int
    num_nodes: int
    digest: str  # of the fingerprint and all that `owner` holds
    facts: dict[str, Any]  # method, parameters, measurements


@dataclass(frozen=True)
class OwnerMap:
    """A map in memory."""

    name: str
    owners: int  # how many there are
    owner: NDArray[Any]  # uint8, or uint16 for more than 256 owners (nodes,), by store id
    digest: str
    facts: dict[str, Any]


def owner_dtype(owners: int) -> type[np.uint8] | type[np.uint16]:
    return np.uint8 if owners <= 1 << 8 else np.uint16


def list_owners(store: Store) -> list[str]:
    """Names of the maps that are there, sorted, without those that are being written."""
    try:
        with os.scandir(store.path / OWNERS_FOLDER) as found:
            return sorted(e.name for e in found if e.is_dir() and _NAME.fullmatch(e.name))
    except FileNotFoundError:
        return []


def read_facts(store: Store, name: str) -> OwnerFacts:
    """Read the metadata of a map, also if it is of another store.

    Raises StoreError: there is no such map; CorruptBlock.
    """
    folder = _folder(store, name)
    path = inside(os.path.realpath(store.path), f"{OWNERS_FOLDER}/{name}/{MAP}")
    mends = f"remove {folder}, and make the map again"
    return read_digested(path, "map", OwnerFacts, _FORMAT, mends)


def check_owners(store: Store, name: str) -> tuple[OwnerFacts, NDArray[Any]]:
    """Read and verify a map, also if it is of another store: its facts, and `OwnerMap.owner`.

    Raises StoreError: there is no such map; CorruptBlock.
    """
    facts = read_facts(store, name)
    path = inside(os.path.realpath(store.path), f"{OWNERS_FOLDER}/{name}/{OWNER}")
    mends = f"remove {path.parent}, and make the map again"
    size = facts.num_nodes * np.dtype(owner_dtype(facts.owners)).itemsize
    pages = -(-size // PAGE_BYTES)
    try:
        found = path.stat().st_size
        if found != pages * (PAGE_BYTES + 4):
            raise CorruptBlock(
                f"{path}: {found} bytes, expected {pages * (PAGE_BYTES + 4)}; {mends}"
            )
        raw = np.fromfile(path, np.uint8)
    except OSError as error:
        raise CorruptBlock(f"{path}: {error.strerror}, expected owners; {mends}") from error
    data, crcs = raw[: pages * PAGE_BYTES], raw[pages * PAGE_BYTES :].view(np.uint32)
    bad = int(find_bad_page(data, pages, crcs))
    if bad >= 0:
        at = bad * PAGE_BYTES
        raise corrupt_page(str(path), at, data[at:], int(crcs[bad]))
    owner = data[:size].view(owner_dtype(facts.owners))
    if _digest(facts.fingerprint, owner) != facts.digest or owner.max(initial=0) >= facts.owners:
        raise CorruptBlock(
            f"{path}: owners to {owner.max(initial=0)}, digest {_digest(facts.fingerprint, owner)}"
            f", expected {facts.owners} owners and {facts.digest!r}; {mends}"
        )
    return facts, owner


def read_owners(store: Store, name: str) -> OwnerMap:
    """Read a map of this store; every page is verified.

    Raises StoreError: there is no such map, or it is of another store; CorruptBlock.
    """
    facts, owner = check_owners(store, name)
    fingerprint, num_nodes = store.manifest.fingerprint, store.manifest.num_nodes
    if facts.fingerprint != fingerprint or facts.num_nodes != num_nodes:
        raise StoreError(
            f"{store.path / OWNERS_FOLDER / name}: of fingerprint {facts.fingerprint} and "
            f"{facts.num_nodes:,} nodes, expected {fingerprint} and {num_nodes:,}: it is of "
            "another store, or the store was changed; remove the map, and make it again"
        )
    return OwnerMap(name, facts.owners, owner, facts.digest, facts.facts)


def write_owners(
    store: Store, name: str, owner: NDArray[Any], owners: int, facts: dict[str, Any]
) -> OwnerMap:
    """Put a map into a store: whole, or not at all.

    owner    any integers (nodes,)   below `owners`, by store id
    facts    plain values            of map.json

    Raises StoreError: no name for a map; StoreExists: it is taken; OutOfSpace.
    """
    check_name(store, name)
    assert owner.size == store.manifest.num_nodes
    assert 0 < owners <= MAX_OWNERS
    assert (owner < owners).all()
    owner = np.ascontiguousarray(owner, owner_dtype(owners))
    pages = -(-owner.nbytes // PAGE_BYTES)
    data, crcs = np.zeros(pages * PAGE_BYTES, np.uint8), np.empty(pages, np.uint32)
    data[: owner.nbytes] = owner.view(np.uint8)
    page_crcs(data, pages, crcs)
    fingerprint = store.manifest.fingerprint
    made = OwnerFacts(
        _FORMAT, fingerprint, owners, owner.size, _digest(fingerprint, owner), facts
    )  # fmt: skip
    with appearing(store.path / OWNERS_FOLDER / name) as folder:
        with naming(folder, data.nbytes):
            with (folder / OWNER).open("wb") as file:
                file.write(data.data)
                file.write(crcs.data)
            write_digested(folder / MAP, "map", made)
        flush(store.path)  # so that the folder of the maps is on disk
    return OwnerMap(name, owners, owner, made.digest, facts)


def check_name(store: Store, name: str) -> None:
    """Raises StoreError: no name for a map; StoreExists: it is taken."""
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"owner map {name!r}: expected a name of letters, digits and _.- (no - or . first)"
        )
    check_free(store.path / OWNERS_FOLDER / name, "the map")


def remove_owners(store: Store, name: str) -> None:
    """Remove a map; processes that have read it keep it.  Raises StoreError: there is none."""
    folder = _folder(store, name)
    gone = folder.with_name(f".{name}.partial-{os.getpid()}")
    folder.rename(gone)  # nobody finds half of a map
    shutil.rmtree(gone)


def _folder(store: Store, name: str) -> Path:
    """The folder of a map that is there.  Raises StoreError."""
    names = list_owners(store)
    if name not in names:
        raise StoreError(
            f"{store.path}: no owner map {name!r}, expected one of: {', '.join(names) or 'none'}; "
            "make it with `blockstore owners`"
        )
    return store.path / OWNERS_FOLDER / name


def _digest(fingerprint: str, owner: NDArray[Any]) -> str:
    found = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    found.update(byte_view(owner))
    return found.hexdigest()
