"""Read edges of a relation by whole columns, and find the nodes that have any."""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import (
    BLOCK_HEADER,
    PAGE_BYTES,
    BlockHeader,
    NodeType,
    align,
    edges_start_bytes,
)
from blockstore.format import Relation as StoredRelation
from blockstore.io.buffers import aligned_buffer
from blockstore.io.files import OpenFiles
from blockstore.store import Store, read_verified
from clients.inference.model import Relation, by_relation
from clients.inference.rows import SCAN_BYTES, STEP_ROWS
from preprocess.files.ahead import read_ahead
from preprocess.files.store import stored_columns
from preprocess.kernels.hops import HEAVY
from preprocess.sources.source import REVERSE

_STEP_EDGES = 1 << 18
_MAX = 0.9  # share of all nodes above which skipping the rest would save too little


class Nodes(NamedTuple):
    """A subset of the nodes of a type, numbered in order."""

    num_rows: int  # one per node of the subset
    places: NDArray[np.int32] | None = None  # (nodes,): row of each, -1: none; None: all nodes

    @classmethod
    def of(cls, found: NDArray[np.bool_]) -> "Nodes":
        """The found nodes; all nodes if nearly all, or none, were found."""
        count = int(np.count_nonzero(found))
        if not 0 < count <= _MAX * found.size or found.size > np.iinfo(np.int32).max:
            return cls(found.size)
        places = np.cumsum(found, dtype=np.int32)
        places -= 1
        places[~found] = -1
        return cls(count, places)

    def among(self, first: int, stop: int) -> Any:
        """An index into rows of the nodes [first, stop) that selects the nodes of the subset."""
        return slice(None) if self.places is None else self.places[first:stop] >= 0

    def how_many(self, first: int, stop: int) -> int:
        if self.places is None:
            return stop - first
        return int(np.count_nonzero(self.among(first, stop)))

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each node.  Raises CorruptBlock: a node is not in the subset."""
        if self.places is None:
            return ids
        found = self.places[ids].astype(np.int64)
        if found.size and found.min() < 0:
            raise CorruptBlock(
                f"node {ids[found.argmin()]} has an edge whose reverse is not there, expected all "
                "reverses in a store that was ingested with --undirected; ingest again"
            )
        return found


class Connected(NamedTuple):
    """Nodes that have edges: all others send nothing to neighbors, or receive nothing."""

    receives: Mapping[str, Nodes]  # by type: targets of edges of any relation
    gives: Mapping[Relation, Nodes]  # sources of edges; all nodes if the store has no reverses
    reverses: Mapping[Relation, Relation]  # same edges by source; {} unless all have one
    shares: Mapping[Relation, NDArray[Any]]  # 1 / in-edges of each node that receives; if asked for
    heavy: Mapping[Relation, NDArray[np.int64]]  # rows with more than HEAVY of these; likewise

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays; one that two relations share counts once."""
        held: list[NDArray[Any] | None] = [
            *(nodes.places for nodes in (*self.receives.values(), *self.gives.values())),
            *self.shares.values(),
            *self.heavy.values(),
        ]
        return sum({id(p): p.nbytes for p in held if p is not None}.values())


def find_connected(store: Store, dtype: Any = None) -> Connected:
    """Find connected nodes from the degrees in each block, without reading edges.

    dtype   of `shares`; None: do not compute them

    Raises CorruptBlock.
    """
    manifest = store.manifest
    receives: dict[str, Nodes] = {}
    shares: dict[Relation, NDArray[Any]] = {}
    heavy: dict[Relation, NDArray[np.int64]] = {}
    relations = by_relation(manifest)
    for t in manifest.types:
        found, degrees = np.zeros(t.num_nodes, np.bool_), {}
        for name, relation in relations.items():
            if relation.dst != t.name:
                continue
            counts = _count_edges(store, relation, t)
            found |= counts > 0
            if dtype is not None:
                degrees[name] = counts
        nodes = receives[t.name] = Nodes.of(found)
        for r, counts in degrees.items():
            counts = counts[nodes.among(0, t.num_nodes)]
            heavy[r] = np.flatnonzero(counts > HEAVY)
            shares[r] = 1 / np.maximum(counts, 1).astype(dtype)
    sizes = {t.name: t.num_nodes for t in manifest.types}
    reverses = {r: _reverse_of(r, relations) for r in relations} if manifest.undirected else {}
    gives = {r: receives[r[0]] if r in reverses else Nodes(sizes[r[0]]) for r in relations}
    return Connected(receives, gives, reverses, shares, heavy)


def _reverse_of(relation: Relation, relations: Collection[Relation]) -> Relation:
    """The relation with the same edges, reversed, in a store that was ingested with --undirected.

    For a relation between two types it has "rev_" before its name; a relation within one type
    contains both directions itself.
    """
    src, name, dst = relation
    if src == dst:
        return relation
    added = dst, REVERSE + name, src
    return added if added in relations else (dst, name.removeprefix(REVERSE), src)


def _count_edges(store: Store, relation: StoredRelation, t: NodeType) -> NDArray[np.uint32]:
    """Number of edges into each node; reads only the pages that hold degrees."""
    out = np.zeros(t.num_nodes, np.uint32)
    file = store.graph(relation)
    first_node = store.first_node(relation).astype(np.int64) - t.first
    buffer = aligned_buffer(file.geometry.slot_bytes)
    with OpenFiles() as opened:
        for block in range(relation.num_blocks):
            low, high = first_node[block : block + 2].tolist()
            head = buffer[: align(edges_start_bytes(high - low), PAGE_BYTES)]
            first = block * file.geometry.slot_bytes
            # a block is never divided
            ((path, at, _, _),) = file.ranges(first, first + head.size)
            page = block * file.geometry.pages_per_block
            crcs = file.crcs[page : page + head.size // PAGE_BYTES]
            read_verified(opened.fd(path), head, at, crcs, str(path))
            header = BlockHeader.unpack(head[: BLOCK_HEADER.size].tobytes(), f"{path}+{at}")
            offsets = head[BLOCK_HEADER.size :].view(np.uint32)[: high - low + 1]
            out[low:high] = offsets[1:] - offsets[:-1]
            if high > low:  # the last column may continue in further blocks
                out[high - 1] = header.last_degree
    return out


def whole_columns(
    store: Store, relation: StoredRelation, source: NodeType, scan_bytes: int = SCAN_BYTES
) -> Generator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(degrees, sources) of all columns of a relation in order, some whole columns at a time.

    `sources` count from the first node of their type.  No piece crosses a multiple of STEP_ROWS.
    Read and unpacked by another thread; valid until the next piece.  Raises CorruptBlock.
    """
    dst = next(t for t in store.manifest.types if t.name == relation.dst)
    first, last = source.first, source.first + source.num_nodes - 1
    done = 0  # columns yielded so far
    degrees, sources = np.empty(0, np.int64), np.empty(0, np.uint32)
    with closing(read_ahead(stored_columns(store, relation, scan_bytes))) as pieces:
        for head, more, edges in pieces:
            goes_on = int(head[1]) > 0
            assert goes_on or int(head[0]) - dst.first == done + degrees.size
            if goes_on:
                degrees[-1] += more[0]
            degrees = np.concatenate([degrees, more[1:] if goes_on else more])
            if edges.size and not first <= int(edges.min()) <= int(edges.max()) <= last:
                raise CorruptBlock(
                    f"{store.path / relation.path}: sources {edges.min()} to {edges.max()}, "
                    f"expected {first} to {last}; ingest again"
                )
            sources = np.concatenate([sources, edges])
            whole = max(0, degrees.size - 1)  # the last may continue in the next piece
            yield from _some_columns(degrees[:whole], sources, done, first)
            done, at = done + whole, int(degrees[:whole].sum())
            degrees, sources = degrees[whole:].copy(), sources[at:].copy()
    missing = np.zeros(dst.num_nodes - done - degrees.size, np.int64)
    yield from _some_columns(np.concatenate([degrees, missing]), sources, done, first)


def _some_columns(
    degrees: NDArray[np.int64], sources: NDArray[Any], number: int, first: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(degrees, sources) of some columns at a time, from column `number` on.

    first   that sources count from
    """
    ends, low, at = np.cumsum(degrees), 0, 0
    while low < degrees.size:
        high = int(np.searchsorted(ends, at + _STEP_EDGES, "right"))
        high = min(max(high, low + 1), low + STEP_ROWS - (number + low) % STEP_ROWS, degrees.size)
        stop = int(ends[high - 1])
        ids = sources[at:stop].astype(np.int64)
        ids -= first
        yield degrees[low:high], ids
        low, at = high, stop
