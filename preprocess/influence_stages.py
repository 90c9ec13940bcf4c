"""The stages of hubs and halos: found in the blocks just written, then copied group by group.

Groups are the halo of each partition, then the hubs.  Two temporary files wait between stages: ids
of hubs, the most influential first, and ids of all halos, partition by partition.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import (
    Halo,
    HaloColumns,
    Influence,
    Kept,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    crc_path,
)
from blockstore.pack import GraphPacker
from blockstore.store import Store
from preprocess.arrays import write_in_order
from preprocess.contents import SPLITS
from preprocess.influence_plan import (
    HALOS,
    HUBS,
    KEPT,
    halo_paths,
    halo_relation_path,
    hubs_path,
    walk_room,
)
from preprocess.plan import node_bytes
from preprocess.run import Facts, Run
from preprocess.stages.array_file import load_array, save_array
from preprocess.stages.reach import measure_kept
from preprocess.stages.slots import SlotCopies
from preprocess.stages.stored_columns import scan_size
from preprocess.stages.walk import STEPS, LazyWalk, plan_lanes, training_marks
from preprocess.work import STORE

_HUBS, _HALOS = "hubs", "halos"  # temporary files


class InfluenceStages:
    """Hubs and halos of a store whose relations and types are there."""

    def __init__(self, run: Run, manifest: Manifest) -> None:
        self._run, self._manifest = run, manifest
        self._options = run.options.influence
        held = msgspec.structs.replace(manifest, files=run.writer.digests)
        self._store = Store(run.work.path / STORE, held)
        self._scan_bytes = scan_size(run.memory.share, manifest.block_bytes)
        self._num_parts = max(t.num_partitions for t in manifest.types)
        self._offsets = np.stack([self._store.partition_offsets(t) for t in manifest.types]).astype(
            np.int64
        )

    def write(self) -> Manifest:
        """All stages; the manifest with what they made."""
        run, counts = self._run, {}
        if self._options.finds_hubs:
            counts = run.stage(HUBS, self._find_hubs, made=[_HUBS])["counts"]
        starts = [0] * (self._num_parts + 1)
        if self._options.halo:
            starts = run.stage(HALOS, self._find_halos, made=[_HALOS])["starts"]
        types = tuple(self._write_type(t, starts, counts) for t in self._manifest.types)
        relations = tuple(self._write_relation(r, starts) for r in self._manifest.relations)
        made = [*([_HUBS] if self._options.finds_hubs else []),
                *([_HALOS] if self._options.halo else [])]  # fmt: skip
        facts = run.stage(KEPT, lambda: self._measure(starts), spent=made)
        influence = Influence(
            hub_score=facts["score"],
            steps=STEPS,
            num_hubs=facts["num_hubs"],
            halo=self._options.halo,
            num_slots=starts[-1],
            kept=tuple(msgspec.convert(facts["kept"], list[Kept])),
        )
        return msgspec.structs.replace(
            self._manifest, types=types, relations=relations, influence=influence
        )

    def _marks(self) -> NDArray[np.uint8]:
        return training_marks(self._store, self._manifest.types, SPLITS[0])

    def _hub_score(self, marks: NDArray[np.uint8]) -> str:
        return self._options.hub_score if marks.any() else "degree"

    def _find_hubs(self) -> Facts:
        run, options, marks = self._run, self._options, self._marks()
        walk = LazyWalk(self._store, self._scan_bytes, run.progress)
        if self._hub_score(marks) == "walk":
            scores = walk.scores(marks)
        else:
            if options.hub_score == "walk":
                run.progress.line("hubs: no training nodes to walk from, so by in-degree")
            scores = walk.in_degrees.astype(np.float64)
        if options.hub_bytes:
            hubs = self._within(scores, walk.in_degrees, options.hub_bytes)
        else:
            hubs = top_scores(scores, int(options.hub_share * scores.size + 0.5))
        save_array(run.path(_HUBS), hubs.astype(np.uint64))
        counts = {t.name: self._hubs_of(t).size for t in self._manifest.types}
        return {"counts": counts}

    def _within(
        self, scores: NDArray[np.float64], in_degrees: NDArray[np.uint32], limit: int
    ) -> NDArray[np.int64]:
        """As many nodes of the highest scores as `limit` bytes hold with their in-edges."""
        manifest = self._manifest
        edge = max(sum(r.item_bytes(manifest.id_dtype)) for r in manifest.relations)
        rows = [_row_bytes(t) for t in manifest.types]
        nodes = top_scores(scores, min(scores.size, limit // max(1, min(rows))))
        firsts = np.array([t.first for t in manifest.types])
        each = np.array(rows)[np.searchsorted(firsts, nodes, "right") - 1]
        ends = np.cumsum(each + 4 + edge * in_degrees[nodes].astype(np.int64))
        return nodes[: int(np.searchsorted(ends, limit, "right"))]

    def _find_halos(self) -> Facts:
        run, marks = self._run, self._marks()
        if not marks.any():
            run.progress.line("halos: no training nodes to walk from, so from all nodes")
            marks[:] = 1
        sizes = np.diff(self._offsets, axis=1).sum(axis=0)
        wanted = (self._options.halo * sizes + 0.5).astype(np.int64)
        room = walk_room(
            marks.size, node_bytes(run.options), run.memory.share, run.options.block_bytes
        )
        lanes = plan_lanes(marks.size, self._num_parts, room)
        walk = LazyWalk(self._store, self._scan_bytes, run.progress)
        halos = list(walk.top_of_parts(marks, self._offsets, wanted, self._hubs(), lanes))
        starts = np.concatenate([[0], np.cumsum([h.size for h in halos])])
        save_array(run.path(_HALOS), np.concatenate(halos))
        return {"starts": starts.tolist()}

    def _hubs(self) -> NDArray[np.int64]:
        """Store ids, the most influential first."""
        if not self._options.finds_hubs:
            return np.empty(0, np.int64)
        return load_array(self._run.path(_HUBS), np.uint64).astype(np.int64)

    def _halos(self) -> NDArray[np.uint64]:
        """Store ids of all halos, partition by partition."""
        if not self._options.halo:
            return np.empty(0, np.uint64)
        return load_array(self._run.path(_HALOS), np.uint64)

    def _slots(
        self, t: NodeType, starts: list[int]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(nodes of a type in the order of its slots, first slot of each group, then all)."""
        nodes = np.concatenate([self._halos(), np.sort(self._hubs()).astype(np.uint64)])
        ours = (nodes >= t.first) & (nodes < t.first + t.num_nodes)
        before = np.concatenate([[0], np.cumsum(ours)])
        return nodes[ours], before[[*starts, nodes.size]].astype(np.uint64)

    def _write_type(self, t: NodeType, starts: list[int], counts: dict[str, int]) -> NodeType:
        run, id_dtype = self._run, self._manifest.id_dtype
        hubs = self._write_hubs(t, counts[t.name]) if self._options.finds_hubs else None
        paths = halo_paths(t.name)
        facts = run.stage(
            paths.nodes, lambda: self._write_nodes(t, starts),
            arrays=[paths.nodes, crc_path(paths.nodes), paths.offsets],
        )  # fmt: skip
        num_slots: int = facts["num_slots"]
        halo = Halo(
            nodes=RowArray(paths.nodes, id_dtype, num_slots),
            offsets_path=paths.offsets,
            label=self._copy(t, t.label, paths.label, num_slots, starts) if t.label else None,
            features={
                name: self._copy(t, array, paths.feature(name), num_slots, starts)
                for name, array in t.features.items()
            },
        )
        return msgspec.structs.replace(t, hubs=hubs, halo=halo)

    def _write_hubs(self, t: NodeType, num_hubs: int) -> RowArray:
        array = RowArray(hubs_path(t.name), self._manifest.id_dtype, num_hubs)
        write_in_order(self._run, array, self._hub_pieces(t))
        return array

    def _hub_pieces(self, t: NodeType) -> Iterator[NDArray[Any]]:
        yield self._hubs_of(t)

    def _hubs_of(self, t: NodeType) -> NDArray[np.int64]:
        hubs = self._hubs()
        return hubs[(hubs >= t.first) & (hubs < t.first + t.num_nodes)]

    def _write_nodes(self, t: NodeType, starts: list[int]) -> Facts:
        nodes, offsets = self._slots(t, starts)
        paths, writer = halo_paths(t.name), self._run.writer
        array = RowArray(paths.nodes, self._manifest.id_dtype, nodes.size)
        with writer.rows(array) as out:
            out.append(nodes.astype(array.dtype))
        writer.side(paths.offsets, offsets)
        return {"num_slots": nodes.size}

    def _copies(self, t: NodeType, starts: list[int]) -> SlotCopies:
        run = self._run
        nodes = self._slots(t, starts)[0]
        return SlotCopies(self._store, nodes, run.memory.share, run.work.path, run.progress)

    def _copy(
        self, t: NodeType, array: RowArray, path: str, num_slots: int, starts: list[int]
    ) -> RowArray:
        """Rows of an array, a row a slot; the scale of int8 stays that of the array."""
        copy = msgspec.structs.replace(array, path=path, num_rows=num_slots)

        def body() -> None:
            with self._run.writer.rows(copy) as out:
                self._copies(t, starts).rows(array, t.first, copy, out.append)

        self._run.stage(path, body, arrays=[path, crc_path(path)])
        return copy

    def _write_relation(self, relation: Relation, starts: list[int]) -> Relation:
        path = halo_relation_path(relation.path.removesuffix("/blocks"))
        arrays = [f"{path}/{name}" for name in ("blocks", "first_node", "first_edge")]

        def body() -> Facts:
            return self._pack(relation, arrays, starts)

        facts = self._run.stage(path, body, arrays=[*arrays, crc_path(arrays[0])])
        halo = HaloColumns(
            num_edges=facts["num_edges"],
            num_blocks=facts["num_blocks"],
            path=arrays[0],
            first_node_path=arrays[1],
            first_edge_path=arrays[2],
        )
        return msgspec.structs.replace(relation, halo=halo)

    def _pack(self, relation: Relation, arrays: list[str], starts: list[int]) -> Facts:
        run, manifest = self._run, self._manifest
        dst = next(t for t in manifest.types if t.name == relation.dst)
        graph = run.writer.graph(arrays[0])
        packer = GraphPacker(
            manifest.block_bytes, manifest.id_dtype, relation.edge_id_dtype, 0, graph.append,
            weights=relation.has_weights, times=relation.has_times,
        )  # fmt: skip
        num_edges = self._copies(dst, starts).columns(relation, packer)
        run.writer.side(arrays[1], packer.close())
        num_blocks = graph.close()
        run.writer.side(arrays[2], packer.first_edges())
        return {"num_edges": num_edges, "num_blocks": num_blocks}

    def _measure(self, starts: list[int]) -> Facts:
        marks, hubs = self._marks(), self._hubs()
        score = self._hub_score(marks) if self._options.finds_hubs else ""
        kept = measure_kept(
            self._store, marks, self._offsets, self._halos(), np.array(starts, np.int64), hubs,
            self._scan_bytes, self._run.progress,
        )  # fmt: skip
        return {"kept": msgspec.to_builtins(kept), "num_hubs": hubs.size, "score": score}


def top_scores(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Nodes of the highest positive scores, the highest first; the smaller id among equals.

    scores   float64 (num_nodes,)
    count    at most so many
    """
    count = min(count, int(np.count_nonzero(scores > 0)))
    if count == 0:
        return np.empty(0, np.int64)
    least = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > least)
    chosen = np.concatenate([above, np.flatnonzero(scores == least)[: count - above.size]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]


def _row_bytes(t: NodeType) -> int:
    return sum(a.row_bytes for a in [*t.features.values(), *([t.label] if t.label else [])])
