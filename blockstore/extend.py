"""Add arrays to an existing store: written inside it, moved in, then named by its manifest.

Everything is made in the folder `.extend` of the store.  The manifest is replaced by one rename,
after all that it names is on disk: until then the store is as it was, and processes that have it
open see no change at all.  What a dead run left is removed by the next one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from blockstore.closing import Closing
from blockstore.errors import StoreExists
from blockstore.format import EXTEND_FOLDER, ROOT, Manifest, RowArray
from blockstore.io.files import flush
from blockstore.lock import lock_folder
from blockstore.store import open_store
from blockstore.validate import check_path
from blockstore.writer import RowsWriter, StoreWriter

_MOVED = "moved.json"  # what is on its way into the store
_TREE, _WORK = "store", "work"


class StoreExtender(Closing):
    """Extends a store, which is locked meanwhile; leaving it without `commit` undoes everything.

    Raises NotAStore, UnsupportedVersion, CorruptBlock; StoreBusy: another process extends it.
    """

    def __init__(self, path: Path, buffer_bytes: int = 8 << 20) -> None:
        """`buffer_bytes`: of each of two buffers per array being written."""
        self._path, self._folder = path, path / EXTEND_FOLDER
        open_store(path).check_whole("an array that is added")  # else nothing is made there
        self._held = ExitStack()
        with ExitStack() as held:
            held.callback(os.close, lock_folder(self._folder, path, "extending"))
            _clean(path)
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)
            held.callback(_clean, path)
            self.store = open_store(path)
            self.tree, self.work = self._folder / _TREE, self._folder / _WORK
            self.tree.mkdir()  # arrays that are closed lie there as in a store
            self.work.mkdir()  # for temporary files of the caller
            shutil.copyfile(path / ROOT, self.tree / ROOT)  # with attributes of other programs
            self._writer = held.enter_context(
                StoreWriter(
                    self.tree,
                    block_bytes=self.store.manifest.block_bytes,
                    buffer_bytes=buffer_bytes,
                )
            )
            self._writer.restore(self.store.manifest.files)
            self._held = held.pop_all()

    def rows(self, array: RowArray) -> RowsWriter:
        """Begin a row array.  Raises StoreExists: there is something in its place."""
        self._check_free(array.path)
        return self._writer.rows(array)

    def side(self, path: str, values: NDArray[Any]) -> None:
        """Write a small array in one piece.  Raises StoreExists."""
        self._check_free(path)
        self._writer.side(path, values)

    @property
    def digests(self) -> dict[str, str]:
        return self._writer.digests

    def commit(self, manifest: Manifest) -> Manifest:
        """Put the arrays into the store; returns the manifest with its new fingerprint."""
        manifest = self._writer.settle(manifest)
        moves = list(_absent(self.tree, self._path))
        (self._folder / _MOVED).write_bytes(msgspec.json.encode(moves))
        flush(self._folder / _MOVED)
        flush(self._folder)
        flush(self._path)  # so that the folder is on disk
        for name in moves:
            (self.tree / name).rename(self._path / name)
            flush((self._path / name).parent)
        (self.tree / ROOT).rename(self._path / ROOT)
        flush(self._path)
        return manifest

    def _check_free(self, path: str) -> None:
        if (self._path / path).exists():
            raise StoreExists(
                f"{self._path / path}: exists, and the manifest does not name it; remove it, or "
                "choose another name"
            )

    def close(self) -> None:
        self._held.close()


def _absent(tree: Path, store: Path, inner: str = "") -> Iterator[str]:
    """Files and folders of a tree that a store lacks, by path in it; not what lies in them."""
    for entry in sorted((tree / inner).iterdir()):
        name = str(entry.relative_to(tree))
        if not (store / name).exists():
            yield name
        elif entry.is_dir():
            yield from _absent(tree, store, name)


def _clean(path: Path) -> None:
    """Remove what the last run has left: what it moved in, unless the manifest names it."""
    folder = path / EXTEND_FOLDER
    try:
        moved = msgspec.json.decode((folder / _MOVED).read_bytes(), type=list[str])
    except (FileNotFoundError, msgspec.DecodeError):  # cut off: nothing had been moved
        moved = []
    for name in moved:
        check_path(name)  # what it names is removed
    named = open_store(path).manifest.files if moved else {}
    for name in moved:
        if not any(p.startswith(f"{name}/") for p in named):
            shutil.rmtree(path / name, ignore_errors=True)
            flush((path / name).parent)
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    (folder / _MOVED).unlink(missing_ok=True)
