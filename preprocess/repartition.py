"""A store into another one whose nodes stand partition by partition; the graph stays what it is.

It is an ingest whose source is the store: nodes keep their order inside a partition, and original
ids, edge ids, arrays and splits are taken over as they are.  Hubs and halos belong to a partition,
and are found anew.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest, NodeType, Relation, RowArray, crc_path
from blockstore.store import Store, numpy_dtype
from preprocess.contents import (
    SPLITS,
    Contents,
    RelationContents,
    Rows,
    TypeContents,
    list_contents,
)
from preprocess.influence import InfluenceOptions
from preprocess.ingest import IngestStages, option_facts, write_store
from preprocess.memory import give_back_freed
from preprocess.options import IngestOptions
from preprocess.partition import PartitionOptions
from preprocess.plan import ids_stage, scale_stage
from preprocess.prepare import keys_beside, keys_of
from preprocess.progress import Progress
from preprocess.result import IngestResult
from preprocess.run import Facts, Run
from preprocess.sourcefiles import SourceFiles
from preprocess.sources.stored import StoredSource
from preprocess.stages.classes import NodeClasses, source_classes
from preprocess.work import check_free


def repartition(
    store: Store,
    target: Path,
    settings: PartitionOptions,
    progress: Progress,
    mem_bytes: int = 2 << 30,
    influence: InfluenceOptions | None = None,
    seed: int = 0,
    fresh: bool = False,
) -> IngestResult:
    """Write the store `target`.

    seed   of a random partition
    fresh  begin anew, whatever an earlier run has left

    Raises what `ingest` does, and CorruptBlock.
    """
    check_free(target, target)
    give_back_freed()
    manifest, source = store.manifest, StoredSource(store)
    options = IngestOptions(
        mem_bytes=mem_bytes,
        block_bytes=manifest.block_bytes,
        order="source",
        edge_ids=any(r.edge_id_dtype for r in manifest.relations),
        ids="uint64" if manifest.id_dtype == "uint64" else "auto",
        seed=seed,
        partition=settings,
    )
    if influence is not None:
        options = replace(options, influence=influence)
    options.check()
    contents = _contents(source, options)
    facts = {"store": manifest.fingerprint, **option_facts(options)}
    # arrays may be added to the store meanwhile, which changes nothing that is read here
    files = SourceFiles([store.path])

    def stages(run: Run) -> "_Repartition":
        return _Repartition(run, store, source)

    return write_store(source, files, contents, target, options, progress, facts, fresh, stages)


def _contents(source: StoredSource, options: IngestOptions) -> Contents:
    """What the new store will hold: the arrays of the old one."""
    contents = list_contents(source, options)
    types = tuple(_type_contents(t, source.types[t.name]) for t in contents.types)
    by_name = {t.name: t for t in types}
    relations = tuple(_relation_contents(r, source, by_name) for r in contents.relations)
    return Contents(contents.id_dtype, types, relations)


def _type_contents(t: TypeContents, stored: NodeType) -> TypeContents:
    label = t.label
    if label is not None and stored.label is not None:
        label = Rows(label.source, stored.label, True)
    features = _as_stored(t.features, stored.features)
    return replace(t, features=features, label=label, splits=_as_stored(t.splits, stored.splits))


def _relation_contents(
    r: RelationContents, source: StoredSource, types: dict[str, TypeContents]
) -> RelationContents:
    stored = source.stored(r.source)
    held = {rows.name: rows for rows in source.edge_rows(r.source)}
    features = tuple(Rows(held[n], a, True) for n, a in stored.features.items())
    return replace(
        r,
        src=types[r.src.name],
        dst=types[r.dst.name],
        edge_id_dtype=stored.edge_id_dtype,
        ids=source.edge_ids(r.source),
        features=features,
        splits=_as_stored(r.splits, stored.splits),
        reverse_of=stored.reverse_of,
    )


def _as_stored(rows: tuple[Rows, ...], arrays: dict[str, RowArray]) -> tuple[Rows, ...]:
    return tuple(Rows(r.source, arrays[r.source.name], True) for r in rows)


class _Repartition(IngestStages):
    """The stages of one run."""

    def __init__(self, run: Run, store: Store, source: StoredSource) -> None:
        super().__init__(run, None)
        self._keys, self._old, self._source = keys_of(store.path), store.manifest, source

    def run(self) -> IngestResult:
        """All stages, with a copy of the owner's ids beside the new store."""
        with keys_beside(self._run.writer.path, self._copy_keys):
            return super().run()

    def _copy_keys(self, folder: Path) -> None:
        if self._keys.is_dir():
            shutil.copytree(self._keys, folder, dirs_exist_ok=True)

    def _check(self) -> Facts:
        """What is in a store has been checked."""
        return {"labels": {}}

    def _classes(self, _: dict[str, Facts]) -> NodeClasses:
        run, source = self._run, self._source

        def train(t: TypeContents) -> Callable[[], Iterator[NDArray[np.int64]]] | None:
            if SPLITS[0] not in source.types[t.name].splits:
                return None
            return partial(source.split_places, t.name, SPLITS[0])

        return source_classes(source, run.contents, {}, run.memory.share, train)

    def _write_relation(self, number: int) -> Relation:
        written, old = super()._write_relation(number), self._old.relations[number]
        for array in old.features.values():
            self._copy_scale(array)
        return msgspec.structs.replace(written, num_source_edges=old.num_source_edges)

    def _write_type(self, number: int, label_facts: Facts) -> NodeType:
        for array in self._old.types[number].features.values():
            self._copy_scale(array)
        return super()._write_type(number, label_facts)

    def _copy_scale(self, array: RowArray) -> None:
        if array.scale_path:
            run = self._run
            run.stage(
                scale_stage(array),
                lambda: run.writer.side(array.scale_path, self._source.scale(array)),
                arrays=[array.scale_path],
            )

    def _write_ids(self, t: TypeContents) -> None:
        run, source, nodes = self._run, self._source, self._graph.nodes
        assert nodes is not None
        place, rank = self._placing(t), nodes.rank

        def body() -> None:
            with run.writer.rows(t.original_id) as out:
                place(source.original_ids(t.name), t.original_id, out.append)
            dtype: Any = numpy_dtype(t.store_id.dtype)
            with run.writer.rows(t.store_id) as out:
                for ids in source.store_ids(t.name):
                    out.append(rank[ids].astype(dtype))

        paths = [a.path for a in (t.original_id, t.store_id)]
        run.stage(ids_stage(t), body, arrays=[*paths, *map(crc_path, paths)])

    def _manifest(self, types: tuple[NodeType, ...], relations: tuple[Relation, ...]) -> Manifest:
        return msgspec.structs.replace(
            self._old, fingerprint="", types=types, relations=relations,
            partitioning=self._partitioning,
        )  # fmt: skip
