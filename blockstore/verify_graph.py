"""Graph blocks in order: headers, offsets, ids, what is carried over."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import HaloColumns, Relation, giant_capacity
from blockstore.store import Store, scan_blocks
from blockstore.unpack import GraphBlock, unpack_block


@dataclass(slots=True)
class VerifyReport:
    """What was looked at and found good."""

    blocks: int = 0
    pages: int = 0
    nodes: int = 0
    edges: int = 0
    bytes: int = 0
    strays: tuple[str, ...] = ()  # files that lie in the folder and are not of the store


class RelationVerifier:
    """The blocks of one relation, in order; or the columns of its halo slots."""

    def __init__(
        self, store: Store, relation: Relation, report: VerifyReport, num_slots: int | None = None
    ) -> None:
        """`num_slots`: of the halo; None: the relation itself."""
        manifest = store.manifest
        self._columns: Relation | HaloColumns = relation
        if num_slots is not None:
            assert relation.halo is not None
            self._columns = relation.halo
        self._store, self._relation, self._report = store, relation, report
        types = {t.name: t for t in manifest.types}
        self._src, self._dst = types[relation.src], types[relation.dst]
        widths = relation.item_bytes(manifest.id_dtype)
        self._capacity = giant_capacity(manifest.block_bytes, *widths)
        self._sections = [bool(width) for width in widths[1:]]
        self._first_node = store.first_node(self._columns)
        self._first_edge = store.first_edge(self._columns)
        self._is_copy = num_slots is not None
        self._next = 0 if self._is_copy else self._dst.first  # column that must come next
        self._end = num_slots if num_slots is not None else self._next + self._dst.num_nodes
        self._owed = 0  # edges of the last column that are still to come
        self._edges = 0
        once = relation.edge_id_dtype and not self._is_copy
        bits = 2 * relation.num_source_edges if once else 0
        # where ids are few among very many, they are kept: no table is larger than the store
        self._kept: list[NDArray[np.int64]] | None = None
        if bits > 1024 * max(1024, relation.num_edges):
            self._kept, bits = [], 0
        self._seen = np.zeros(-(-bits // 8), np.uint8)

    def run(self) -> None:
        """Raises CorruptBlock."""
        columns = self._columns
        file = self._store.graph(columns)
        path = self._store.path / columns.path
        number = -1
        for first, blocks in scan_blocks(file):
            for i in range(blocks.shape[0]):
                number = first + i
                where = f"{path}, block {number}"
                self._check(number, unpack_block(blocks[i], where), where)
            self._report.blocks += blocks.shape[0]
            self._report.bytes += blocks.nbytes
        end = self._end
        if self._next != end or self._owed or int(self._first_node[-1]) != self._next:
            raise CorruptBlock(f"{path}: columns end at {self._next}, expected {end}")
        if self._edges != columns.num_edges:
            raise CorruptBlock(f"{path}: {self._edges} edges, expected {columns.num_edges}")
        kept = np.concatenate(self._kept or [np.empty(0, np.int64)])
        if np.unique(kept).size != kept.size:
            raise CorruptBlock(f"{path}: an edge id occurs twice, expected each once")
        for array in () if self._is_copy else self._relation.features.values():
            if array.num_rows != columns.num_edges:
                raise CorruptBlock(
                    f"{self._store.path / array.path}: {array.num_rows} rows, expected "
                    f"{columns.num_edges}, one an edge"
                )
        self._report.pages += file.crcs.size
        self._report.edges += 0 if self._is_copy else self._edges

    def _check(self, number: int, block: GraphBlock, where: str) -> None:
        header = block.header
        if header.first_node != self._next or int(self._first_node[number]) != self._next:
            raise CorruptBlock(
                f"{where}: first column {header.first_node}, object index "
                f"{int(self._first_node[number])}, expected {self._next}"
            )
        if int(self._first_edge[number]) != self._edges:
            raise CorruptBlock(
                f"{where}: {int(self._first_edge[number])} edges before it, expected {self._edges}"
            )
        found = [s is not None for s in (block.edge_ids, block.weights, block.times)]
        if found != self._sections:
            raise CorruptBlock(
                f"{where}: edge ids, weights, times: found {found}, expected {self._sections}"
            )
        carried = min(self._owed, self._capacity)
        if header.num_carried != carried:
            raise CorruptBlock(f"{where}: {header.num_carried} carried edges, expected {carried}")
        self._owed -= carried
        degrees = block.degrees_here()
        offsets = block.offsets.astype(np.int64)
        total = int(degrees.sum()) + carried
        if (
            (degrees < 0).any()
            or total != header.num_edges
            or (offsets[0] != header.edges_start + carried)
        ):
            raise CorruptBlock(f"{where}: offsets do not add up to {header.num_edges} edges")
        if header.num_nodes:
            self._owed = header.last_degree - int(degrees[-1])
            if self._owed < 0 or (self._owed and int(degrees[-1]) != self._capacity):
                raise CorruptBlock(
                    f"{where}: last column has {header.last_degree} edges, {degrees[-1]} of them "
                    "here"
                )
        self._check_sources(block, where)
        if block.edge_ids is not None and not self._is_copy:
            self._check_edge_ids(block.edge_ids, where)
        self._next += header.num_nodes
        self._edges += header.num_edges

    def _check_sources(self, block: GraphBlock, where: str) -> None:
        first, last = self._src.first, self._src.first + self._src.num_nodes
        ids = block.sources
        if ids.size and (int(ids.min()) < first or int(ids.max()) >= last):
            bad = int(np.flatnonzero((ids < first) | (ids >= last))[0])
            raise CorruptBlock(
                f"{where}, edge {bad}: source {ids[bad]}, expected {first} to {last - 1}"
            )

    def _check_edge_ids(self, edge_ids: NDArray[Any], where: str) -> None:
        """In range and, over the whole relation, each at most once: two bits for a source edge."""
        limit = 2 * self._relation.num_source_edges
        if edge_ids.size == 0:
            return
        if int(edge_ids.max()) >= limit:
            raise CorruptBlock(
                f"{where}: edge id {int(edge_ids.max())}, expected less than {limit}"
            )
        ids = edge_ids.astype(np.int64)
        if self._kept is not None:
            self._kept.append(ids)
            return
        byte, bit = ids >> 3, (1 << (ids & 7)).astype(np.uint8)
        if (self._seen[byte] & bit).any() or np.unique(ids).size != ids.size:
            raise CorruptBlock(f"{where}: an edge id occurs twice, expected each once")
        np.bitwise_or.at(self._seen, byte, bit)
