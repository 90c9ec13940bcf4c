"""Writes the part of a store that one server serves."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from blockstore.errors import StoreError
from blockstore.format import OWNERS_FOLDER, ROOT, BlockGeometry, blocked_arrays, shard_path
from blockstore.io.files import appearing, check_free, naming, write_exact
from blockstore.owners import MAP_FILES, read_owners
from blockstore.part import PART, StorePart, holes_of, part_of, without_hops
from blockstore.root import write_digested
from blockstore.store import BlockedFile, Store, scan_blocks, shard_index

Advance = Callable[[int], None]  # bytes that were written


def plan_part(store: Store, owners: str, server: int) -> StorePart:
    """Plan the part of a server.

    Raises StoreError: there is no such map or server, or the store is itself a part; CorruptBlock.
    """
    store.check_whole("blockstore part")
    found = read_owners(store, owners)
    if not 0 <= server < found.owners:
        raise StoreError(
            f"--server {server}: the owner map {owners!r} has {found.owners} owners, expected 0 to "
            f"{found.owners - 1}"
        )
    return part_of(store.manifest, found.owner, server, found.owners, (owners, found.digest))


def part_bytes(store: Store, part: StorePart) -> int:
    """Bytes of blocks that `make_part` copies."""
    manifest = without_hops(store.manifest)
    return sum(
        (high - low) * geometry.slot_bytes
        for path, geometry, _ in blocked_arrays(manifest)
        for low, high in _present(part, path, geometry)
    )


def make_part(store: Store, target: Path, part: StorePart, advance: Advance) -> None:
    """Write a part beside its target, then rename it: it appears as a whole, or not at all.

    Every block that is copied is verified.  Raises StoreExists, OutOfSpace, CorruptBlock.
    """
    check_free(target)
    manifest = without_hops(store.manifest)
    with appearing(target) as folder:
        names = [ROOT, *manifest.files]
        names += [f"{OWNERS_FOLDER}/{part.owners}/{name}" for name in MAP_FILES]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with naming(folder / name, (store.path / name).stat().st_size):
                shutil.copyfile(store.path / name, folder / name)
        for array in blocked_arrays(manifest):
            path, geometry, ndim = array
            present = _present(part, path, geometry)
            _copy(store.blocks(*array), folder, ndim, present, advance)
        write_digested(folder / PART, "part", part)


def _present(part: StorePart, path: str, geometry: BlockGeometry) -> list[tuple[int, int]]:
    holes = holes_of(part, path, geometry)
    return [(0, geometry.num_blocks)] if holes is None else holes.present()


def _copy(
    file: BlockedFile, folder: Path, ndim: int, present: list[tuple[int, int]], advance: Advance
) -> None:
    """Copy runs of blocks into shards of full length, whose other blocks are holes."""
    geometry = file.geometry
    paths = [folder / shard_path(file.path, i, ndim) for i in range(geometry.num_shards)]
    fds: list[int] = []
    try:
        for i, path in enumerate(paths):
            make_hole(path, geometry, i)
            fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        for low, high in present:
            for block, data in scan_blocks(file, start=low, stop=high):
                shard, at = geometry.locate(block)
                write_exact(fds[shard], data.reshape(-1).data, at, str(paths[shard]))
                advance(data.nbytes)
    finally:
        for fd in fds:
            os.close(fd)


def make_hole(path: Path, geometry: BlockGeometry, shard: int) -> None:
    """Make a shard of an array in its full length, with its index; its blocks are holes."""
    count = geometry.blocks_in(shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        index = memoryview(shard_index(geometry, count))
        write_exact(fd, index, count * geometry.slot_bytes, str(path))
    finally:
        os.close(fd)
