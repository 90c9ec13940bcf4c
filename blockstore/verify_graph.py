"""Graph blocks in order: what is carried over, and edge ids.

What a block says of itself is checked as it is read (`validate.GraphCheck`): its place in the
object index, its offsets and its sources.  Here is what takes more than one block to see.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import HaloColumns, Relation, edge_layout
from blockstore.kernels.order import distinct
from blockstore.store import Store, scan_blocks
from blockstore.unpack import unpack_block


@dataclass(slots=True)
class VerifyReport:
    """What was looked at and found good."""

    blocks: int = 0
    pages: int = 0
    nodes: int = 0
    edges: int = 0
    bytes: int = 0
    strays: tuple[str, ...] = ()  # files that lie in the folder and are not of the store
    foreign_maps: tuple[str, ...] = ()  # owner maps of another store, or of this before a change
    part: str = ""  # which part of a store it is, of which what is here was looked at


def check_columns(
    store: Store, relation: Relation, columns: Relation | HaloColumns, report: VerifyReport
) -> None:
    """The blocks of a relation, or of the columns of its halo slots.  Raises CorruptBlock."""
    manifest, file, path = store.manifest, store.graph(columns), store.path / columns.path
    capacity = edge_layout(manifest, relation).capacity(manifest.block_bytes)
    ids = _EdgeIds(relation) if columns is relation and relation.edge_id_dtype else None
    owed = 0  # edges of the last column that are still to come
    for first, blocks in scan_blocks(file):
        for number, raw in enumerate(blocks, first):
            where = f"{path}, block {number}"
            block = unpack_block(raw, where)
            header, carried = block.header, min(owed, capacity)
            if header.num_carried != carried:
                raise CorruptBlock(
                    f"{where}: {header.num_carried} carried edges, expected {carried}"
                )
            owed -= carried
            if header.num_nodes:
                owed = header.last_degree - int(block.degrees_here()[-1])
            if ids is not None and block.edge_ids is not None:
                ids.add(block.edge_ids, where)
        report.blocks += blocks.shape[0]
        report.bytes += blocks.nbytes
    if ids is not None:
        ids.end(str(path))
    report.pages += file.crcs.size
    report.edges += columns.num_edges if columns is relation else 0


class _EdgeIds:
    """Edge ids of a relation: in range and each at most once, by two bits for a source edge."""

    def __init__(self, relation: Relation) -> None:
        self._limit = bits = 2 * relation.num_source_edges
        # where ids are few among very many, they are kept: no table is larger than the store
        self._kept: list[NDArray[np.int64]] | None = None
        if bits > 1024 * max(1024, relation.num_edges):
            self._kept, bits = [], 0
        self._seen = np.zeros(-(-bits // 8), np.uint8)

    def add(self, edge_ids: NDArray[Any], where: str) -> None:
        """Those of one block.  Raises CorruptBlock."""
        if edge_ids.size == 0:
            return
        if int(edge_ids.max()) >= self._limit:
            raise CorruptBlock(
                f"{where}: edge id {int(edge_ids.max())}, expected less than {self._limit}"
            )
        ids = edge_ids.astype(np.int64)
        if self._kept is not None:
            self._kept.append(ids)
            return
        byte, bit = ids >> 3, (1 << (ids & 7)).astype(np.uint8)
        if (self._seen[byte] & bit).any():
            _raise_twice(where)
        _check_once(ids, where)
        np.bitwise_or.at(self._seen, byte, bit)

    def end(self, where: str) -> None:
        """All have been added.  Raises CorruptBlock."""
        if self._kept:
            _check_once(np.concatenate(self._kept), where)


def _check_once(ids: NDArray[np.int64], where: str) -> None:
    if distinct(ids).size != ids.size:
        _raise_twice(where)


def _raise_twice(where: str) -> None:
    raise CorruptBlock(f"{where}: an edge id occurs twice, expected each once")
