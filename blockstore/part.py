"""A part of a store: all but the rows of features that other servers have.  FORMAT.md, "Parts".

Blocks in which no row belongs to this server are holes of sparse files.  `part.json` says which
rows are here, and which servers have the others; a page of zeros and its checksum do not.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import AbsentRows, CorruptBlock
from blockstore.format import BlockGeometry, Manifest, RowArray, bound_files, row_geometry
from blockstore.root import read_digested
from blockstore.validate import inside

PART = "part.json"
_FORMAT = 1
_MENDS = "make the part again with `blockstore part`"


class KeptRows(NamedTuple):
    """Adjacent rows of an array that one server has."""

    first: int
    stop: int
    server: int


class StorePart(msgspec.Struct, frozen=True):
    """Which part of a store this is."""

    format: int
    fingerprint: str  # of the store
    server: int  # whose part it is
    servers: int
    owners: str  # name of the owner map
    digest: str  # of the map
    rows: dict[str, tuple[KeptRows, ...]]  # of each array with holes, by path: all its rows

    def __str__(self) -> str:
        return f"part of server {self.server} of {self.servers}, by the owner map {self.owners!r}"


class Holes(NamedTuple):
    """Which blocks of an array are here, and which servers have the others."""

    server: int
    keepers: NDArray[np.uint16]  # (blocks,): the server that a block is read from

    def check(self, first: int, stop: int, where: str) -> None:
        """Raises AbsentRows: one of these blocks is with another server."""
        absent = np.flatnonzero(self.keepers[first:stop] != self.server)
        if absent.size:
            block = first + int(absent[0])
            raise AbsentRows(
                f"{where}: block {block} is with server {self.keepers[block]}, this part has that "
                f"of server {self.server}; serve it with --peers, or use the whole store"
            )

    def present(self) -> list[tuple[int, int]]:
        """Runs of blocks [first, stop) that are here."""
        here = np.concatenate([[False], self.keepers == self.server, [False]])
        edges = np.flatnonzero(np.diff(here.astype(np.int8)))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def find_keepers(owner: NDArray[Any], rows_per_block: int, server: int) -> NDArray[np.uint16]:
    """The server that each block of an array is read from: uint16 (blocks,).

    `server` if it owns any row of the block, else the owner of the first row, which has the block.

    owner   any integers (rows,)
    """
    starts = np.arange(0, owner.size, rows_per_block)
    if not starts.size:
        return np.empty(0, np.uint16)
    own = np.logical_or.reduceat(owner == server, starts)
    return np.where(own, server, owner[starts]).astype(np.uint16)


def kept_rows(keepers: NDArray[np.uint16], rows_per_block: int, num_rows: int) -> list[KeptRows]:
    """The keepers of blocks as runs of rows."""
    cuts = [0, *(np.flatnonzero(np.diff(keepers)) + 1).tolist(), keepers.size]
    return [
        KeptRows(low * rows_per_block, min(high * rows_per_block, num_rows), int(keepers[low]))
        for low, high in pairwise(cuts)
        if low < high
    ]


def split_arrays(manifest: Manifest) -> list[tuple[int, RowArray]]:
    """Arrays whose rows are divided among servers: with the store id of the first row of each."""
    return [(t.first, array) for t in manifest.types for array in t.features.values()]


def without_hops(manifest: Manifest) -> Manifest:
    """The manifest without what parts lack; the fingerprint is that of the store."""
    types = tuple(msgspec.structs.replace(t, hops={}) for t in manifest.types)
    bare = msgspec.structs.replace(manifest, types=types)
    files = {name: manifest.files[name] for name in bound_files(bare)}
    return msgspec.structs.replace(bare, files=files)


def read_part(root: str, manifest: Manifest) -> StorePart | None:
    """Which part a store is; None: it is whole.  Raises CorruptBlock.

    root   of the store, without links: `os.path.realpath`
    """
    if not os.path.lexists(Path(root, PART)):
        return None
    path = inside(root, PART)
    part = read_digested(path, "part", StorePart, _FORMAT, _MENDS)
    arrays = {array.path: array for _, array in split_arrays(manifest)}
    sound = (
        part.fingerprint == manifest.fingerprint
        and 0 <= part.server < part.servers <= 1 << 16
        and part.rows.keys() == arrays.keys()
        and all(_covers(part, runs, arrays[name], manifest) for name, runs in part.rows.items())
    )
    if not sound:
        raise CorruptBlock(
            f"{path}: fingerprint {part.fingerprint}, server {part.server} of {part.servers}, rows "
            f"of {len(part.rows)} arrays, expected {manifest.fingerprint}, and all rows of "
            f"{len(arrays)} arrays in whole blocks; {_MENDS}"
        )
    return part


def _covers(
    part: StorePart, runs: tuple[KeptRows, ...], array: RowArray, manifest: Manifest
) -> bool:
    """Whether runs of rows are all the rows of an array, block by block."""
    per_block = row_geometry(array, manifest.block_bytes).rows_per_block
    at = 0
    for run in runs:
        whole = run.stop % per_block == 0 or run.stop == array.num_rows
        if run.first != at or run.stop <= at or not whole or not 0 <= run.server < part.servers:
            return False
        at = run.stop
    return at == array.num_rows


def holes_of(part: StorePart, path: str, geometry: BlockGeometry) -> Holes | None:
    """Holes of an array; None: it has none, and is here as a whole."""
    runs = part.rows.get(path)
    if runs is None:
        return None
    keepers = np.empty(geometry.num_blocks, np.uint16)
    for first, stop, server in runs:
        keepers[first // geometry.rows_per_block : -(-stop // geometry.rows_per_block)] = server
    return Holes(part.server, keepers)


def part_of(
    manifest: Manifest, owner: NDArray[Any], server: int, servers: int, owners: tuple[str, str]
) -> StorePart:
    """The part of a server.

    owner    any integers (nodes,)   by store id
    owners   name and digest of the map
    """
    rows = {}
    for first, array in split_arrays(manifest):
        per_block = row_geometry(array, manifest.block_bytes).rows_per_block
        keepers = find_keepers(owner[first : first + array.num_rows], per_block, server)
        rows[array.path] = tuple(kept_rows(keepers, per_block, array.num_rows))
    return StorePart(_FORMAT, manifest.fingerprint, server, servers, *owners, rows)
