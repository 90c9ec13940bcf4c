"""Blocks of a store dealt over folders on several disks.  FORMAT.md, "Stripes".

`stripes.json` of the store says where; each folder says in `stripe.json` which it is, so that a
disk that is missing, or another one in its place, is named.  Nothing else of a store changes: its
manifest, fingerprint and checksums are those that it had.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock, StoreError
from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.kernels.reads import PAGE, PAGES, PLACE, SHARD
from blockstore.root import read_digested
from blockstore.validate import check_path

STRIPES, STRIPE = "stripes.json", "stripe.json"  # of a store; of a folder
UNIT_BYTES = 1 << 20  # of adjacent blocks that stay together, at least one
FORMAT = 1
MAX_FOLDERS = 64
_MENDS = "restore it from a copy, or ingest again"


class StripeSet(msgspec.Struct, frozen=True):
    """The folders over which the blocks of a store are dealt."""

    format: int
    id: str  # unique to this dealing; the name of its folder in each of `folders`
    unit_bytes: int
    folders: tuple[str, ...]  # absolute paths
    arrays: tuple[str, ...]  # paths of those that are dealt; others are in the store

    def parts(self) -> list[Path]:
        """The folders of this dealing, one in each of `folders`."""
        return [Path(folder, self.id) for folder in self.folders]

    def deal(self, path: str, geometry: BlockGeometry) -> "Deal":
        """How an array is dealt."""
        unit = max(1, self.unit_bytes // geometry.slot_bytes) * geometry.pages_per_block
        files = tuple(part / path for part in self.parts())
        return Deal(unit, geometry.num_pages, files, self.folders)

    def __str__(self) -> str:
        return f"blocks of {len(self.arrays)} arrays in {', '.join(self.folders)}"


class StripeFolder(msgspec.Struct, frozen=True):
    """Which folder of which dealing this is."""

    format: int
    id: str
    number: int  # from 0
    folders: int
    store: str  # where the store was; for people


class Deal(NamedTuple):
    """How the pages of an array are dealt: unit u of pages is unit u // n of file u % n."""

    unit_pages: int
    num_pages: int  # of the array
    files: tuple[Path, ...]  # one in each folder
    folders: tuple[str, ...]

    def place(self, page: int) -> tuple[int, int]:
        """The file of a page of the array, and which of its pages it is."""
        unit, inside = divmod(page, self.unit_pages)
        row, file = divmod(unit, len(self.files))
        return file, row * self.unit_pages + inside

    def file_pages(self, file: int) -> int:
        """Pages that a file has."""
        units, rest = divmod(self.num_pages, self.unit_pages)
        rows, more = divmod(units, len(self.files))
        return (rows + (file < more)) * self.unit_pages + rest * (file == more)

    def cut(self, runs: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Runs of pages as runs of each file, cut where a unit begins, in their order.

        runs   int64 (runs, 4)   SHARD, which is 0, PAGE of the array, PAGES, PLACE

        A list for each file, int64 (cut, 4): SHARD is the row of units, PAGE a page of the file.
        """
        num, unit_pages = len(self.files), self.unit_pages
        first = runs[:, PAGE] // unit_pages
        counts = (runs[:, PAGE] + runs[:, PAGES] - 1) // unit_pages - first + 1
        which = np.repeat(np.arange(len(runs)), counts)
        unit = first[which] + np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
        page, pages, place = (runs[which, column] for column in (PAGE, PAGES, PLACE))
        low = np.maximum(page, unit * unit_pages)
        cut = np.empty((which.size, 4), np.int64)
        cut[:, SHARD] = unit // num
        cut[:, PAGE] = low - (unit - cut[:, SHARD]) * unit_pages
        cut[:, PAGES] = np.minimum(page + pages, (unit + 1) * unit_pages) - low
        cut[:, PLACE] = place + (low - page) * PAGE_BYTES
        return [cut[unit % num == file] for file in range(num)]


def read_stripes(store: Path, arrays: frozenset[str]) -> StripeSet | None:
    """How a store is dealt; None: it is not.  Checks that each folder is there, and the right one.

    arrays   paths of its arrays of blocks

    Raises CorruptBlock, UnsupportedVersion; StoreError: a folder is missing, or another one.
    """
    path = store / STRIPES
    if not path.exists():
        return None
    found = read_digested(path, "stripes", StripeSet, FORMAT, _MENDS)
    sound = (
        1 <= len(found.folders) <= MAX_FOLDERS
        and all(Path(folder).is_absolute() for folder in found.folders)
        and found.unit_bytes > 0
        and arrays.issuperset(found.arrays)
    )
    if not sound or "/" in found.id:
        raise CorruptBlock(
            f"{path}: {len(found.folders)} folders, units of {found.unit_bytes} bytes, "
            f"{len(found.arrays)} arrays, expected 1 to {MAX_FOLDERS} absolute paths and arrays "
            f"of the store; {_MENDS}"
        )
    check_path(found.id)
    for number in range(len(found.folders)):
        _check_folder(store, found, number)
    return found


def _check_folder(store: Path, found: StripeSet, number: int) -> None:
    """Raises StoreError: a folder is missing, or another one is in its place."""
    where = f"{store}: disk {number + 1} of {len(found.folders)}, {found.folders[number]}"
    path = found.parts()[number] / STRIPE
    try:
        there = path.exists()
    except OSError as error:  # the disk does not answer
        raise StoreError(
            f"{where}, does not answer ({error.strerror}), expected a disk; look at it"
        ) from error
    if not there:
        folder = Path(found.folders[number])
        others = sorted(folder.glob(f"*/{STRIPE}")) if folder.is_dir() else []
        what = "is not there"
        if others:
            one = read_digested(others[0], "stripe", StripeFolder, FORMAT, _MENDS)
            what = f"has blocks of {one.store} or of another dealing, {one.id}"
        elif folder.is_dir():
            what = "has none of its blocks"
        raise StoreError(
            f"{where}, {what}, expected {path}; mount the disk there, or put a link to it there"
        )
    one = read_digested(path, "stripe", StripeFolder, FORMAT, _MENDS)
    if (one.id, one.number, one.folders) != (found.id, number, len(found.folders)):
        raise StoreError(
            f"{where}, has disk {one.number + 1} of {one.folders} of {one.store}, dealing "
            f"{one.id}, expected dealing {found.id}; mount each disk where it was"
        )


def check_files(deal: Deal) -> None:
    """Check that each file of an array is there, in its length.  Raises CorruptBlock."""
    for number, path in enumerate(deal.files):
        expected = deal.file_pages(number) * PAGE_BYTES
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CorruptBlock(f"{path}: {error.strerror}, expected a file of blocks") from error
        if found != expected:
            raise CorruptBlock(
                f"{path}: {found} bytes, expected {expected}; it was truncated or replaced: "
                "restore it from a copy, or ingest again"
            )
