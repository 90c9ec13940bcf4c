"""From descriptors to arrays: copies a batch's structure and gathers its rows out of the arena."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.rows import expand_counts, gather_rows, scatter_rows
from clients.connection.buffers import Memory
from clients.connection.session import Session
from loaderd.errors import BadMessage
from loaderd.protocol import BatchReady, Blob, BlobArray, RowArraySpec, RowGroup

NUMPY_DTYPE = {"bfloat16": "uint16"}  # store dtypes that numpy does not know
SPLIT_BYTES = 4 << 20  # rows of fewer bytes are gathered on the calling thread alone


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


class BatchReader:
    """Reads the batches of one session."""

    def __init__(self, session: Session, pool: Memory, threads: int = 1) -> None:
        self._session = session
        self._pool = pool
        self._threads = threads
        self._helpers: ThreadPoolExecutor | None = None

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

    def close(self) -> None:
        """End the helper threads, if there are any."""
        if self._helpers is not None:
            self._helpers.shutdown()

    def _views(self, blob: Blob, array: BlobArray) -> Iterator[tuple[int, NDArray[Any]]]:
        return self._session.views(blob, array)

    def _copy(self, blob: Blob, array: BlobArray, out: NDArray[Any]) -> NDArray[Any]:
        for start, view in self._views(blob, array):
            out[start : start + view.size] = view
        return out

    def _wide(self, blob: Blob, array: BlobArray) -> NDArray[np.int64]:
        return self._copy(blob, array, self._pool.empty((array.length,), np.int64))

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

    def _narrow(self, blob: Blob, array: BlobArray) -> NDArray[Any]:
        """In its own dtype; in place where it lies in one piece."""
        pieces = list(self._views(blob, array))
        if len(pieces) == 1:
            return pieces[0][1]
        return self._copy(blob, array, np.empty(array.length, array.dtype))

    def _announce(self, ready: BatchReady, num_rows: Sequence[int]) -> None:
        """Say what comes, before room is asked for; `num_rows` of each row array."""
        specs, arena = self._session.attached.rows, self._session.attachment.data
        in_place = ready.rows.last and arena.size > 0
        self._pool.received(arena, list(zip(specs, num_rows, strict=True)) if in_place else [])

    def _room(self, spec: RowArraySpec, num_rows: int) -> NDArray[Any]:
        shape = (num_rows, *spec.row_shape)
        return self._pool.rows(spec, shape, NUMPY_DTYPE.get(spec.dtype, spec.dtype))

    def _release(self, group: RowGroup) -> None:
        """Give a row group back once it is copied, unless its run has ended by then."""
        session, run = self._session, self._session.run

        def release() -> None:
            if session.run == run and not session.lost:
                session.release(group.step, group.group)

        self._pool.after(release)

    def _land(
        self,
        spec: RowArraySpec,
        blob: Blob,
        array: BlobArray,
        positions: NDArray[np.uint32] | None,
        out: NDArray[np.uint8],
    ) -> None:
        """Rows that came along, to their places."""
        width = spec.row_bytes
        for start, data in self._views(blob, array):
            if positions is None:
                out[start : start + data.size] = data
                continue
            if start % width or data.size % width:
                raise BadMessage(f"a piece of {array.name} ends within a row")
            num, places = data.size // width, positions[start // width :]
            here = np.arange(0, data.size, width, dtype=np.uint64)
            scatter_rows(data, here, places, 0, num, width, out)

    def _gather_piece(
        self,
        spec: RowArraySpec,
        addresses: NDArray[np.uint64],
        first: int,
        positions: NDArray[np.uint32] | None,
        out: NDArray[np.uint8],
    ) -> None:
        """Rows `first`, `first + 1`, ... of a group, on as many threads as they are worth."""
        arena = self._session.attachment.data
        if self._pool.gathers(out, first, addresses):
            return

        def gather(start: int, stop: int) -> None:
            if positions is None:
                whole = out[first * spec.row_bytes :]
                gather_rows(arena, addresses, start, stop, spec.row_bytes, whole)
            else:
                places = positions[first:]
                scatter_rows(arena, addresses, places, start, stop, spec.row_bytes, out)

        num = addresses.size
        if self._threads == 1 or num * spec.row_bytes < SPLIT_BYTES:
            gather(0, num)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._threads - 1, "gather")
        cuts = [num * i // self._threads for i in range(self._threads + 1)]
        helped = [
            self._helpers.submit(gather, start, stop)
            for start, stop in itertools.pairwise(cuts[1:])
        ]
        gather(0, cuts[1])
        for future in helped:
            future.result()
