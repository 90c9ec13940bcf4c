"""From descriptors to arrays where a store has several node types or relations."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.typed import order_by_type, place_edges, type_new_nodes
from clients.connection.buffers import Memory
from clients.connection.session import Session
from clients.gather import ArenaReader
from loaderd.protocol import BatchReady, Blob, BlobArray, RowGroup


@dataclass(frozen=True, slots=True)
class HeteroArrays:
    """A batch in arrays of its own; nodes are local ids within their type, the seeds first.

    What belongs to a type, or to a relation, is a piece of an array that holds all of them.
    """

    epoch: int
    step: int
    num_seeds: int
    n_id: NDArray[np.int64]  # (num_nodes,) original ids, type by type
    node_starts: NDArray[np.int64]  # (num_types + 1,) first node of each type in `n_id`
    input_id: NDArray[np.int64]  # (num_seeds,) places among the given seeds
    edges: NDArray[np.int64]  # (2 * num_edges,): (2, edges) of each relation, sources, targets
    edge_starts: NDArray[np.int64]  # (num_relations + 1,) first edge of each relation
    e_id: NDArray[np.int64] | None  # (num_edges,), relation by relation, where asked for
    nodes_per_hop: NDArray[np.int64]  # (num_types, hops + 1)
    edges_per_hop: NDArray[np.int64]  # (num_relations, hops)
    rows: dict[str, NDArray[Any]]  # by name: (nodes of the type, or edges of the relation,
    # *row_shape); bfloat16 as uint16
    ends: NDArray[np.int64] | None = None  # local ends of seed edges and negatives, in their types
    trees: NDArray[np.int64] | None = None  # (num_nodes,) as `n_id`, where sampled up to a time
    times: NDArray[np.int64] | None = None  # (num_seeds,) likewise


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each node of a batch stands among those of its type."""

    kind: NDArray[Any]  # (num_nodes,) type
    starts: NDArray[np.int64]  # (num_types + 1,)
    order: NDArray[np.uint32]  # (num_nodes,) places in the batch, type by type
    place: NDArray[np.int64]  # (num_nodes,) among those of the type

    def nodes_of(self, node_type: int) -> NDArray[np.uint32]:
        """Places in the batch of the nodes of a type, ascending."""
        return self.order[self.starts[node_type] : self.starts[node_type + 1]]


class HeteroReader(ArenaReader):
    """Reads the batches of one session."""

    def __init__(self, session: Session, pool: Memory, threads: int = 1) -> None:
        super().__init__(session, pool, threads)
        attached = session.attached
        self._type_of = {name: i for i, name in enumerate(attached.types)}
        self._src_types = [self._type_of[src] for src, _, _ in attached.relations]
        relations = {"__".join(r): len(self._type_of) + i for i, r in enumerate(attached.relations)}
        self._row_types = [
            relations[spec.relation] if spec.relation else self._type_of[spec.node_type]
            for spec in attached.rows
        ]
        edges = attached.resolved.edges
        self._triplets = edges is not None and edges.negatives == "triplet"

    def read(self, step: int) -> HeteroArrays:
        """The batch of `step`, all of it copied and released; waits for the daemon."""
        ready = self._session.receive_batch(step)
        blob = ready.structure
        named = {array.name: array for array in blob.arrays}
        src = self._narrow(blob, named["src"])
        per_hop = np.array(ready.edges_per_hop, np.int64).reshape(-1, len(self._src_types))
        ends = self._narrow(blob, named["ends"]) if "ends" in named else None
        places = self._place(ready, src, per_hop, ends)
        edge_starts = np.concatenate([[0], np.cumsum(per_hop.sum(axis=0))])
        n_id = self._pool.empty((places.order.size,), np.int64)
        n_id[:] = self._narrow(blob, named["n_id"])[places.order]
        items = places
        if self._session.attached.resolved.edge_features:
            items = _with_edges(places, per_hop, edge_starts)
        self._announce(ready, [items.nodes_of(t).size for t in self._row_types])
        batch = HeteroArrays(
            epoch=ready.epoch,
            step=step,
            num_seeds=ready.num_seeds,
            n_id=n_id,
            node_starts=places.starts,
            input_id=self._wide(blob, named["input_id"]),
            edges=self._relations(ready, named, src, per_hop, edge_starts, places),
            edge_starts=edge_starts,
            e_id=self._e_id(blob, named, per_hop, edge_starts) if "e_id" in named else None,
            nodes_per_hop=self._count(ready, places),
            edges_per_hop=np.ascontiguousarray(per_hop.T),
            rows={
                spec.name: self._room(spec, items.nodes_of(t).size)
                for spec, t in zip(self._session.attached.rows, self._row_types, strict=True)
            },
            ends=None if ends is None else places.place[ends],
            trees=self._trees(blob, named, places) if "trees" in named else None,
            times=self._wide(blob, named["times"]) if "times" in named else None,
        )
        group = ready.rows
        self._gather_typed(group, items, batch.rows)
        while not group.last:
            group = self._session.receive_rows(step, group.group + 1)
            self._gather_typed(group, items, batch.rows)
        return batch

    def _trees(self, blob: Blob, named: dict[str, BlobArray], places: _Places) -> NDArray[np.int64]:
        trees = self._pool.empty((places.order.size,), np.int64)
        trees[:] = self._narrow(blob, named["trees"])[places.order]
        return trees

    def _place(
        self,
        ready: BatchReady,
        src: NDArray[Any],
        per_hop: NDArray[np.int64],
        ends: NDArray[Any] | None,
    ) -> _Places:
        """Types of the nodes: a relation finds nodes of one type, new ones in order.

        ends   places of the ends of seed edges and negatives, where seeds are edges
        """
        num_types = len(self._type_of)
        num = sum(ready.nodes_per_hop)
        kind = np.empty(num, np.uint8 if num_types <= 256 else np.uint16)
        known = ready.nodes_per_hop[0]
        if ends is None:
            kind[:known] = self._type_of[self._session.attached.resolved.seed_type]
        else:
            sources, targets = self._types_of_ends()
            cut = ready.num_seeds if self._triplets else ends.size // 2
            kind[ends[:cut]] = sources
            kind[ends[cut:]] = targets
        edge = 0
        for counts in per_hop.tolist():
            for src_type, count in zip(self._src_types, counts, strict=True):
                if count:
                    known = type_new_nodes(src, edge, edge + count, src_type, known, kind)
                    edge += count
        assert known == num
        places = _Places(
            kind, np.empty(num_types + 1, np.int64), np.empty(num, np.uint32),
            np.empty(num, np.int64),
        )  # fmt: skip
        order_by_type(kind, places.starts, places.order, places.place)
        return places

    def _types_of_ends(self) -> tuple[int, int]:
        attached = self._session.attached
        assert attached.resolved.edges is not None
        names = ["__".join(relation) for relation in attached.relations]
        src, _, dst = attached.relations[names.index(attached.resolved.edges.relation)]
        return self._type_of[src], self._type_of[dst]

    def _count(self, ready: BatchReady, places: _Places) -> NDArray[np.int64]:
        ends = [0, *itertools.accumulate(ready.nodes_per_hop)]
        return np.stack(
            [
                np.bincount(places.kind[low:high], minlength=len(self._type_of))
                for low, high in itertools.pairwise(ends)
            ],
            axis=1,
        )

    def _relations(
        self,
        ready: BatchReady,
        named: dict[str, BlobArray],
        src: NDArray[Any],
        per_hop: NDArray[np.int64],
        starts: NDArray[np.int64],
        places: _Places,
    ) -> NDArray[np.int64]:
        """(2, edges) of each relation, one behind the other, hop by hop within each."""
        layers = self._session.attached.resolved.frontier == "layer"
        edges = self._pool.empty((2 * int(starts[-1]),), np.int64)
        used = 2 * starts[:-1]
        totals = np.diff(starts)
        edge = first = 0
        for hop, counts in enumerate(per_hop.tolist()):
            for r, count in enumerate(counts):
                if not count:
                    continue
                per_node = self._narrow(ready.structure, named[f"counts:{hop}:{r}"])
                at = int(used[r])
                to = at + int(totals[r])
                place_edges(
                    src, edge, per_node, 0 if layers else first, places.place,
                    edges[at : at + count], edges[to : to + count],
                )  # fmt: skip
                used[r] += count
                edge += count
            first += ready.nodes_per_hop[hop]
        return edges

    def _e_id(
        self,
        blob: Blob,
        named: dict[str, BlobArray],
        per_hop: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        found = self._narrow(blob, named["e_id"])
        e_id = self._pool.empty((found.size,), np.int64)
        used, edge = starts[:-1].copy(), 0
        for counts in per_hop.tolist():
            for r, count in enumerate(counts):
                e_id[used[r] : used[r] + count] = found[edge : edge + count]
                used[r] += count
                edge += count
        return e_id

    def _gather_typed(
        self, group: RowGroup, places: _Places, rows: dict[str, NDArray[Any]]
    ) -> None:
        """Copy one row group to its places, then release it."""
        named = {array.name: array for array in group.blob.arrays}
        positions = self._narrow(group.blob, named["positions"]) if "positions" in named else None
        for spec, t in zip(self._session.attached.rows, self._row_types, strict=True):
            out = rows[spec.name].reshape(-1).view(np.uint8)
            if came := named.get(f"rows:{spec.name}"):
                self._land(spec, group.blob, came, self._mine(positions, places, t), out)
                continue
            addresses = self._narrow(group.blob, named[f"address:{spec.name}"])
            to = None
            if positions is None:
                picked = addresses[places.nodes_of(t)]
            else:
                mine = places.kind[positions] == t
                picked = addresses[mine]
                to = self._mine(positions, places, t)
            self._gather_piece(spec, picked, 0, to, out)
        self._release(group)

    def _mine(
        self, positions: NDArray[np.uint32] | None, places: _Places, node_type: int
    ) -> NDArray[np.uint32] | None:
        """Where a group's rows of a type go; None: it is the whole batch, in order."""
        if positions is None:
            return None
        mine: NDArray[np.uint32] = places.place[
            positions[places.kind[positions] == node_type]
        ].astype(np.uint32)
        return mine


def _with_edges(places: _Places, per_hop: NDArray[np.int64], starts: NDArray[np.int64]) -> _Places:
    """Edges numbered on behind the nodes: relations are types that follow those of the nodes.

    per_hop  int64 (hops, relations)
    starts   int64 (relations + 1,)   of each relation's edges among all
    """
    num_nodes, num_types = places.kind.size, places.starts.size - 1
    relations = np.arange(per_hop.shape[1])
    kind = np.repeat(np.tile(relations, len(per_hop)), per_hop.reshape(-1))
    order = np.argsort(kind, kind="stable")  # hop by hop within a relation
    place = np.empty(kind.size, np.int64)
    place[order] = np.arange(kind.size)
    place -= starts[kind]
    return _Places(
        np.concatenate([places.kind.astype(np.int64), num_types + kind]),
        np.concatenate([places.starts, num_nodes + starts[1:]]),
        np.concatenate([places.order, (num_nodes + order).astype(np.uint32)]),
        np.concatenate([places.place, place]),
    )
