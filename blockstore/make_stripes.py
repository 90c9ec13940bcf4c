"""Deals the blocks of a store over folders, and gathers them again.  FORMAT.md, "Stripes".

All files of a dealing are new ones, in a folder of its own name; one rename of `stripes.json`, or
its removal, decides where readers look.  So a run that is cut off anywhere leaves the store as it
was, or dealt, and the next run removes what is then of no use.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from blockstore.errors import StoreError
from blockstore.format import STRIPE_FOLDER, blocked_arrays, shard_path
from blockstore.io.files import (
    flush,
    flush_tree,
    missing_parents,
    naming,
    open_to_write,
    write_exact,
)
from blockstore.lock import lock_folder
from blockstore.make_part import make_hole
from blockstore.root import write_digested
from blockstore.store import BlockedFile, Store, open_store, scan_blocks
from blockstore.stripes import (
    FORMAT,
    MAX_FOLDERS,
    STRIPE,
    STRIPES,
    UNIT_BYTES,
    StripeFolder,
    StripeSet,
)
from blockstore.validate import check_path

Advance = Callable[[int], None]  # bytes that were written
_BEGUN, _TREE = "begun.json", "store"
_LANES, _LANE_BYTES = 4, 4 << 20  # threads that copy at once; bytes for each


class _Begun(msgspec.Struct, frozen=True):
    """What a run is about to do: written to disk before anything else."""

    old: StripeSet | None
    new: StripeSet | None  # None: blocks are gathered


def check_folders(folders: Sequence[Path], store: Path) -> tuple[str, ...]:
    """Absolute paths of folders that blocks can be dealt over.

    Raises StoreError: they are too many, the same, in the store, or cannot be written down.
    """
    paths = tuple(str(folder.absolute()) for folder in folders)
    if not 1 <= len(paths) <= MAX_FOLDERS:
        raise StoreError(
            f"{store}: {len(paths)} folders, expected 1 to {MAX_FOLDERS}; give one on each disk"
        )
    real = [os.path.realpath(path) for path in paths]
    root = os.path.realpath(store)
    for i, path in enumerate(real):
        try:
            (paths[i] + root).encode()
        except UnicodeEncodeError:
            raise StoreError(
                f"{paths[i]!a} or {root!a}: is no UTF-8, expected names that stripe.json "
                "can hold; rename it, or give a link to it"
            ) from None
        if path in real[:i]:
            raise StoreError(
                f"{paths[i]}: given twice, expected a folder on each disk; leave it out"
            )
        if path == root or path.startswith(f"{root}/"):
            raise StoreError(
                f"{paths[i]}: is in the store, expected a folder beside it; choose another one"
            )
        if os.path.lexists(path) and not Path(path).is_dir():
            raise StoreError(f"{paths[i]}: is no folder, expected one, or nothing; choose another")
    return paths


def deal_store(path: Path, folders: Sequence[Path], advance: Advance) -> Store:
    """Deal the blocks of a store over folders, or gather them in the store: no folders.

    Every page that is copied is verified.  The store has the fingerprint that it had.  Raises
    StoreError: folders that cannot be, a part of a store; StoreBusy, OutOfSpace, CorruptBlock.
    """
    store = open_store(path)
    store.check_whole("blockstore stripe")
    paths = check_folders(folders, path) if folders else ()
    if not paths and store.stripes is None:
        raise StoreError(f"{path}: its blocks are in it, expected a store whose blocks are dealt")
    work = path / STRIPE_FOLDER
    with ExitStack() as held:
        held.callback(os.close, lock_folder(work, path, "dealing"))
        _clean(path)
        held.callback(_end, path)
        store = open_store(path)
        arrays = tuple(name for name, _, _ in blocked_arrays(store.manifest))
        name, new = secrets.token_hex(16), None
        if paths:
            new = StripeSet(FORMAT, name, UNIT_BYTES, paths, arrays)
        with naming(work / _BEGUN, 4096):
            (work / _BEGUN).write_bytes(msgspec.json.encode(_Begun(store.stripes, new)))
        for each in (work / _BEGUN, work, path):
            flush(each)
        if new is None:
            _gather(store, work / _TREE, advance)
        else:
            _deal(store, new, work / STRIPES, advance)
    return open_store(path)


def _deal(store: Store, new: StripeSet, record: Path, advance: Advance) -> None:
    """Write the files of a dealing, then have readers look there."""
    made = [folder.parent for part in new.parts() for folder in missing_parents(part)]
    for number, part in enumerate(new.parts()):
        with naming(part, 4096):
            part.mkdir(parents=True)
            folder = StripeFolder(FORMAT, new.id, number, len(new.folders), str(store.path))
            write_digested(part / STRIPE, "stripe", folder)
    for path, geometry, ndim in blocked_arrays(store.manifest):
        deal = new.deal(path, geometry)
        file = store.blocks(path, geometry, ndim)
        copy_blocks(file, replace(file, shards=deal.files, deal=deal), advance)
    for part in new.parts():
        flush_tree(part)
        made += [part.parent, part.parent.parent]
    for parent in made:
        flush(parent)
    write_digested(record, "stripes", new)
    flush(record)
    record.rename(store.path / STRIPES)
    flush(store.path)


def _gather(store: Store, tree: Path, advance: Advance) -> None:
    """Write shards; when all are in the store, have readers look there."""
    assert store.stripes is not None
    dealt = [a for a in blocked_arrays(store.manifest) if a[0] in store.stripes.arrays]
    for path, geometry, ndim in dealt:
        shards = tuple(tree / shard_path(path, i, ndim) for i in range(geometry.num_shards))
        for i, shard in enumerate(shards):
            make_hole(shard, geometry, i)
        file = store.blocks(path, geometry, ndim)
        copy_blocks(file, replace(file, shards=shards, deal=None), advance)
    if tree.exists():
        flush_tree(tree)
    for path, _, _ in dealt:
        if (tree / path).exists():
            (tree / path / "c").rename(store.path / path / "c")
            flush(store.path / path)
    (store.path / STRIPES).unlink()
    flush(store.path)


def copy_blocks(file: BlockedFile, target: BlockedFile, advance: Advance) -> None:
    """Copy the blocks of a file to the places of another one's."""
    for path in target.shards:  # one may get no block
        os.close(open_to_write(path)[0])
    with ThreadPoolExecutor(_LANES) as pool:
        lanes = [
            pool.submit(_copy_lane, file, target, (lane, _LANES), advance) for lane in range(_LANES)
        ]
        for lane in lanes:
            lane.result()


def _copy_lane(
    file: BlockedFile, target: BlockedFile, lane: tuple[int, int], advance: Advance
) -> None:
    size = file.geometry.slot_bytes
    for block, data in scan_blocks(file, _LANE_BYTES, lane=lane):
        raw, first = data.reshape(-1), block * size
        for path, offset, num_bytes, at in target.ranges(first, first + raw.size):
            fd, _ = open_to_write(path)
            try:
                piece = raw[at - first : at - first + num_bytes]
                write_exact(fd, piece.data, offset, str(path))
            finally:
                os.close(fd)
        advance(raw.size)


def _end(path: Path) -> None:
    """Clean up; if that fails, the record of what to remove stays."""
    _clean(path)
    shutil.rmtree(path / STRIPE_FOLDER, ignore_errors=True)


def _clean(path: Path) -> None:
    """Remove what the last run has left that readers do not look at."""
    try:
        raw = (path / STRIPE_FOLDER / _BEGUN).read_bytes()
        begun = msgspec.json.decode(raw, type=_Begun)
    except (FileNotFoundError, msgspec.DecodeError):  # cut off: nothing had been made
        return
    now = open_store(path).stripes
    flush(path)  # the run may have ended before it could: nothing goes that a crash would need
    for dealing in (begun.old, begun.new):
        if dealing is not None and (now is None or now.id != dealing.id):
            check_path(dealing.id)  # what it names is removed
            for part in dealing.parts():
                shutil.rmtree(part, ignore_errors=True)
    # dealt arrays have no shards in the store: remove old ones, or those of a gathering
    for name in now.arrays if now else ():
        shutil.rmtree(path / name / "c", ignore_errors=True)
    shutil.rmtree(path / STRIPE_FOLDER / _TREE, ignore_errors=True)
    (path / STRIPE_FOLDER / _BEGUN).unlink()
