"""From descriptors to arrays, where a store has one node type and one relation."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.rows import expand_counts
from clients.gather import ArenaReader
from loaderd.protocol import BatchReady, Blob, BlobArray, RowGroup


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """A batch in arrays of its own; nodes are local ids, seeds first."""

    epoch: int
    step: int
    num_seeds: int
    n_id: NDArray[np.int64]  # (num_nodes,) original ids
    input_id: NDArray[np.int64]  # (num_seeds,) places among the given seeds
    edge_index: NDArray[np.int64]  # (2, num_edges): sources, targets
    e_id: NDArray[np.int64] | None  # (num_edges,) where asked for
    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[int, ...]
    rows: dict[str, NDArray[Any]]  # by name: (num_nodes or num_edges, *row_shape); bfloat16
    # as uint16
    ends: NDArray[np.int64] | None = None  # local ends of seed edges and negatives
    trees: NDArray[np.int64] | None = None  # (num_nodes,) where edges are sampled up to a time
    times: NDArray[np.int64] | None = None  # (num_seeds,) likewise


class BatchReader(ArenaReader):
    """Reads the batches of one session."""

    def read(self, step: int) -> BatchArrays:
        """The batch of `step`, all of it copied and released; waits for the daemon."""
        ready = self._session.receive_batch(step)
        blob = ready.structure
        named = {array.name: array for array in blob.arrays}
        num_nodes = sum(ready.nodes_per_hop)
        counts = (num_nodes, named["src"].length)
        specs = self._session.attached.rows
        self._announce(ready, [counts[bool(spec.relation)] for spec in specs])
        batch = BatchArrays(
            epoch=ready.epoch,
            step=step,
            num_seeds=ready.num_seeds,
            n_id=self._wide(blob, named["n_id"]),
            input_id=self._wide(blob, named["input_id"]),
            edge_index=self._edges(ready, blob, named),
            e_id=self._wide(blob, named["e_id"]) if "e_id" in named else None,
            nodes_per_hop=ready.nodes_per_hop,
            edges_per_hop=tuple(sum(edges) for edges in ready.edges_per_hop),
            rows={spec.name: self._room(spec, counts[bool(spec.relation)]) for spec in specs},
            **{
                name: self._wide(blob, named[name])
                for name in ("ends", "trees", "times")
                if name in named
            },
        )
        group, gather = ready.rows, self._gather
        if self._session.attached.resolved.edge_features:
            gather = partial(self._gather_items, num_nodes)
        gather(group, batch.rows)
        while not group.last:
            group = self._session.receive_rows(step, group.group + 1)
            gather(group, batch.rows)
        return batch

    def _edges(
        self, ready: BatchReady, blob: Blob, named: dict[str, BlobArray]
    ) -> NDArray[np.int64]:
        """Sources are stored; targets follow from the counts, in the same order."""
        layers = self._session.attached.resolved.frontier == "layer"
        edge_index = self._pool.empty((2, named["src"].length), np.int64)
        self._copy(blob, named["src"], edge_index[0])
        firsts = itertools.accumulate(ready.nodes_per_hop, initial=0)
        edge = 0
        for hop, (first, edges) in enumerate(zip(firsts, ready.edges_per_hop, strict=False)):
            for relation, num_edges in enumerate(edges):
                array = named[f"counts:{hop}:{relation}"]
                counts = self._copy(blob, array, np.empty(array.length, np.uint32))
                expand_counts(
                    counts, 0 if layers else first, edge_index[1, edge : edge + num_edges]
                )
                edge += num_edges
        return edge_index

    def _gather(self, group: RowGroup, rows: dict[str, NDArray[Any]]) -> None:
        """Copy one row group to its places, then release it."""
        named = {array.name: array for array in group.blob.arrays}
        positions = None
        if array := named.get("positions"):
            positions = self._copy(group.blob, array, np.empty(array.length, np.uint32))
        for spec in self._session.attached.rows:
            out = rows[spec.name].reshape(-1).view(np.uint8)
            if came := named.get(f"rows:{spec.name}"):
                self._land(spec, group.blob, came, positions, out)
                continue
            for start, addresses in self._views(group.blob, named[f"address:{spec.name}"]):
                self._gather_piece(spec, addresses, start, positions, out)
        self._release(group)

    def _gather_items(self, num_nodes: int, group: RowGroup, rows: dict[str, NDArray[Any]]) -> None:
        """The same where edges have rows: a group's items are nodes, or edges numbered on."""
        named = {array.name: array for array in group.blob.arrays}
        positions = self._narrow(group.blob, named["positions"]) if "positions" in named else None
        for spec in self._session.attached.rows:
            out, to, mine = rows[spec.name].reshape(-1).view(np.uint8), None, None
            if positions is not None:
                mine = (positions >= num_nodes) == bool(spec.relation)
                to = positions[mine] - np.uint32(num_nodes * bool(spec.relation))
            if came := named.get(f"rows:{spec.name}"):
                self._land(spec, group.blob, came, to, out)
                continue
            addresses = self._narrow(group.blob, named[f"address:{spec.name}"])
            if mine is None:
                picked = addresses[num_nodes:] if spec.relation else addresses[:num_nodes]
            else:
                picked = addresses[mine]
            self._gather_piece(spec, picked, 0, to, out)
        self._release(group)
