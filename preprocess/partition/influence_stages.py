"""The stages of hubs and halos: find them in the blocks just written, then copy them by groups.

Groups are the halo of each partition, then the hubs.  Two temporary files are kept between stages:
ids of hubs, the most influential first, and ids of all halos, partition by partition.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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
    edge_layout,
)
from blockstore.pack import GraphPacker
from blockstore.store import Store
from preprocess.files.array_file import load_array, save_array
from preprocess.files.buckets import passing_bytes
from preprocess.files.store import scan_size
from preprocess.ingest.contents import (
    SPLITS,
    RelationContents,
    TypeContents,
    graph_bytes,
    row_disk_bytes,
)
from preprocess.ingest.graph import IngestRun, IngestStage
from preprocess.ingest.nodes import array_files, list_stage
from preprocess.ingest.plan import IngestJob, node_bytes
from preprocess.partition.influence_plan import (
    HALOS,
    HUBS,
    KEPT,
    copied_arrays,
    copied_graph_bytes,
    halo_batches,
    halo_paths,
    halo_relation_path,
    hub_share,
    hubs_path,
    walk_room,
)
from preprocess.pipeline.stage import Cost, Facts
from preprocess.stages.rows import scatter_bytes
from preprocess.stages.slots import SlotCopies
from preprocess.stages.walk import STEPS, LazyWalk, measure_kept, plan_lanes, training_marks

_HUBS, _HALOS = "hubs", "halos"  # temporary files


class _Written(NamedTuple):
    """The store after relations and types have been written."""

    manifest: Manifest
    store: Store
    offsets: NDArray[np.int64]  # (types, partitions + 1): where partitions begin


class InfluenceStages:
    """The stages of hubs and halos, which follow those of relations and types."""

    def __init__(self, job: IngestJob, manifest: Callable[[IngestRun], Manifest]) -> None:
        """`manifest`: returns the manifest of what has been written."""
        self._job, self._manifest = job, manifest
        self._options = job.options.influence
        self._scan_bytes = scan_size(job.share, job.options.block_bytes)
        self._opened: _Written | None = None

    def stages(self) -> list[IngestStage]:
        job, options, block = self._job, self._options, self._job.options.block_bytes
        contents, node_ids = job.contents, node_bytes(job.options)
        graph = sum(graph_bytes(r, job.options) for r in contents.relations)
        ids = sum(row_disk_bytes(t.store_id, block) for t in contents.types)
        stages, found = [], []
        if options.finds_hubs:
            held = 8 * round(hub_share(contents, job.options) * contents.num_nodes)
            cost = Cost((1 + STEPS) * graph + ids, held, 0, {"walked_edges": STEPS * job.num_edges})
            stages.append(IngestStage(HUBS, cost, self._find_hubs, {_HUBS: held}))
            found.append(_HUBS)
        if options.halo:
            held = 8 * round(options.halo * contents.num_nodes)
            batches = halo_batches(contents, job.options, job.share, node_ids)
            # the first step of a walk reads its own partition only
            read = graph + batches * (STEPS - 1) * graph + graph
            work = {"walked_edges": (STEPS - 1) * batches * job.num_edges}
            cost = Cost(read + ids, held, 0, work)
            stages.append(IngestStage(HALOS, cost, self._find_halos, {_HALOS: held}))
            found.append(_HALOS)
        for t in contents.types:
            stages += self._type_stages(t)
        stages += [self._relation_stage(r) for r in contents.relations]
        return [*stages, IngestStage(KEPT, Cost(graph + ids), self._measure, spent=found)]

    def _type_stages(self, t: TypeContents) -> list[IngestStage]:
        job, paths = self._job, halo_paths(t.name)
        contents, block = job.contents, job.options.block_bytes
        stages = []
        if self._options.finds_hubs:
            num_hubs = round(hub_share(contents, job.options) * t.num_nodes)
            hubs = RowArray(hubs_path(t.name), contents.id_dtype, num_hubs)
            stages.append(list_stage(
                hubs, Cost(0, row_disk_bytes(hubs, block)),
                lambda run: iter([self._hubs_of(run, t)]), partial(self._hubs_array, t.name),
            ))  # fmt: skip
        nodes, *copies = copied_arrays(t, job.options, contents)
        stages.append(IngestStage(
            paths.nodes, Cost(0, row_disk_bytes(nodes, block)), partial(self._write_nodes, t),
            arrays=[*array_files(nodes), paths.offsets],
        ))  # fmt: skip
        for copy in copies:
            passing = scatter_bytes(copy.num_rows, copy.row_bytes, 4, job.share)
            read = t.num_nodes * copy.row_bytes + passing
            written = row_disk_bytes(copy, block) + passing
            stages.append(IngestStage(
                copy.path, Cost(read, written, passing), partial(self._write_copy, t, copy.path),
                arrays=array_files(copy),
            ))  # fmt: skip
        return stages

    def _relation_stage(self, r: RelationContents) -> IngestStage:
        job, path = self._job, halo_relation_path(r.path)
        written = copied_graph_bytes(r, job.contents, job.options)
        copied = 8 * written // sum(r.layout.bits)
        passing = passing_bytes(copied, r.item_bytes, job.share)
        cost = Cost(2 * graph_bytes(r, job.options) + passing, written + passing, passing)
        arrays = _column_paths(path)
        return IngestStage(
            path, cost, partial(self._pack, r.path), arrays=[*arrays, crc_path(arrays[0])]
        )

    def extended(self, run: IngestRun) -> Manifest:
        """The manifest with the arrays that these stages wrote."""
        options, written, kept = self._options, self._written(run), run.facts(KEPT)
        influence = Influence(
            hub_score=kept["score"],
            steps=STEPS,
            num_hubs=kept["num_hubs"],
            halo=options.halo,
            num_slots=self._starts(run)[-1],
            kept=tuple(msgspec.convert(kept["kept"], list[Kept])),
        )
        return msgspec.structs.replace(
            written.manifest,
            types=tuple(self._type(run, t) for t in written.manifest.types),
            relations=tuple(_with_copies(run, r) for r in written.manifest.relations),
            influence=influence,
        )

    def _type(self, run: IngestRun, t: NodeType) -> NodeType:
        paths = halo_paths(t.name)
        num_slots: int = run.facts(paths.nodes)["num_slots"]
        copies = {
            path: msgspec.structs.replace(array, path=path, num_rows=num_slots)
            for path, array in _copied(t).items()
        }
        halo = Halo(
            nodes=RowArray(paths.nodes, self._job.contents.id_dtype, num_slots),
            offsets_path=paths.offsets,
            label=copies.get(paths.label),
            features={name: copies[paths.feature(name)] for name in t.features},
        )
        hubs = self._hubs_array(t.name, run) if self._options.finds_hubs else None
        return msgspec.structs.replace(t, hubs=hubs, halo=halo)

    def _hubs_array(self, type_name: str, run: IngestRun) -> RowArray:
        count = run.facts(HUBS)["counts"][type_name]
        return RowArray(hubs_path(type_name), self._job.contents.id_dtype, count)

    def _written(self, run: IngestRun) -> _Written:
        """The written store, opened once; frees the node order, which is not needed any more."""
        if self._opened is None:
            run.forget_order()
            manifest = self._manifest(run)
            held = msgspec.structs.replace(manifest, files=run.writer.digests)
            store = Store(run.result, held)
            offsets = np.stack([store.partition_offsets(t) for t in manifest.types])
            self._opened = _Written(manifest, store, offsets.astype(np.int64))
        return self._opened

    def _starts(self, run: IngestRun) -> list[int]:
        """First slot of each partition's halo, then that of the hubs."""
        if self._options.halo:
            return list(run.facts(HALOS)["starts"])
        return [0] * self._written(run).offsets.shape[1]

    def _marks(self, run: IngestRun) -> NDArray[np.uint8]:
        written = self._written(run)
        return training_marks(written.store, written.manifest.types, SPLITS[0])

    def _hub_score(self, marks: NDArray[np.uint8]) -> str:
        return self._options.hub_score if marks.any() else "degree"

    def _find_hubs(self, run: IngestRun) -> Facts:
        options, marks, written = self._options, self._marks(run), self._written(run)
        walk = LazyWalk(written.store, self._scan_bytes, run.progress)
        if self._hub_score(marks) == "walk":
            scores = walk.scores(marks)
        else:
            if options.hub_score == "walk":
                run.progress.line("hubs: no training nodes to walk from, so by in-degree")
            scores = walk.in_degrees.astype(np.float64)
        if options.hub_bytes:
            hubs = _within(written.manifest, scores, walk.in_degrees, options.hub_bytes)
        else:
            hubs = top_scores(scores, int(options.hub_share * scores.size + 0.5))
        save_array(run.path(_HUBS), hubs.astype(np.uint64))
        counts = {t.name: self._hubs_of(run, t).size for t in self._job.contents.types}
        return {"counts": counts}

    def _find_halos(self, run: IngestRun) -> Facts:
        marks, job, written = self._marks(run), self._job, self._written(run)
        if not marks.any():
            run.progress.line("halos: no training nodes to walk from, so from all nodes")
            marks[:] = 1
        offsets = written.offsets
        sizes = np.diff(offsets, axis=1).sum(axis=0)
        wanted = (self._options.halo * sizes + 0.5).astype(np.int64)
        room = walk_room(marks.size, node_bytes(job.options), job.share, job.options.block_bytes)
        lanes = plan_lanes(marks.size, sizes.size, room)
        walk = LazyWalk(written.store, self._scan_bytes, run.progress)
        halos = list(walk.top_of_parts(marks, offsets, wanted, self._hubs(run), lanes))
        starts = np.concatenate([[0], np.cumsum([h.size for h in halos])])
        save_array(run.path(_HALOS), np.concatenate(halos))
        return {"starts": starts.tolist()}

    def _hubs(self, run: IngestRun) -> NDArray[np.int64]:
        """Store ids of hubs, the most influential first."""
        if not self._options.finds_hubs:
            return np.empty(0, np.int64)
        return load_array(run.path(_HUBS), np.uint64).astype(np.int64)

    def _halos(self, run: IngestRun) -> NDArray[np.uint64]:
        """Store ids of all halos, partition by partition."""
        if not self._options.halo:
            return np.empty(0, np.uint64)
        return load_array(run.path(_HALOS), np.uint64)

    def _slots(
        self, run: IngestRun, t: TypeContents
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(nodes of a type in slot order, first slot of each group, then the number of slots)."""
        nodes = np.concatenate([self._halos(run), np.sort(self._hubs(run)).astype(np.uint64)])
        ours = (nodes >= t.first) & (nodes < t.stop)
        before = np.concatenate([[0], np.cumsum(ours)])
        return nodes[ours], before[[*self._starts(run), nodes.size]].astype(np.uint64)

    def _hubs_of(self, run: IngestRun, t: TypeContents) -> NDArray[np.int64]:
        hubs = self._hubs(run)
        return hubs[(hubs >= t.first) & (hubs < t.stop)]

    def _write_nodes(self, t: TypeContents, run: IngestRun) -> Facts:
        nodes, offsets = self._slots(run, t)
        paths = halo_paths(t.name)
        array = RowArray(paths.nodes, self._job.contents.id_dtype, nodes.size)
        with run.writer.rows(array) as out:
            out.append(nodes.astype(array.dtype))
        run.writer.side(paths.offsets, offsets)
        return {"num_slots": nodes.size}

    def _copies(self, run: IngestRun, t: TypeContents) -> SlotCopies:
        nodes, store = self._slots(run, t)[0], self._written(run).store
        return SlotCopies(store, nodes, self._job.share, run.folder, run.progress)

    def _write_copy(self, t: TypeContents, path: str, run: IngestRun) -> None:
        """Write a copy of an array with one row for each slot; it uses the array's int8 scale."""
        written = next(w for w in self._written(run).manifest.types if w.name == t.name)
        array, copies = _copied(written)[path], self._copies(run, t)
        copy = msgspec.structs.replace(array, path=path, num_rows=copies.num_slots)
        with run.writer.rows(copy) as out:
            copies.rows(array, t.first, copy, out.append)

    def _pack(self, relation_path: str, run: IngestRun) -> Facts:
        manifest = self._written(run).manifest
        relation = next(r for r in manifest.relations if r.path == f"{relation_path}/blocks")
        dst = next(t for t in self._job.contents.types if t.name == relation.dst)
        paths = _column_paths(halo_relation_path(relation_path))
        graph = run.writer.graph(paths[0])
        layout = edge_layout(manifest, relation)
        packer = GraphPacker(manifest.block_bytes, layout, 0, graph.append)
        num_edges = self._copies(run, dst).columns(relation, packer)
        run.writer.side(paths[1], packer.close())
        num_blocks = graph.close()
        run.writer.side(paths[2], packer.first_edges())
        return {"num_edges": num_edges, "num_blocks": num_blocks}

    def _measure(self, run: IngestRun) -> Facts:
        marks, hubs, written = self._marks(run), self._hubs(run), self._written(run)
        score = self._hub_score(marks) if self._options.finds_hubs else ""
        kept = measure_kept(
            written.store, marks, written.offsets, self._halos(run),
            np.array(self._starts(run), np.int64), hubs, self._scan_bytes, run.progress,
        )  # fmt: skip
        return {"kept": msgspec.to_builtins(kept), "num_hubs": hubs.size, "score": score}


def _with_copies(run: IngestRun, relation: Relation) -> Relation:
    path = halo_relation_path(relation.path.removesuffix("/blocks"))
    blocks, first_node, first_edge = _column_paths(path)
    facts = run.facts(path)
    halo = HaloColumns(
        num_edges=facts["num_edges"],
        num_blocks=facts["num_blocks"],
        path=blocks,
        first_node_path=first_node,
        first_edge_path=first_edge,
    )
    return msgspec.structs.replace(relation, halo=halo)


def _column_paths(path: str) -> list[str]:
    """Paths of the arrays of a relation's slot columns."""
    return [f"{path}/{name}" for name in ("blocks", "first_node", "first_edge")]


def _copied(t: NodeType) -> dict[str, RowArray]:
    """Arrays of a type that have copies for halos, by the path of the copy."""
    paths = halo_paths(t.name)
    features = {paths.feature(name): array for name, array in t.features.items()}
    return features if t.label is None else {paths.label: t.label, **features}


def _within(
    manifest: Manifest, scores: NDArray[np.float64], in_degrees: NDArray[np.uint32], limit: int
) -> NDArray[np.int64]:
    """As many nodes with the highest scores as fit in `limit` bytes, with their in-edges."""
    edge = max(sum(r.item_bytes(manifest.id_dtype)) for r in manifest.relations)
    rows = [sum(a.row_bytes for a in _copied(t).values()) for t in manifest.types]
    nodes = top_scores(scores, min(scores.size, limit // max(1, min(rows))))
    firsts = np.array([t.first for t in manifest.types])
    each = np.array(rows)[np.searchsorted(firsts, nodes, "right") - 1]
    ends = np.cumsum(each + 4 + edge * in_degrees[nodes].astype(np.int64))
    return nodes[: int(np.searchsorted(ends, limit, "right"))]


def top_scores(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Nodes with the highest positive scores, in descending order; of equals the smaller id first.

    scores   float64 (num_nodes,)
    count    maximum number of nodes
    """
    count = min(count, int(np.count_nonzero(scores > 0)))
    if count == 0:
        return np.empty(0, np.int64)
    minimum = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > minimum)
    chosen = np.concatenate([above, np.flatnonzero(scores == minimum)[: count - above.size]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]
