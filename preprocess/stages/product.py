"""Products of a relation's matrix with columns in memory; its blocks are read in any order."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import NodeType, Relation, edge_layout
from blockstore.io.buffers import aligned_buffer
from blockstore.kernels.columns import view_sources
from blockstore.store import Store, scan_blocks
from preprocess.files.store import stored_blocks
from preprocess.kernels import hops as kernels
from preprocess.kernels.rowsum import RowTable
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import PassProgress

_LINE_BYTES, _SCAN_BYTES = 64, 4 << 20
_TURNS = 8  # minimum work items for each thread in a product, as some columns take longer
_MAX_PARTS = 64  # maximum parts into which the columns of a block are divided


def count_degrees(
    store: Store, relation: Relation, nodes: NodeType, weighted: bool, progress: Progress
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.uint8]]:
    """Degrees of all nodes, weighted or not; reads all blocks.  Raises CorruptBlock.

    Ingest has checked that weights are finite, and not negative.

    Returns the sum of weights (or the number) of each node's in-edges, the same of its out-edges,
    and for each block 1 if its first edges belong to an earlier column.
    """
    into, out = np.zeros(nodes.num_nodes), np.zeros(nodes.num_nodes)
    carried, stop = np.zeros(relation.num_blocks, np.uint8), nodes.first + nodes.num_nodes
    with progress.stage("count edges", relation.num_edges, "edges") as stage:
        for number, (targets, block) in enumerate(stored_blocks(store, relation, _SCAN_BYTES)):
            weights = block.weights if weighted else None
            for ids, totals in ((targets, into), (block.sources, out)):
                if ids.size and not nodes.first <= ids.min() <= ids.max() < stop:
                    raise CorruptBlock(
                        f"{store.path / relation.path}, block {number}: ids outside of "
                        f"{nodes.name}, expected {nodes.first} to {stop - 1}; ingest again"
                    )
                kernels.add_weights(ids, nodes.first, weights, totals)
            carried[number] = block.header.num_carried > 0
            stage.advance(targets.size)
    return into, out, carried


def new_columns(num_items: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Zeros aligned to a cache line, in huge pages if the system provides them."""
    num_bytes = num_items * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + _LINE_BYTES, np.uint8)  # np.zeros would get small pages
    at = -raw.ctypes.data % _LINE_BYTES
    columns: NDArray[Any] = raw[at : at + num_bytes].view(dtype)
    columns[:] = 0
    return columns


class RelationProduct:
    """Products of the matrix of one relation of a type with itself."""

    def __init__(
        self,
        store: Store,
        relation: Relation,
        carried: NDArray[np.uint8],
        *,
        weighted: bool,
        threads: int,
        scan_bytes: int,
        resident: bool,
    ) -> None:
        """`resident`: read all blocks now, and keep them in memory.  Raises CorruptBlock."""
        nodes = next(t for t in store.manifest.types if t.name == relation.dst)
        self._relation, self._nodes = relation, nodes
        self._file, self._threads = store.graph(relation), threads
        self._block_bytes = store.manifest.block_bytes
        self._layout = edge_layout(store.manifest, relation)
        self._scan_bytes = max(scan_bytes, self._block_bytes)
        self._weighted = weighted
        carrying = np.flatnonzero(carried)
        self._slots = np.full(carried.size, -1, np.int64)
        self._slots[carrying] = np.arange(carrying.size)
        firsts = store.first_node(relation)[:-1].astype(np.int64)
        self._columns = firsts[carrying] - 1 - nodes.first
        self._carry = np.empty(0, np.float32)
        self._blocks: NDArray[np.uint8] | None = None
        if resident:
            self._blocks = aligned_buffer(relation.num_blocks * self._block_bytes)
            for first, blocks in scan_blocks(self._file, self._scan_bytes):
                at = first * self._block_bytes
                self._blocks[at : at + blocks.size] = blocks.reshape(-1)

    @property
    def graph_bytes(self) -> int:
        return self._relation.num_blocks * self._block_bytes

    def run(
        self,
        product: kernels.Product,
        rows: NDArray[np.float32],
        width: int,
        out: NDArray[np.float32],
        pool: ThreadPoolExecutor,
        stage: PassProgress | None = None,
    ) -> None:
        """Compute one product.

        rows, out   float32 (nodes * width,)

        Raises CorruptBlock.
        """
        if self._carry.size != self._columns.size * width:
            self._carry = np.empty(self._columns.size * width, np.float32)
        table = RowTable(rows, width, self._nodes.first)
        ranges, taking = self._ranges(), Lock()

        def work() -> None:
            while True:
                with taking:
                    found = next(ranges, None)
                if found is None:
                    return
                start, stop, part, parts = found
                for first, blocks in self._read(start, stop):
                    slots = self._slots[first : first + blocks.size // self._block_bytes]
                    raw = kernels.RawBlocks(
                        blocks.view(np.uint32), view_sources(blocks, self._layout),
                        blocks.view(np.float32) if self._weighted else None, self._block_bytes,
                        self._layout.edge_id_bytes,
                    )  # fmt: skip
                    kernels.multiply_blocks(
                        raw, table, product, out, slots, self._carry, part, parts
                    )
                    if stage is not None and part == 0:
                        stage.advance(blocks.size)

        for each in [pool.submit(work) for _ in range(self._threads)]:
            each.result()
        kernels.finish_carried(self._columns, self._carry, width, product, out)

    def _ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """Work items of threads: (first block, stop, part of their columns, number of parts)."""
        total, parts = self._relation.num_blocks, 1
        count = max(1, self._scan_bytes // self._block_bytes)
        if self._blocks is not None:
            count = max(1, min(count, total // (_TURNS * self._threads)))
            parts = max(1, min(_TURNS * self._threads // max(1, total), _MAX_PARTS))
        for first in range(0, total, count):
            for part in range(parts):
                yield first, min(first + count, total), part, parts

    def _read(self, first: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        if self._blocks is not None:
            size = self._block_bytes
            yield first, self._blocks[first * size : stop * size]
            return
        for block, blocks in scan_blocks(self._file, self._scan_bytes, first, stop):
            yield block, blocks.reshape(-1)
