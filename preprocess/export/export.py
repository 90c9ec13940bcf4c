"""A store back into a plain layout, in bounded memory.

A store of one type "node" and one relation "to" becomes the layout "plain", any other
"plain-hetero".  Features, labels and splits come out as they came in; bfloat16 as the float32 of
the same value, int8 with a scale as the float32 that it stands for.  Edges come out in the source's
order, without added reverses, where the store kept edge ids; else all of them, by (target, source).
Relations that ingest added are left out.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace, StoreExists
from blockstore.format import Manifest, NodeType, Relation, RowArray
from blockstore.store import Store, read_rows, scan_rows
from blockstore.units import format_bytes
from preprocess.contents import row_disk_bytes
from preprocess.export.edges import EdgeExport, TypeIds
from preprocess.export.rows import (
    SCAN_BYTES,
    ExportRun,
    copy_rows,
    write_csr,
    write_dense,
    written_bytes,
)
from preprocess.plan import interpreter_bytes, too_little_memory, with_interpreter
from preprocess.progress import Progress
from preprocess.sources.plain import NODE, RELATION
from preprocess.sources.plain_names import (
    MAIN,
    META,
    SCHEMA,
    OneType,
    PlainNames,
    SeveralTypes,
)
from preprocess.stages.rows import Emit, place_rows

_NODE_BYTES = 16  # original id 4 or 8, count 4
_FIXED_BYTES = 8 << 20
_STEP = 1 << 18  # ids looked at together
_EDGE_TEMPORARY = 40  # bytes of an edge on its way: sorted, with its id, its place and its row's


def export(store: Store, folder: Path, progress: Progress, mem_bytes: int = 1 << 30) -> None:
    """Write the folder.

    Raises StoreExists, BudgetTooSmall, OutOfSpace, CorruptBlock; nothing is left behind then.
    """
    manifest = store.manifest
    if folder.exists():
        raise StoreExists(f"{folder}: exists already; remove it, or choose another name")
    share = _plan_memory(manifest, mem_bytes)
    temporary = folder.absolute().with_name(f".{folder.name}.partial-{os.getpid()}")
    with work_folder(folder) as work:
        _check_disk(manifest, work)
        try:
            temporary.mkdir()
            _Export(ExportRun(store, temporary, work, mem_bytes, share, progress)).run()
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target for temporary files; it is removed, with those of killed runs."""
    parent = target.absolute().parent
    for left in parent.glob(f".{target.name}.work-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    made = [p for p in (parent, *parent.parents) if not p.exists()]
    work = parent / f".{target.name}.work-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not target.exists():
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()


def is_plain(manifest: Manifest) -> bool:
    """Whether a store needs no names of types."""
    types = [t.name for t in manifest.types]
    relations = [(r.src, r.name, r.dst) for r in manifest.relations]
    return types == [NODE] and relations == [(NODE, RELATION, NODE)]


def _plan_memory(manifest: Manifest, mem_bytes: int) -> int:
    """Bytes for chunks and buckets, tables aside.  Raises BudgetTooSmall."""
    block = manifest.block_bytes
    widest = max(a.row_bytes for a in manifest.row_arrays())
    tables = _NODE_BYTES * manifest.num_nodes + _FIXED_BYTES + 2 * max(SCAN_BYTES, block, widest)
    least = tables + 16 * max(block, widest, 1 << 18)
    left = mem_bytes - interpreter_bytes(mem_bytes)
    if left < least:
        why = f"{manifest.num_nodes:,} nodes of {_NODE_BYTES} bytes each, and buffers"
        raise too_little_memory(mem_bytes, with_interpreter(least), why)
    return left - tables


def _check_disk(manifest: Manifest, work: Path) -> None:
    """Raises OutOfSpace: no room for the folder, sparse arrays counted as dense."""
    block = manifest.block_bytes
    arrays = manifest.row_arrays()
    edges = [r.num_edges for r in manifest.relations]
    inline = [r.num_edges * (4 * r.has_weights + 8 * r.has_times) for r in manifest.relations]
    rows = [row_disk_bytes(a, block) + 8 * a.num_rows for a in arrays]
    need = 16 * sum(edges) + sum(inline) + sum(written_bytes(a) for a in arrays)
    need += max([*rows, *(_EDGE_TEMPORARY * e for e in edges)])
    free = shutil.disk_usage(work).free
    if need > free:
        raise OutOfSpace(
            f"{work.parent}: found {format_bytes(free)} free, expected {format_bytes(need)} for "
            "the folder and its making; free some space, or choose another disk"
        )


class _Export:
    """One run."""

    def __init__(self, run: ExportRun) -> None:
        self._run, self._manifest = run, run.store.manifest
        self._plain = is_plain(self._manifest)
        self._names: PlainNames = OneType() if self._plain else SeveralTypes()
        self._types = {
            t.name: TypeIds(t.first, read_rows(run.store, t.original_id))
            for t in self._manifest.types
        }

    def run(self) -> None:
        """Every file of the folder."""
        relations = [r for r in self._manifest.relations if not r.reverse_of]
        most_node = -1
        for r in relations:
            ends = self._types[r.src], self._types[r.dst]
            written = EdgeExport(self._run, r, *ends, self._names).write()
            most_node = max(most_node, written.most_node)
        for t in self._manifest.types:
            self._write_type(t)
        if self._plain:
            self._describe_one(self._manifest.types[0], most_node)
        else:
            self._describe_several(relations)

    def _write_type(self, t: NodeType) -> None:
        names = self._names
        for name, array in t.features.items():
            self._write_features(t, name, array)
        if t.label is not None:
            self._write_placed(t, names.label(t.name), t.label)
        for name, array in t.splits.items():
            copy_rows(self._run, names.split(t.name, name), array)

    def _write_features(self, t: NodeType, name: str, array: RowArray) -> None:
        if array.source != "csr" or len(array.row_shape) != 1:
            self._write_placed(t, self._names.features(t.name, name), array)
            return

        def stem(part: str) -> str:
            return self._names.csr(t.name, name, part)

        write_csr(self._run, stem, array, lambda emit: self._place(t, array, emit))

    def _write_placed(self, t: NodeType, stem: str, array: RowArray) -> None:
        write_dense(
            self._run, stem, array, array.num_rows, lambda emit: self._place(t, array, emit)
        )

    def _place(self, t: NodeType, array: RowArray, emit: Emit) -> None:
        """Rows of a type in the source's order."""
        run = self._run
        pieces = (rows for _, rows in scan_rows(run.store, array, SCAN_BYTES))
        rank = self._rank(self._types[t.name].original)
        place_rows(pieces, array, rank, run.share, run.work, emit, run.progress)

    def _rank(self, original: NDArray[Any]) -> NDArray[Any] | None:
        """Where rows go; None where they stand in the source's order."""
        moved = any(
            (original[first : first + _STEP] != np.arange(first, min(first + _STEP, original.size)))
            .any()
            for first in range(0, original.size, _STEP)
        )  # fmt: skip
        return original if moved else None

    def _describe_one(self, t: NodeType, most_node: int) -> None:
        """`meta.json`, where nothing else says how many nodes there are."""
        if not t.features and t.label is None and most_node + 1 < t.num_nodes:
            self._write_json(META, {"num_nodes": t.num_nodes})

    def _describe_several(self, relations: list[Relation]) -> None:
        listed = [(r.src, r.name, r.dst) for r in relations]
        types = self._manifest.types
        sparse = {
            t.name: [t.num_nodes, *array.row_shape]
            for t in types
            if (array := t.features.get(MAIN)) is not None and array.source == "csr"
        }
        schema = {
            "node_types": {t.name: t.num_nodes for t in types},
            "offsets": {t.name: t.first for t in types},
            "relations": [
                names if any("|" in n for n in names) else "|".join(names) for names in listed
            ],
            "feature_shapes": sparse,
        }
        self._write_json(SCHEMA, schema)

    def _write_json(self, name: str, value: object) -> None:
        text = msgspec.json.format(msgspec.json.encode(value), indent=1)
        (self._run.folder / name).write_bytes(text)
