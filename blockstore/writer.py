"""Writes a store: whole shards by O_DIRECT, under a temporary name until all of it is on disk."""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.closing import Closing
from blockstore.create import ZarrTree
from blockstore.format import (
    PAGE_BYTES,
    SHARD_BYTES,
    BlockGeometry,
    Manifest,
    RowArray,
    bound_files,
    crc_path,
    graph_geometry,
    row_geometry,
    shard_path,
)
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.files import flush_tree, open_to_write, write_exact
from blockstore.kernels.crc import page_crcs
from blockstore.root import digest, write_root
from blockstore.store import crc_bytes, shard_index


class BlockSink:
    """Writes slots in order into the shards of one array: one buffer fills, one is written."""

    def __init__(
        self, root: Path, path: str, ndim: int, slot_bytes: int, buffer_bytes: int, first: int = 0
    ) -> None:
        """`first`: number of the first slot; those before it are written by somebody else."""
        self._root, self._path, self._ndim, self._slot_bytes = root, path, ndim, slot_bytes
        self._per_shard = max(1, SHARD_BYTES // slot_bytes)
        count = max(1, min(buffer_bytes // slot_bytes, self._per_shard))
        self._buffers = [aligned_buffer(count * slot_bytes).reshape(count, -1) for _ in range(2)]
        self._filled, self._written = 0, first
        self._crcs: list[NDArray[np.uint32]] = []
        self._fd, self._direct = -1, False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._pending: Future[None] | None = None

    def next_slot(self) -> NDArray[np.uint8]:
        """The slot to fill next, uint8 (slot_bytes,): fill all of it, as it may hold anything."""
        if self._filled == self._buffers[0].shape[0]:
            self._flush()
        slot: NDArray[np.uint8] = self._buffers[0][self._filled]
        self._filled += 1
        return slot

    @property
    def num_slots(self) -> int:
        """Number of slots, with those before the first."""
        return self._written + self._filled

    def end(self) -> NDArray[np.uint32]:
        """Write what is left; returns page crcs."""
        self._flush()
        self._wait()
        self._buffers = []
        self.abort()
        crcs = np.concatenate(self._crcs) if self._crcs else np.empty(0, np.uint32)
        self._crcs = []
        return crcs

    def abort(self) -> None:
        """Stop writing; what is there will be removed."""
        self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _flush(self) -> None:
        self._wait()
        if self._filled:
            full = self._buffers[0][: self._filled].reshape(-1)
            self._pending = self._thread.submit(self._write, full, self._written)
            self._written += self._filled
        self._buffers.reverse()
        self._filled = 0

    def _write(self, data: NDArray[np.uint8], first: int) -> None:
        crcs = np.empty(data.size // PAGE_BYTES, np.uint32)
        page_crcs(data, crcs.size, crcs)
        self._crcs.append(crcs)
        done = 0
        while done < data.size:
            shard, slot = divmod(first + done // self._slot_bytes, self._per_shard)
            if slot == 0 or self._fd < 0:
                self._open(shard)
            count = min(data.size - done, (self._per_shard - slot) * self._slot_bytes)
            piece = byte_view(data[done : done + count])
            write_exact(self._fd, piece, slot * self._slot_bytes, self._name(shard))
            done += count

    def _open(self, shard: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._direct = open_to_write(Path(self._name(shard)))

    def _name(self, shard: int) -> str:
        return str(self._root / shard_path(self._path, shard, self._ndim))


class RowBlocks:
    """Writes rows of one array, appended in order, into its blocks."""

    def __init__(self, sink: BlockSink, array: RowArray, geometry: BlockGeometry) -> None:
        self._sink, self._array, self._geometry = sink, array, geometry
        self._slot: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._in_slot, self.num_rows = geometry.rows_per_block, 0

    def append(self, rows: NDArray[Any]) -> None:
        """Append the next rows, any number, of the stored dtype (bfloat16: uint16)."""
        if rows.shape[0] == 0:
            return
        raw = np.ascontiguousarray(rows).reshape(rows.shape[0], -1).view(np.uint8)
        width, per_block, done = self._array.row_bytes, self._geometry.rows_per_block, 0
        assert raw.size == rows.shape[0] * width
        while done < rows.shape[0]:
            if self._in_slot == per_block:
                self._slot, self._in_slot = self._sink.next_slot(), 0
                self._slot[self._geometry.chunk_bytes :] = 0
            count = min(rows.shape[0] - done, per_block - self._in_slot)
            at = self._in_slot * width
            self._slot[at : at + count * width] = raw[done : done + count].reshape(-1)
            self._in_slot += count
            done += count
        self.num_rows += rows.shape[0]

    def end(self) -> NDArray[np.uint32]:
        """End the array: the rest of the last block is zeros.  Returns the page crcs."""
        self._slot[self._in_slot * self._array.row_bytes :] = 0
        return self._sink.end()


class RowsPart(RowBlocks):
    """Some blocks of an array, written beside others, in a process that need not be the writer's.

    The last one is full, or the last one of the array.  What is written twice is the same: a part
    may be written again at any time.
    """

    def __init__(
        self, root: Path, array: RowArray, block_bytes: int, buffer_bytes: int, first: int
    ) -> None:
        """`root`: of the store being written; `first`: first block of the part.

        Raises FileNotFoundError: nobody writes the array any more.
        """
        (root / array.path).stat()
        geometry, ndim = row_geometry(array, block_bytes), 1 + len(array.row_shape)
        sink = BlockSink(root, array.path, ndim, geometry.slot_bytes, buffer_bytes, first)
        super().__init__(sink, array, geometry)


class RowsWriter(RowBlocks):
    """A whole array.  A context manager; leaving it closes the array."""

    def __init__(self, writer: "StoreWriter", array: RowArray) -> None:
        self._writer = writer
        writer.begin_parts(array)
        geometry = row_geometry(array, writer.block_bytes)
        sink = writer.sink(array.path, 1 + len(array.row_shape), geometry.slot_bytes)
        super().__init__(sink, array, geometry)

    def close(self) -> None:
        """End the array: all rows are there.  Raises OutOfSpace."""
        assert self.num_rows == self._array.num_rows, f"{self._array.path}: {self.num_rows} rows"
        self._writer.end_parts(self._array, self.end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            self.close()


class GraphWriter:
    """Graph blocks of one relation, appended in order."""

    def __init__(self, writer: "StoreWriter", path: str) -> None:
        self._writer, self._path = writer, path
        self._sink = writer.sink(path, 2, writer.block_bytes)

    def append(self, block: NDArray[np.uint8]) -> None:
        """Append the next block, uint8 (block_bytes,); it is copied."""
        self._sink.next_slot()[:] = block

    def close(self) -> int:
        """End the array: all blocks are there; returns their number.  Raises OutOfSpace."""
        geometry = graph_geometry(self._sink.num_slots, self._writer.block_bytes)
        self._writer.bind(self._writer.tree.graph(self._path, geometry))
        self._writer.end_blocks(self._path, 2, geometry, self._sink.end())
        return geometry.num_blocks


class StoreWriter(Closing):
    """Builds a store in a folder of the caller, going on with what is there."""

    def __init__(self, folder: Path, *, block_bytes: int, buffer_bytes: int = 8 << 20) -> None:
        """`buffer_bytes`: of each of two buffers per array being written."""
        self.folder, self.block_bytes, self._buffer_bytes = folder, block_bytes, buffer_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self.tree = ZarrTree(folder)
        self._digests: dict[str, str] = {}
        self._sinks: list[BlockSink] = []  # that are ended with it

    def sink(self, path: str, ndim: int, slot_bytes: int) -> BlockSink:
        sink = BlockSink(self.folder, path, ndim, slot_bytes, self._buffer_bytes)
        self._sinks.append(sink)
        return sink

    def rows(self, array: RowArray) -> RowsWriter:
        return RowsWriter(self, array)

    def begin_parts(self, array: RowArray) -> None:
        """Begin an array whose blocks others write, by `RowsPart`."""
        self.bind(self.tree.rows(array, row_geometry(array, self.block_bytes)))

    def end_parts(self, array: RowArray, crcs: NDArray[np.uint32]) -> None:
        """End an array: all blocks are there; `crcs`: of their pages, in order."""
        geometry = row_geometry(array, self.block_bytes)
        self.end_blocks(array.path, 1 + len(array.row_shape), geometry, crcs)

    def end_blocks(
        self, path: str, ndim: int, geometry: BlockGeometry, crcs: NDArray[np.uint32]
    ) -> None:
        """The same for any array: an index is written after the slots of each shard.

        Through an ordinary descriptor: an index is not page-sized.
        """
        for shard in range(geometry.num_shards):
            name = str(self.folder / shard_path(path, shard, ndim))
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                held = geometry.blocks_in(shard)
                raw = memoryview(shard_index(geometry, held))
                write_exact(fd, raw, held * geometry.slot_bytes, name)
            finally:
                os.close(fd)
        self.side(crc_path(path), crcs)

    def graph(self, path: str) -> GraphWriter:
        return GraphWriter(self, path)

    def side(self, path: str, values: NDArray[Any]) -> None:
        """Write a small array in one piece."""
        self.bind(self.tree.side(path, values))
        if values.size:  # digest of what should be in the file, whatever is written there
            raw = values.tobytes()
            self._digests[f"{path}/c/0"] = digest(raw + crc_bytes(raw))

    def bind(self, metadata: dict[str, bytes]) -> None:
        """Add digests of metadata files, by path; files of groups keep their first digest."""
        for name, raw in metadata.items():
            self._digests.setdefault(name, digest(raw))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of all files written so far except shards, by path."""
        return dict(self._digests)

    def restore(self, digests: dict[str, str]) -> None:
        """Add digests of files that are there already, from an earlier writer."""
        self._digests |= digests

    def discard(self, path: str) -> None:
        """Remove what an earlier writer of the folder has left of an array."""
        shutil.rmtree(self.folder / path, ignore_errors=True)

    def settle(self, manifest: Manifest) -> Manifest:
        """Complete the store, all of it on disk; returns the manifest with its fingerprint."""
        files = {name: self._digests[name] for name in bound_files(manifest)}
        manifest = write_root(self.folder, msgspec.structs.replace(manifest, files=files))
        flush_tree(self.folder)
        return manifest

    def close(self) -> None:
        for sink in self._sinks:
            sink.abort()
