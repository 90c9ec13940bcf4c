"""The stages of one node type: its ids, features, label, splits, and where partitions begin."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import NodeType, RowArray
from preprocess.files.array_file import load_array, save_array
from preprocess.ingest.arrays import RowStages, array_files, list_stage, write_ids
from preprocess.ingest.contents import SPLITS, ArrayContent, row_disk_bytes, split_sizes
from preprocess.ingest.graph import RANK, IngestRun, IngestStage
from preprocess.ingest.plan import CHECK, ORDER, IngestJob, looks_at_label, seeded_splits
from preprocess.pipeline.stage import Cost, Facts
from preprocess.pipeline.tasks import SavedArray, TaskFolder
from preprocess.stages.labels import (
    are_whole,
    label_dtype,
    label_pieces,
    labelled_bits,
    seeded_ids,
    split_key,
)
from preprocess.stages.rows import Emit, place_rows
from preprocess.stages.scan import check_splits
from preprocess.stages.spread import FeaturePlaces, spread_rows


class TypeStages(RowStages):
    """One type on its way into the store."""

    def __init__(self, job: IngestJob, number: int) -> None:
        super().__init__(job)
        self._number, self.type = number, job.contents.types[number]
        self.place_bytes = 4 if job.options.renames else 0

    def stages(self) -> list[IngestStage]:
        job, t = self.job, self.type
        cost = Cost(0, 2 * row_disk_bytes(t.original_id, job.options.block_bytes))
        ids = [*array_files(t.original_id), *array_files(t.store_id)]
        found = [IngestStage(f"ids of {t.name}", cost, self._write_ids, arrays=ids)]
        for rows in t.features:
            found += self.features(rows)
        if t.label is not None:
            found.append(self.placed(t.label, self._label_pieces))
        found += [self.split(rows) for rows in t.splits]
        seeded = seeded_splits(t, t.num_nodes, job.options)
        for i, array in enumerate(seeded):
            cost = Cost(0, row_disk_bytes(array, job.options.block_bytes))
            spent = [self.bits_file] if i == len(seeded) - 1 else []
            sized = partial(self._seeded_split, i)
            found.append(list_stage(array, cost, partial(self.seeded, i), sized, spent))
        if job.options.partition:
            path = t.partition_path
            found.append(IngestStage(path, Cost(), self._write_partitions, arrays=[path]))
        return found

    def _write_ids(self, run: IngestRun) -> None:
        t, nodes = self.type, run.nodes
        order = nodes and nodes.order[t.first : t.stop]
        rank = nodes and nodes.rank[t.first : t.stop]
        write_ids(run, t.original_id, order, t.first, 0)
        write_ids(run, t.store_id, rank, 0, t.first)

    def place(
        self, run: IngestRun, pieces: Iterator[NDArray[Any]], array: RowArray, emit: Emit
    ) -> None:
        """Bring rows of the type into the order of its nodes."""
        t, nodes = self.type, run.nodes
        rank = nodes and nodes.rank[t.first : t.stop]
        local = rank - np.uint32(t.first) if rank is not None and t.first else rank
        place_rows(pieces, array, local, self.job.share, run.folder, emit, run.progress)

    def spread(self, run: IngestRun, rows: ArrayContent) -> bool:
        job, first = self.job, self.type.first
        is_label = rows is self.type.label
        if (
            run.executor is None
            or is_label
            or rows.is_stored
            or not job.source.divides(rows.source)
        ):
            return False
        rank = SavedArray(run.path(RANK), np.uint32) if job.options.renames else None
        of = FeaturePlaces(job.source, rows.source, rows.array, job.options.allow_nan, rank, first)
        with TaskFolder(run.executor, run.folder, run.progress) as folder:
            spread_rows(of, job.share, folder, run.writer, job.buffer)
        return True

    def sized(self, array: RowArray, run: IngestRun | None) -> RowArray:
        """Labels have a dtype that depends on all of them."""
        label = self.type.label
        if run is None or label is None or array is not label.array:
            return array
        facts = run.facts(CHECK)["labels"].get(self.type.name)
        return msgspec.structs.replace(array, dtype=facts["dtype"]) if facts else array

    def _label_pieces(self, run: IngestRun) -> Iterator[NDArray[Any]]:
        label = self.type.label
        assert label is not None
        dtype = self.sized(label.array, run).dtype
        return label_pieces(self.job.source, label.source, dtype, self.job.share)

    @property
    def splits_seeded(self) -> bool:
        """Whether a seeded split is to be made."""
        return bool(seeded_splits(self.type, 0, self.job.options))

    @property
    def bits_file(self) -> str:
        """Name of the temporary file of the labelled nodes."""
        return f"labelled-{self._number}"

    def check(self, run: IngestRun) -> Facts | None:
        """Splits are sound; labels are looked at where their dtype, or a split, depends on them."""
        job, label = self.job, self.type.label
        check_splits(job.source, self.type.name, job.options.leave_out)
        if label is None or not looks_at_label(label, job.options):
            return None
        rows = label.source
        dtype = label_dtype(rows, rows.dtype.kind == "f" and are_whole(job.source, rows, job.share))
        facts: Facts = {"dtype": dtype}
        if self.splits_seeded:
            bits = labelled_bits(job.source, rows, dtype, job.share)
            facts["labelled"] = int(np.bitwise_count(bits).sum(dtype=np.int64))
            save_array(run.path(self.bits_file), bits)
        return facts

    def _labelled(self, run: IngestRun | None) -> int:
        """Nodes with a label; before a run, as many as there may be."""
        if run is None:
            return self.type.num_nodes
        found: int = run.facts(CHECK)["labels"][self.type.name]["labelled"]
        return found

    def _seeded_split(self, split: int, run: IngestRun | None) -> RowArray:
        return seeded_splits(self.type, self._labelled(run), self.job.options)[split]

    def seeded(self, split: int, run: IngestRun) -> Iterator[NDArray[np.int64]]:
        options, total = self.job.options, self._labelled(run)
        bits = load_array(run.path(self.bits_file), np.uint8)
        places = split_sizes(options.split, total)[split]
        key = split_key(options.seed, self._number)
        return seeded_ids(bits, self.type.num_nodes, total, places, key)

    def _write_partitions(self, run: IngestRun) -> None:
        starts, count = run.facts(ORDER)["starts"], self._num_partitions(run)
        first = self._number * count
        offsets = np.array(starts[first : first + count + 1], np.uint64)
        run.writer.side(self.type.partition_path, offsets)

    def _num_partitions(self, run: IngestRun | None) -> int:
        settings = self.job.options.partition
        return settings.num_partitions if run and settings else 0

    def node_type(self, run: IngestRun | None) -> NodeType:
        """What the manifest says, once all stages are over; before a run, an upper bound."""
        t = self.type
        splits = {r.source.name: r.array for r in t.splits}
        if self.splits_seeded:
            splits = {name: self._seeded_split(i, run) for i, name in enumerate(SPLITS)}
        return NodeType(
            name=t.name,
            first=t.first,
            num_nodes=t.num_nodes,
            original_id=t.original_id,
            store_id=t.store_id,
            label=self.sized(t.label.array, run) if t.label else None,
            features={r.source.name: r.array for r in t.features},
            splits=splits,
            num_partitions=self._num_partitions(run),
            partition_offsets_path=t.partition_path if self.job.options.partition else "",
        )
