"""Rewrite a store with its nodes grouped by partition; the graph stays the same.

It is an ingest whose source is the store: nodes keep their order inside a partition, and original
ids, edge ids, arrays and splits are copied unchanged.  Hubs and halos depend on the partition, and
are found again.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest
from blockstore.store import Store, numpy_dtype
from preprocess.ingest.contents import SPLITS, Contents, TypeContents, list_contents
from preprocess.ingest.graph import IngestRun
from preprocess.ingest.ingest import IngestStages, option_facts, write_store
from preprocess.ingest.nodes import TypeStages
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.plan import IngestJob
from preprocess.ingest.prepare import keys_beside, keys_of
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import IngestResult
from preprocess.pipeline.stage import Facts
from preprocess.pipeline.work import check_free
from preprocess.sources.sourcefiles import SourceFiles
from preprocess.sources.stored import StoredSource
from preprocess.stages.labels import NodeClasses, source_classes


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

    seed   seed of a random partition
    fresh  begin from scratch, whatever an earlier run has left

    Raises what `ingest` does, and CorruptBlock.
    """
    check_free(target, target)
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
    stages = _Repartition(source, _contents(source, options), options, manifest)
    facts = {"store": manifest.fingerprint, **option_facts(options)}
    # arrays may be added to the store meanwhile, but nothing that is read here changes
    files, keys = SourceFiles([store.path]), keys_of(store.path)

    def copy_keys(folder: Path) -> None:
        if keys.is_dir():
            shutil.copytree(keys, folder, dirs_exist_ok=True)

    with keys_beside(target, copy_keys):
        return write_store(stages, target, files, progress, facts, fresh)


def _contents(source: StoredSource, options: IngestOptions) -> Contents:
    """The contents of the new store: the arrays of the old one, with its edge ids."""
    contents, relations = list_contents(source, options), []
    for r in contents.relations:
        stored, ids = source.stored(r.source), source.edge_ids(r.source)
        relations.append(
            replace(r, edge_id_dtype=stored.edge_id_dtype, ids=ids, reverse_of=stored.reverse_of)
        )
    return replace(contents, relations=tuple(relations))


class _Repartition(IngestStages):
    """The stages of an ingest whose source is a store."""

    def __init__(
        self, source: StoredSource, contents: Contents, options: IngestOptions, old: Manifest
    ) -> None:
        super().__init__(source, contents, options)
        self._old, self._source = old, source

    def _check(self, _: IngestRun) -> Facts:
        """Nothing: the data of a store has been checked by its own ingest."""
        return {"labels": {}}

    def _checked_bytes(self) -> int:
        return 0

    def _classes(self, _: IngestRun) -> NodeClasses:
        source = self._source

        def train(t: TypeContents) -> Callable[[], Iterator[NDArray[np.int64]]] | None:
            if SPLITS[0] not in source.types[t.name].splits:
                return None
            return partial(source.split_places, t.name, SPLITS[0])

        return source_classes(source, self.job.contents, {}, self.job.share, train)

    def _types(self) -> Sequence[TypeStages]:
        return [_StoredType(self.job, i, self._source) for i in range(len(self._old.types))]

    def _bare_manifest(self, run: IngestRun | None) -> Manifest:
        made = super()._bare_manifest(run)
        relations = tuple(
            msgspec.structs.replace(new, num_source_edges=old.num_source_edges)
            for new, old in zip(made.relations, self._old.relations, strict=True)
        )
        return msgspec.structs.replace(
            self._old, fingerprint="", types=made.types, relations=relations,
            partitioning=made.partitioning,
        )  # fmt: skip


class _StoredType(TypeStages):
    """A type whose original ids are taken from the old store, in its order."""

    def __init__(self, job: IngestJob, number: int, source: StoredSource) -> None:
        super().__init__(job, number)
        self._source = source

    def _write_ids(self, run: IngestRun) -> None:
        t, nodes = self.type, run.nodes
        stored = self._source.types[t.name]
        assert nodes is not None
        with run.writer.rows(t.original_id) as out:
            self.place(run, self._source.pieces(stored.original_id), t.original_id, out.append)
        dtype: Any = numpy_dtype(t.store_id.dtype)
        with run.writer.rows(t.store_id) as out:
            for ids in self._source.pieces(stored.store_id):
                out.append(nodes.rank[ids].astype(dtype))
