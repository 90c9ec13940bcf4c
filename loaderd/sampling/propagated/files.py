"""Hop-wise arrays in their files: gapless rows, so that a range of rows is a range of bytes.

Pages of an array are numbered through all of its shards, which are full but for the last.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, BlockGeometry, HopSet, Manifest, RowArray, row_geometry
from blockstore.store import BlockedFile, Store

RUN_PAGES = 256  # most pages that one call reads: 1 MiB
LABEL, NODES = "y", "n_id"  # names of the arrays that are not hops


class HopArray(NamedTuple):
    """One array whose rows come with every batch."""

    name: str
    array: RowArray
    file: int  # number in the reader
    geometry: BlockGeometry

    @property
    def row_bytes(self) -> int:
        return self.array.row_bytes

    @property
    def num_pages(self) -> int:
        """Pages that hold rows: the last block may have others after them."""
        return self.pages(0, self.array.num_rows)[1]

    def pages(self, first: int, stop: int) -> tuple[int, int]:
        """[first, stop) of the pages that hold rows [first, stop)."""
        width = self.row_bytes
        return first * width // PAGE_BYTES, -(-stop * width // PAGE_BYTES)

    def runs(self, low: int, high: int) -> NDArray[np.int64]:
        """Pages [low, high) as runs for the reader: int64 (runs, 3) of shard, page in it, pages."""
        per_shard = self.geometry.blocks_per_shard * self.geometry.pages_per_block
        cuts = [np.arange(low, high, RUN_PAGES)]
        cuts.append(np.arange((low // per_shard + 1) * per_shard, high, per_shard))
        starts = np.unique(np.concatenate(cuts))
        runs = np.empty((starts.size, 3), np.int64)
        runs[:, 0], runs[:, 1] = starts // per_shard, starts % per_shard
        runs[:, 2] = np.diff(np.append(starts, high))
        return runs


def hop_files(store: Store) -> list[BlockedFile]:
    """Files of the store's hop-wise arrays, in manifest order.  Raises CorruptBlock."""
    return [store.rows(array) for array in store.manifest.hop_arrays()]


def chosen_arrays(
    manifest: Manifest,
    hops: HopSet,
    operators: tuple[str, ...],
    last_hop: int,
    labels: bool,
    first_file: int,
) -> list[HopArray]:
    """Arrays of a batch: hop 0 once, hops 1 to `last_hop` of each operator, labels, original ids.

    first_file   number, in the reader, of the first of `hop_files`
    """
    numbers = {a.path: first_file + i for i, a in enumerate(manifest.hop_arrays())}
    named: dict[str, tuple[str, RowArray]] = {}
    for operator in operators:
        for hop, array in enumerate(hops.operators[operator][: last_hop + 1]):
            named.setdefault(array.path, (f"{operator}:{hop}", array))
    chosen = list(named.values())
    if labels and hops.label is not None:
        chosen.append((LABEL, hops.label))
    chosen.append((NODES, hops.nodes))
    return [
        HopArray(name, array, numbers[array.path], row_geometry(array, manifest.block_bytes))
        for name, array in chosen
    ]
