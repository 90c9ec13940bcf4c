"""Export a store to a plain layout, in bounded memory.

A store of one type "node" and one relation "to" becomes the layout "plain", any other
"plain-hetero".  Features, labels and splits are as in the source, except that bfloat16 and int8
with a scale become float32 numbers of the same value.  If the store has edge ids, edges are in the
source's order, without added reverses; otherwise all edges are written, by (target, source).
Relations that ingest added are left out.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest, NodeType, RowArray
from blockstore.io.files import check_free
from blockstore.store import Store, scan_rows
from preprocess.export.edges import (
    SCAN_BYTES,
    EdgeExport,
    ExportRun,
    ExportStage,
    copy_rows,
    write_csr,
    write_dense,
    written_bytes,
)
from preprocess.ingest.contents import row_disk_bytes
from preprocess.ingest.plan import interpreter_bytes, too_little_memory, with_interpreter
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import Cost, RunPlan, resumable
from preprocess.pipeline.work import sign
from preprocess.sources.plain_names import (
    CSR,
    CSR_PARTS,
    MAIN,
    META,
    ONLY,
    SCHEMA,
    PlainNames,
    csr_stem,
    one_type,
    several_types,
)
from preprocess.sources.source import NODE
from preprocess.stages.rows import Emit, place_rows

_PIPELINE = 1  # increased when stages or their files change: older work folders are not resumed
_NODE_BYTES = 16  # original id 4 or 8, count 4
_FIXED_BYTES = 8 << 20
_STEP = 1 << 18  # ids processed together


def export(store: Store, folder: Path, progress: Progress, mem_bytes: int = 1 << 30) -> None:
    """Write the folder.

    Raises StoreExists, BudgetTooSmall, CorruptBlock, OutOfSpace.  If the run is stopped, or the
    disk fills up, finished stages stay beside the folder, and the same call resumes after them.
    """
    check_free(folder)
    share = _plan_memory(store.manifest, mem_bytes)
    stages = _Export(store.manifest).stages()
    signature = sign({"export": _PIPELINE, "store": store.manifest.fingerprint}, b"")
    with resumable(folder, signature, progress, RunPlan.of(stages)) as work:
        run = ExportRun(work, progress, store, mem_bytes, share)
        run.execute(stages)
        run.appear(folder)


def _plan_memory(manifest: Manifest, mem_bytes: int) -> int:
    """Bytes for chunks and buckets, without tables.  Raises BudgetTooSmall."""
    block = manifest.block_bytes
    widest = max(a.row_bytes for a in manifest.row_arrays())
    tables = _NODE_BYTES * manifest.num_nodes + _FIXED_BYTES + 2 * max(SCAN_BYTES, block, widest)
    minimum = tables + 16 * max(block, widest, 1 << 18)
    left = mem_bytes - interpreter_bytes(mem_bytes)
    if left < minimum:
        why = f"{manifest.num_nodes:,} nodes of {_NODE_BYTES} bytes each, and buffers"
        raise too_little_memory(mem_bytes, with_interpreter(minimum), why)
    return left - tables


class _Export:
    """The stages of all types and relations."""

    def __init__(self, manifest: Manifest) -> None:
        ends = [(r.src, r.name, r.dst) for r in manifest.relations]
        self._plain = [t.name for t in manifest.types] == [NODE] and ends == [ONLY]
        self._manifest = manifest
        self._names: PlainNames = one_type if self._plain else several_types
        listed = [r for r in manifest.relations if not r.reverse_of]
        self._edges = {(r.src, r.name, r.dst): EdgeExport(r, self._names) for r in listed}

    def stages(self) -> list[ExportStage]:
        found = []
        for edges in self._edges.values():
            found += edges.stages()
        for t in self._manifest.types:
            found += self._type_stages(t)
        name = META if self._plain else SCHEMA
        return [*found, ExportStage(name, Cost(), self._describe, arrays=[name])]

    def _type_stages(self, t: NodeType) -> Iterator[ExportStage]:
        names = self._names
        for name, array in t.features.items():
            if array.source == "csr" and len(array.row_shape) == 1:
                stem = partial(csr_stem, names, t.name, name)
                files = [f"{stem(CSR)}.json", *(f"{stem(part)}.npy" for part in CSR_PARTS)]
                body = partial(write_csr, stem, array, partial(self._place, t, array))
                yield ExportStage(stem(CSR), self._cost(array), body, arrays=files)
            else:
                yield self._placed(t, names("rows", t.name, name), array)
        if t.label is not None:
            yield self._placed(t, names("label", t.name, ""), t.label)
        for name, array in t.splits.items():
            stem_of = names("split", t.name, name)
            cost = Cost(array.num_rows * array.row_bytes, written_bytes(array))
            copy = partial(copy_rows, stem_of, array)
            yield ExportStage(stem_of, cost, copy, arrays=[f"{stem_of}.npy"])

    def _cost(self, array: RowArray) -> Cost:
        """Cost of bringing rows into another order; sparse arrays count as dense."""
        read = array.num_rows * array.row_bytes
        passing = row_disk_bytes(array, self._manifest.block_bytes) + 8 * array.num_rows
        return Cost(read + passing, written_bytes(array) + passing, passing)

    def _placed(self, t: NodeType, stem: str, array: RowArray) -> ExportStage:
        body = partial(write_dense, stem, array, array.num_rows, partial(self._place, t, array))
        return ExportStage(stem, self._cost(array), body, arrays=[f"{stem}.npy"])

    def _place(self, t: NodeType, array: RowArray, run: ExportRun, emit: Emit) -> None:
        """Bring rows of a type into the source's order."""
        pieces = (rows for _, rows in scan_rows(run.store, array, SCAN_BYTES))
        rank = self._rank(run.ids(t.name).original)
        place_rows(pieces, array, rank, run.share, run.folder, emit, run.progress)

    def _rank(self, original: NDArray[Any]) -> NDArray[Any] | None:
        """New positions of rows; None if they are in the source's order already."""
        moved = any(
            (original[first : first + _STEP] != np.arange(first, min(first + _STEP, original.size)))
            .any()
            for first in range(0, original.size, _STEP)
        )  # fmt: skip
        return original if moved else None

    def _describe(self, run: ExportRun) -> None:
        """Write what no array shows: numbers of nodes, names of types and relations."""
        if not self._plain:
            _write_json(run.result / SCHEMA, self._schema())
            return
        (t,) = self._manifest.types
        most_node = max((run.facts(e.stem)["most_node"] for e in self._edges.values()), default=-1)
        if not t.features and t.label is None and most_node + 1 < t.num_nodes:
            _write_json(run.result / META, {"num_nodes": t.num_nodes})

    def _schema(self) -> dict[str, Any]:
        types, listed = self._manifest.types, list(self._edges)
        sparse = {
            t.name: [t.num_nodes, *array.row_shape]
            for t in types
            if (array := t.features.get(MAIN)) is not None and array.source == "csr"
        }
        return {
            "node_types": {t.name: t.num_nodes for t in types},
            "offsets": {t.name: t.first for t in types},
            "relations": [
                names if any("|" in n for n in names) else "|".join(names) for names in listed
            ],
            "feature_shapes": sparse,
        }


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
