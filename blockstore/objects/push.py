"""Push a store of this machine to object storage, and pull one from there to a folder."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from blockstore.errors import StoreError, StoreExists
from blockstore.format import PAGE_BYTES, ROOT, blocked_arrays, shard_path
from blockstore.io.files import check_free, flush_tree, take_name
from blockstore.objects.bucket import PART_BYTES, Bucket, ObjectError, ObjectGone
from blockstore.objects.remote import ObjectStores, in_parallel, shard_bytes
from blockstore.root import digest
from blockstore.store import BlockedFile, Store, open_store, scan_blocks, shard_index

Advance = Callable[[int], None]  # bytes that are there
_SHARDS = 3  # shards that are written at once, each in parts
_PULL_BYTES = 2 << 30  # of memory: as for a daemon of this --mem
_LANES, _LANE_BYTES = 4, 16 << 20  # of an array that is pulled: each asks for so much at once


class Passed(Protocol):
    """Shows how far a pull is."""

    def advance(self, count: int) -> None:
        """So many bytes more are there."""


class _Object(NamedTuple):
    """A file of a store."""

    name: str
    size: int
    digest: str
    body: Callable[[], Iterator[bytes]]


def store_bytes(store: Store) -> int:
    """Bytes of all objects that a push writes."""
    return sum(item.size for item in _objects(store)) + (store.path / ROOT).stat().st_size


def push(store: Store, url: str, wait_s: float, advance: Advance) -> str:
    """Write a store to object storage, its root last; what an earlier push wrote stays.

    Every page is verified as it is read; a request with other bytes than were signed is refused by
    the provider.  Returns the fingerprint.  Raises StoreExists: another store is there; StoreError;
    ObjectError.
    """
    store.check_whole("blockstore push")
    bucket, raw = Bucket(url, wait_s), (store.path / ROOT).read_bytes()
    root = _Object(ROOT, len(raw), digest(raw), partial(_file, store.path / ROOT))
    try:
        found, _ = bucket.read_whole(ROOT)
    except ObjectGone as error:
        if "no such bucket" in str(error):
            raise
    else:
        if found != raw:
            raise StoreExists(
                f"{bucket.url}: another store is there, expected none, or the one with fingerprint "
                f"{store.manifest.fingerprint}; choose another URL, or remove it"
            )

    there, items = bucket.sizes(), list(_objects(store))

    def send(item: _Object) -> None:
        if there.get(item.name) != item.size or bucket.digest(item.name) != item.digest:
            whole = item.size < PART_BYTES
            bucket.write(
                item.name, (lambda: b"".join(item.body())) if whole else item.body, item.digest
            )
        advance(item.size)

    in_parallel(send, [item for item in items if item.size < PART_BYTES])
    with ThreadPoolExecutor(_SHARDS) as pool:
        list(pool.map(send, [item for item in items if item.size >= PART_BYTES]))
    written = bucket.sizes()
    for item in items:
        if written.get(item.name) != item.size:
            raise ObjectError(
                f"{bucket.url}/{item.name}: {written.get(item.name, 0)} bytes after {item.size} "
                "were written, expected as many; push again"
            )
    send(root)
    return store.manifest.fingerprint


def _objects(store: Store) -> Iterator[_Object]:
    """All files of a store but its root."""
    manifest = store.manifest
    for name, bound in manifest.files.items():
        path = store.path / name
        yield _Object(name, path.stat().st_size, bound, partial(_file, path))
    for array in blocked_arrays(manifest):
        file, (stored, geometry, ndim) = store.blocks(*array), array
        for i in range(geometry.num_shards):
            each, name = geometry.pages_per_shard, shard_path(stored, i, ndim)
            crcs = digest(file.crcs[i * each : (i + 1) * each].tobytes())
            yield _Object(name, shard_bytes(geometry, i), crcs, partial(_shard, file, i))


def _file(path: Path) -> Iterator[bytes]:
    yield path.read_bytes()


def _shard(file: BlockedFile, shard: int) -> Iterator[bytes]:
    """The bytes of a shard; each page is verified."""
    geometry = file.geometry
    low = shard * geometry.blocks_per_shard
    high = low + geometry.blocks_in(shard)
    for _, blocks in scan_blocks(file, PART_BYTES, low, high):
        yield blocks.tobytes()
    yield shard_index(geometry, high - low)


def pull(
    url: str, target: Path, wait_s: float, stage: Callable[[int], AbstractContextManager[Passed]]
) -> Store:
    """Bring a store to a folder, which appears by one rename; run again, it resumes.

    What a pull that was stopped has brought stays beside the target, as `.<name>.pull`: pages that
    are there are verified, others come.

    stage   begins a stage of so many bytes; told of those that are there

    Raises StoreExists, StoreError, ObjectError, OSError.
    """
    check_free(target)
    work = target.absolute().with_name(f".{target.name}.pull")
    with ObjectStores(work, 1 << 62, _PULL_BYTES, wait_s) as stores:
        try:
            store = stores.open(url)
        except StoreError:
            if not any(work.glob(f"*/*/{ROOT}")):  # there is nothing to go on with
                shutil.rmtree(work, ignore_errors=True)
            raise
        files = [store.blocks(*array) for array in blocked_arrays(store.manifest)]
        total = sum(file.geometry.num_pages for file in files) * PAGE_BYTES
        with stage(total) as passed, ThreadPoolExecutor(_LANES) as pool:
            lanes = [(file, i, passed.advance) for file in files for i in range(_LANES)]
            list(pool.map(_fill, *zip(*lanes, strict=True)))
        flush_tree(store.path)
        take_name(store.path, target)
        shutil.rmtree(work, ignore_errors=True)
    return open_store(target)


def _fill(file: BlockedFile, lane: int, advance: Advance) -> None:
    """Bring a lane's part of an array's pages into its files."""
    for _, blocks in scan_blocks(file, _LANE_BYTES, lane=(lane, _LANES)):
        advance(blocks.nbytes)
