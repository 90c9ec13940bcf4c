"""Turn a daemon's descriptors into the trainer's own tensors: copy arrays, gather rows by address.

A batch of one node type and one relation is handled as one of several types that has one of each:
its nodes come ordered by type already, and nothing is reordered.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.format import RowArray
from blockstore.kernels.rows import expand_counts, gather_rows, scatter_rows
from blockstore.kernels.typed import order_by_type, place_edges, type_new_nodes
from clients.connection.buffers import Memory
from clients.connection.session import Session
from clients.records import to_tensor
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import BadMessage
from loaderd.api.protocol import BatchReady, Blob, BlobArray, RowGroup

SPLIT_BYTES = 4 << 20  # rows of fewer bytes are gathered on the calling thread alone

Named = dict[str, BlobArray]  # arrays of a blob by name
Views = dict[str, NDArray[Any]]


class ItemOrder(NamedTuple):
    """The place of each node of a batch, and of each edge with rows, among the items of its type.

    Relations count as further types, after the node types.
    """

    starts: Sequence[int]  # (types + 1,) first item of each type
    kind: Any = None  # (items,) type, integers; None: items come type by type already
    order: Any = None  # uint32 (items,) places in the batch, type by type; None likewise
    place: Any = None  # int64 (items,) among those of the type; None likewise
    some: bool = False  # a message with rows also brings rows of items of no wanted type

    def count(self, kind: int) -> int:
        return self.starts[kind + 1] - self.starts[kind]

    def pick(
        self, kind: int, positions: NDArray[np.uint32] | None
    ) -> tuple[Any, NDArray[np.uint32] | None]:
        """The items of a row group that have a type, as an index, and their places within the type.

        positions   places in the batch of the group's items; None: all of them, in order
        """
        low, high = self.starts[kind], self.starts[kind + 1]
        if positions is None:
            return slice(low, high) if self.order is None else self.order[low:high], None
        if self.kind is None:
            mine = (positions >= low) & (positions < high)
            return mine, positions[mine] - np.uint32(low)
        mine = self.kind[positions] == kind
        return mine, self.place[positions[mine]].astype(np.uint32)


def numpy_dtype(array: RowArraySpec | RowArray) -> str:
    """The dtype in which NumPy, which does not know bfloat16, holds an array's rows."""
    return "uint16" if array.dtype == "bfloat16" else array.dtype


class ArenaReader:
    """Base class of the readers of a session's batches, whatever batches they make."""

    def __init__(self, session: Session, pool: Memory, threads: int = 1) -> None:
        self._session = session
        self._pool = pool
        self._threads = threads
        self._helpers: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the helper threads, if there are any."""
        if self._helpers is not None:
            self._helpers.shutdown()

    def _copy(self, blob: Blob, array: BlobArray, out: NDArray[Any]) -> NDArray[Any]:
        for start, view in self._session.views(blob, array):
            out[start : start + view.size] = view
        return out

    def _wide(self, blob: Blob, array: BlobArray) -> NDArray[np.int64]:
        return self._copy(blob, array, self._pool.empty((array.length,), np.int64))

    def _narrow(self, blob: Blob, array: BlobArray) -> NDArray[Any]:
        """An array in its own dtype; a view of the arena if it lies in one piece."""
        pieces = list(self._session.views(blob, array))
        return pieces[0][1] if len(pieces) == 1 else self._writable(blob, array)

    def _writable(self, blob: Blob, array: BlobArray) -> NDArray[Any]:
        """A copy for a kernel: numba takes long to tell the type of a read-only array."""
        return self._copy(blob, array, np.empty(array.length, array.dtype))

    def _announce(self, ready: BatchReady, num_rows: Sequence[int]) -> None:
        """Tell the memory which rows come, `num_rows` of each array, before asking it for room."""
        specs, arena = self._session.attached.rows, self._session.attachment.data
        in_place = ready.rows.last and arena.size > 0
        self._pool.received(arena, list(zip(specs, num_rows, strict=True)) if in_place else [])

    def _rooms(self, pool: Memory, counts: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Allocate an array in `pool` for `counts` rows of each row array."""
        return {
            spec.name: pool.rows(spec, (count, *spec.row_shape), numpy_dtype(spec))
            for spec, count in zip(self._session.attached.rows, counts, strict=True)
        }

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
        taken: NDArray[Any] | None = None,
    ) -> None:
        """Copy rows that came with the message to their places.

        taken   the wanted rows: a mask, or indices in the order of their places; None: all
        """
        width = spec.row_bytes
        if taken is not None and taken.dtype == np.bool_:
            taken = np.flatnonzero(taken)
        elif taken is not None:
            order = np.argsort(taken, kind="stable")
            taken, positions = taken[order], order.astype(np.uint32)
        for start, data in self._session.views(blob, array):
            if positions is None and taken is None:
                out[start : start + data.size] = data
                continue
            if start % width or data.size % width:
                raise BadMessage(f"a piece of {array.name} ends within a row")
            low, high = start // width, (start + data.size) // width
            here = np.arange(low, high)
            if taken is not None:
                low, high = np.searchsorted(taken, (low, high)).tolist()
                here = taken[low:high]
            places = np.arange(low, high, dtype=np.uint32)
            if positions is not None:
                places = positions[low:high]
            at = (here * width - start).astype(np.uint64)
            scatter_rows(data, at, places, 0, at.size, width, out)

    def _gather_piece(
        self,
        spec: RowArraySpec,
        addresses: NDArray[np.uint64],
        first: int,
        positions: NDArray[np.uint32] | None,
        out: NDArray[np.uint8],
    ) -> None:
        """Gather rows `first`, `first + 1`, ... of a group, on several threads if it is large."""
        arena = self._session.attachment.data
        if self._pool.gathers(out, first, addresses):
            self._session.hold()  # a device still reads the arena after this batch was handed out
            return

        def gather(start: int, stop: int) -> None:
            if positions is None:
                whole = out[first * spec.row_bytes :]
                gather_rows(arena, addresses, start, stop, spec.row_bytes, whole)
            else:
                places = positions[first:]
                scatter_rows(arena, addresses, places, start, stop, spec.row_bytes, out)

        self._split(gather, addresses.size, addresses.size * spec.row_bytes)

    def _split(self, work: Callable[[int, int], None], rows: int, num_bytes: int) -> None:
        """Do `work` for ranges [start, stop) of `rows`, on several threads if they are large."""
        if self._threads == 1 or num_bytes < SPLIT_BYTES:
            work(0, rows)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._threads - 1, "gather")
        cuts = [rows * i // self._threads for i in range(self._threads + 1)]
        helped = [self._helpers.submit(work, a, b) for a, b in itertools.pairwise(cuts[1:])]
        work(0, cuts[1])
        for future in helped:
            future.result()


class BatchReader(ArenaReader):
    """Reads the sampled batches of one session, of any number of node types and relations.

    A batch is a dict of the fields of a `clients.torch.HeteroBatch`, and of those of the following
    that the daemon sends:

    ends        int64: local ends of seed edges and negatives, within their types
    seed_rank   int64 (seeds of all ranks,): which rank trains each, with home placement
    store_id    by type, int64 (nodes,), of plan "partitions"
    """

    def __init__(self, session: Session, pool: Memory, threads: int = 1) -> None:
        super().__init__(session, pool, threads)
        attached = session.attached
        self._single = len(attached.types) == len(attached.relations) == 1
        self._type_of = {name: i for i, name in enumerate(attached.types)}
        self._names = {"__".join(relation): i for i, relation in enumerate(attached.relations)}
        self._src_types = [self._type_of[src] for src, _, _ in attached.relations]
        only = attached.types[0] if len(attached.types) == 1 else ""
        self._row_types = [
            len(self._type_of) + self._names[spec.relation]
            if spec.relation
            else self._type_of[spec.node_type or only]
            for spec in attached.rows
        ]

    def read(self, step: int) -> dict[str, Any]:
        """The batch of `step`, all of it copied and released; waits for the daemon."""
        ready = self._session.receive(BatchReady, step)
        named = {array.name: array for array in ready.structure.arrays}
        wanted = () if self._single else ("src", "ends")  # what the order of the nodes depends on
        views = {n: self._narrow(ready.structure, named[n]) for n in wanted if n in named}
        nodes = self._order_nodes(ready, views)
        items = self._wanted(ready, nodes)
        counts = [items.count(t) for t in self._row_types]
        self._announce(ready, counts)
        rows = self._rooms(self._pool, counts)
        batch = self._structure(ready, named, nodes, views)
        self._gather_groups(ready, items, rows)
        return batch | self._row_fields(rows)

    def _wanted(self, ready: BatchReady, nodes: ItemOrder) -> ItemOrder:
        """The items whose rows are wanted: the nodes, and the edges if asked for."""
        if not self._session.attached.resolved.edge_features:
            return nodes
        return _with_edges(nodes, ready, self._edge_starts(ready)[1])

    def _edge_starts(self, ready: BatchReady) -> tuple[list[list[int]], list[int]]:
        """Numbers of edges of each relation by hop, and its first edge among all."""
        relations = range(len(self._session.attached.relations))
        per_hop = [[hop[r] for hop in ready.edges_per_hop] for r in relations]
        return per_hop, [0, *itertools.accumulate(sum(edges) for edges in per_hop)]

    def _structure(
        self, ready: BatchReady, named: Named, nodes: ItemOrder, views: Views
    ) -> dict[str, Any]:
        """All fields of a batch but its rows."""
        attached, blob = self._session.attached, ready.structure
        types, relations, info = attached.types, attached.relations, attached.relation_info
        edges_per_hop, starts = self._edge_starts(ready)

        def by_type(name: str) -> dict[str, Tensor]:
            values = self._by_type(blob, named[name], nodes)
            return dict(zip(types, _pieces(values, nodes.starts), strict=True))

        def by_relation(name: str, dtype: type, held: Sequence[bool]) -> Any:
            """Values of the relations that have any; None: they were not asked for."""
            if name not in named:
                return None
            pieces = _pieces(self._of_edges(ready, named[name], starts, dtype), starts)
            own = zip(relations, pieces, held, strict=True)
            return {relation: piece for relation, piece, there in own if there}

        def whole(name: str) -> Tensor:
            return torch.from_numpy(self._wide(blob, named[name]))

        edges = self._edges(ready, named, starts, nodes, views)
        ends = _pieces(edges, [2 * start for start in starts])
        found = {
            "edge_index": {
                r: e.view(2, e.numel() // 2) for r, e in zip(relations, ends, strict=True)
            },
            "n_id": by_type("n_id"),
            "e_id": by_relation("e_id", np.int64, [True] * len(relations)),
            "input_type": attached.resolved.seed_type,
            "input_id": whole("input_id"),
            "batch_size": ready.num_seeds,
            "num_sampled_nodes": dict(zip(types, self._nodes_per_hop(ready, nodes), strict=True)),
            "num_sampled_edges": dict(zip(relations, edges_per_hop, strict=True)),
            "epoch": ready.epoch,
            "step": ready.step,
            "frontier": attached.resolved.frontier,
            "batch": by_type("trees") if "trees" in named else None,
            "seed_time": whole("times") if "times" in named else None,
            "edge_weight": by_relation("edge_weight", np.float32, [r.weights for r in info]),
            "edge_time": by_relation("edge_time", np.int64, [r.times for r in info]),
        }
        if "ends" in named and self._single:
            found["ends"] = whole("ends")
        elif "ends" in named:
            found["ends"] = torch.from_numpy(nodes.place[views["ends"]])
        if "seed_rank" in named:
            found["seed_rank"] = whole("seed_rank")
        if "store_id" in named:
            found["store_id"] = by_type("store_id")
        return found

    def _row_fields(self, rows: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """The fields that hold rows, by array name; `rows` has bfloat16 as uint16."""
        attached = self._session.attached
        types, relations = attached.types, attached.relations
        several = len(types) > 1  # names of row arrays begin with their type then
        found: dict[str, Any] = {"x": {}, "y": {}, "features": {}, "edge_features": {}}
        for spec in attached.rows:
            node_type = spec.node_type if several else types[0]
            owner = spec.relation or (node_type if several else "")
            name = spec.name.removeprefix(f"{owner}.") if owner else spec.name
            tensor = to_tensor(rows[spec.name], spec.dtype, name == "y" and not spec.relation)
            if spec.relation:
                relation = relations[self._names[spec.relation]]
                found["edge_features"].setdefault(relation, {})[name] = tensor
            elif name in ("x", "y"):
                found[name][node_type] = tensor
            else:
                found["features"].setdefault(node_type, {})[name] = tensor
        return found

    def _order_nodes(self, ready: BatchReady, views: Views) -> ItemOrder:
        """Types of the nodes, from the edges: a relation finds new nodes of one type, in order."""
        num, num_types = sum(ready.nodes_per_hop), len(self._type_of)
        if self._single:
            return ItemOrder([0, num])
        kind = np.empty(num, np.uint8 if num_types <= 256 else np.uint16)
        known = ready.nodes_per_hop[0]
        resolved = self._session.attached.resolved
        if resolved.edges is None:
            kind[:known] = self._type_of[resolved.seed_type]
        else:
            ends = views["ends"]
            relation = self._session.attached.relations[self._names[resolved.edges.relation]]
            triplets = resolved.edges.negatives == "triplet"
            cut = ready.num_seeds if triplets else ends.size // 2
            kind[ends[:cut]] = self._type_of[relation[0]]
            kind[ends[cut:]] = self._type_of[relation[2]]
        edge = 0
        for counts in ready.edges_per_hop:
            for src_type, count in zip(self._src_types, counts, strict=True):
                if count:
                    known = type_new_nodes(views["src"], edge, edge + count, src_type, known, kind)
                    edge += count
        assert known == num
        starts = np.empty(num_types + 1, np.int64)
        order, place = np.empty(num, np.uint32), np.empty(num, np.int64)
        order_by_type(kind, starts, order, place)
        return ItemOrder(starts.tolist(), kind, order, place)

    def _by_type(self, blob: Blob, array: BlobArray, nodes: ItemOrder) -> NDArray[np.int64]:
        """Values of the nodes, type by type."""
        if nodes.order is None:
            return self._wide(blob, array)
        out = self._pool.empty((array.length,), np.int64)
        out[:] = self._narrow(blob, array)[nodes.order]
        return out

    def _nodes_per_hop(self, ready: BatchReady, nodes: ItemOrder) -> list[list[int]]:
        if nodes.kind is None:
            return [list(ready.nodes_per_hop)]
        ends = itertools.accumulate(ready.nodes_per_hop, initial=0)
        counts = [
            np.bincount(nodes.kind[low:high], minlength=len(self._type_of))
            for low, high in itertools.pairwise(ends)
        ]
        found: list[list[int]] = np.stack(counts, axis=1).tolist()
        return found

    def _edges(
        self,
        ready: BatchReady,
        named: Named,
        starts: Sequence[int],
        nodes: ItemOrder,
        views: Views,
    ) -> NDArray[np.int64]:
        """The (2, edges) of each relation, one after the other, hop by hop within each.

        Sources are stored; targets follow from the counts, in the same order.
        """
        layers = self._session.attached.resolved.frontier == "layer"
        edges = self._pool.empty((2 * starts[-1],), np.int64)
        if self._single:
            self._copy(ready.structure, named["src"], edges[: starts[-1]])
        used = [2 * start for start in starts[:-1]]
        edge = first = 0
        for hop, counts in enumerate(ready.edges_per_hop):
            for r, count in enumerate(counts):
                if not count:
                    continue
                per_node = self._writable(ready.structure, named[f"counts:{hop}:{r}"])
                at, frontier = used[r], 0 if layers else first
                to = at + starts[r + 1] - starts[r]
                if self._single:
                    expand_counts(per_node, frontier, edges[to : to + count])
                else:
                    place_edges(
                        views["src"], edge, per_node, frontier, nodes.place,
                        edges[at : at + count], edges[to : to + count],
                    )  # fmt: skip
                used[r] += count
                edge += count
            first += ready.nodes_per_hop[hop]
        return edges

    def _of_edges(
        self, ready: BatchReady, array: BlobArray, starts: Sequence[int], dtype: type
    ) -> NDArray[Any]:
        """Values of the edges, relation by relation."""
        out: NDArray[Any] = self._pool.empty((array.length,), dtype)
        if self._single:
            return self._copy(ready.structure, array, out)
        found = self._narrow(ready.structure, array)
        used, edge = list(starts[:-1]), 0
        for counts in ready.edges_per_hop:
            for r, count in enumerate(counts):
                out[used[r] : used[r] + count] = found[edge : edge + count]
                used[r] += count
                edge += count
        return out

    def _gather_groups(
        self, ready: BatchReady, items: ItemOrder, rows: dict[str, NDArray[Any]]
    ) -> None:
        """Copy all row groups of a batch, and release each; waits for those that follow."""
        group = ready.rows
        self._gather(group, items, rows)
        while not group.last:
            group = self._session.receive(RowGroup, ready.step, group.group + 1)
            self._gather(group, items, rows)

    def _gather(self, group: RowGroup, items: ItemOrder, rows: dict[str, NDArray[Any]]) -> None:
        """Copy one row group to its places, then release it."""
        blob = group.blob
        whole = len(items.starts) == 2 and not items.some  # all items are of one type
        named = {array.name: array for array in blob.arrays}
        positions = None
        if array := named.get("positions"):
            positions = self._writable(blob, array) if whole else self._narrow(blob, array)
        for spec, t in zip(self._session.attached.rows, self._row_types, strict=True):
            out = rows[spec.name].reshape(-1).view(np.uint8)
            mine, to = (None, positions) if whole else items.pick(t, positions)
            if came := named.get(f"rows:{spec.name}"):
                self._land(spec, blob, came, to, out, mine if items.some else None)
                continue
            addresses = named[f"address:{spec.name}"]
            pieces = self._session.views(blob, addresses)
            if not whole:
                pieces = iter([(0, self._narrow(blob, addresses)[mine])])
            for start, piece in pieces:
                self._gather_piece(spec, piece, start, to, out)
        self._release(group)


def _pieces(values: NDArray[Any], starts: Sequence[int]) -> list[Tensor]:
    """Tensors over `values`, one for each type or relation."""
    whole = torch.from_numpy(values)
    if len(starts) == 2:
        return [whole]
    return [whole[start:stop] for start, stop in itertools.pairwise(starts)]


def _with_edges(nodes: ItemOrder, ready: BatchReady, starts: Sequence[int]) -> ItemOrder:
    """Number edges after the nodes: relations are types that follow those of the nodes.

    starts   (relations + 1,) first edge of each relation among all
    """
    num_nodes, num_types = nodes.starts[-1], len(nodes.starts) - 1
    bounds = [*nodes.starts, *(num_nodes + start for start in starts[1:])]
    if nodes.kind is None:
        return ItemOrder(bounds)
    per_hop = np.array(ready.edges_per_hop, np.int64).reshape(-1, len(starts) - 1)
    kind = np.repeat(np.tile(np.arange(len(starts) - 1), len(per_hop)), per_hop.reshape(-1))
    order = np.argsort(kind, kind="stable")  # hop by hop within a relation
    place = np.empty(kind.size, np.int64)
    place[order] = np.arange(kind.size)
    place -= np.array(starts)[kind]
    return ItemOrder(
        bounds,
        np.concatenate([nodes.kind.astype(np.int64), num_types + kind]),
        np.concatenate([nodes.order, (num_nodes + order).astype(np.uint32)]),
        np.concatenate([nodes.place, place]),
    )
