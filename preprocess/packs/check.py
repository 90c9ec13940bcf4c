"""What is said of packs that lie beside a store."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from blockstore.errors import StoreError
from blockstore.format import crc_path, row_geometry
from blockstore.store import BlockedFile, find_shards, scan_blocks
from blockstore.units import format_bytes
from loaderd.sampling.packed.files import check_bound
from loaderd.sampling.packed.format import packs_folder, read_pack


def _folders(store: Path) -> list[Path]:
    """Of packs, those of the store as it was before among them; not what is being written."""
    folder = packs_folder(store)
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def pack_lines(store: Path) -> list[str]:
    """A line for each pack; of one that cannot be read, why."""
    lines = []
    for folder in _folders(store):
        try:
            pack = read_pack(folder)
        except StoreError as error:
            lines.append(f"  pack          {error}")
            continue
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        r, hops = pack.resolved, ";".join(",".join(map(str, hop)) for hop in pack.resolved.fanouts)
        lines.append(
            f"  pack          {folder.name}: {len(pack.epochs)} epochs of {r.seeds}, fanouts "
            f"{hops}, batches of {r.batch_size:,}, seed {r.seed}, {format_bytes(size)}, of "
            f"fingerprint {r.fingerprint}"
        )
    return lines


def verify_packs(store: Path) -> Iterator[tuple[Path, int]]:
    """Every checksum of every pack: its folder, and the bytes of blocks read.

    Raises CorruptBlock: the first fault, by its file; NotAStore, UnsupportedVersion.
    """
    for folder in _folders(store):
        pack, total = read_pack(folder), 0
        for name, expected in pack.files.items():
            check_bound(folder / name, expected)
        for array in pack.arrays():
            geometry = row_geometry(array, pack.block_bytes)
            shards = find_shards(
                os.path.realpath(folder), array.path, geometry, 1 + len(array.row_shape)
            )
            crcs = np.empty(0, np.uint32)
            if geometry.num_pages:
                crcs = np.fromfile(folder / crc_path(array.path) / "c/0", np.uint32)
            file = BlockedFile(array.path, geometry, shards, crcs[: geometry.num_pages])
            total += sum(blocks.size for _, blocks in scan_blocks(file))
        yield folder, total
