"""The nodes of batches, read back from the records that have just been written."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, RowArray, crc_path, row_geometry
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from blockstore.store import BlockedFile, find_shards
from loaderd.sampling.packed.files import page_runs
from loaderd.sampling.packed.format import nodes_offset, num_pages


class NodesReader(ExitStack):
    """Reads the nodes of any batch of an epoch; of a record nothing else."""

    def __init__(
        self,
        root: Path,
        array: RowArray,
        block_bytes: int,
        hops: tuple[int, int],
        pages: Sequence[int],
        nodes: Sequence[int],
        id_dtype: str,
    ) -> None:
        """`hops`: their number, and that of relations.  Raises CorruptBlock, OSError."""
        super().__init__()
        self._geometry = row_geometry(array, block_bytes)
        self._dtype, self._nodes = np.dtype(id_dtype), nodes
        self._first = list(accumulate(pages, initial=0))
        self._offset = nodes_offset(*hops)
        most = num_pages(self._offset + max(nodes) * self._dtype.itemsize)
        self._buffer = aligned_buffer(most * PAGE_BYTES)
        crcs = np.fromfile(root / crc_path(array.path) / "c/0", np.uint32, self._geometry.num_pages)
        shards = find_shards(str(root.resolve()), array.path, self._geometry, 2)
        file = BlockedFile(array.path, self._geometry, shards, crcs)
        self._reader = self.enter_context(BlockReader([file], self._buffer, PAGE_BYTES, 1))

    def read(self, batch: int) -> NDArray[Any]:
        """Store ids; valid until the next call.  Raises CorruptBlock, OSError."""
        size = self._nodes[batch] * self._dtype.itemsize
        first = self._first[batch]
        runs = page_runs(self._geometry, first, first + num_pages(self._offset + size))
        places = (np.cumsum(runs[:, 2]) - runs[:, 2]) * PAGE_BYTES
        self._reader.fetch(0, runs, places).wait()
        return self._buffer[self._offset : self._offset + size].view(self._dtype)
