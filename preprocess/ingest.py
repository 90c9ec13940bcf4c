"""From a source to a store: the stages in order, within one budget, whole or absent.

Each stage leaves a record in the work folder: after a kill the same command goes on behind the
last one.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import NotAStore, OutOfSpace
from blockstore.extend import StoreExtender
from blockstore.format import (
    FORMAT_VERSION,
    Manifest,
    NodeType,
    Partitioning,
    Relation,
    RowArray,
)
from blockstore.io.buffers import byte_view
from blockstore.store import open_store
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from preprocess.arrays import (
    Place,
    quantization_errors,
    write_features,
    write_ids,
    write_in_order,
    write_placed,
    write_split,
)
from preprocess.contents import SPLITS, Contents, TypeContents, list_contents, split_sizes
from preprocess.errors import BadInput
from preprocess.graph import PARTITION, RANK, GraphStages, counts_file
from preprocess.hops.forecast import whole_plan
from preprocess.hops.hops import make_hops
from preprocess.influence_plan import copies_nodes
from preprocess.influence_stages import InfluenceStages
from preprocess.memory import give_back_freed
from preprocess.metis import check_installed
from preprocess.options import IngestOptions
from preprocess.plan import (
    CHECK,
    COLUMNS_STAGE,
    COUNT,
    ORDER,
    PARTITION_STAGE,
    check_longest,
    ids_stage,
    looks_at_label,
    needs_columns,
    partition_path,
    plan_memory,
    reads_columns,
    seeded_splits,
)
from preprocess.prepare import preparation_of, prepared
from preprocess.progress import Progress
from preprocess.relations import RelationStages
from preprocess.result import IngestPlan, IngestResult
from preprocess.reverse import with_reverses
from preprocess.run import Facts, Run
from preprocess.source import Source
from preprocess.sourcefiles import SourceFiles
from preprocess.stages.array_file import load_array, save_array
from preprocess.stages.classes import NodeClasses, source_classes
from preprocess.stages.columns import COLUMNS, DEGREES
from preprocess.stages.labels import (
    are_whole,
    label_dtype,
    label_pieces,
    labelled_bits,
    seeded_ids,
    split_key,
)
from preprocess.stages.rows import Emit, place_rows
from preprocess.stages.scan import check_edge_splits, check_splits
from preprocess.work import STORE, WorkFolder, check_free, sign

_PARTITIONING, _RATE = "partitioning", "edges_per_s"  # in the facts of a stage
_PIPELINE = 2  # goes up when stages or their files change: nothing older is taken over


def ingest(
    source: Source,
    target: Path,
    options: IngestOptions,
    progress: Progress,
    fresh: bool = False,
    partition: NDArray[np.uint32] | None = None,
    files: SourceFiles | None = None,
) -> IngestResult:
    """Write the store.

    fresh      begin anew, whatever an earlier run has left
    partition  uint32 (num_nodes,)   of each node, numbered through all types: nodes stand
               partition by partition
    files      of the source, as they were when it was opened; None: as they are now

    Raises BadInput, also for a file that changes meanwhile, StoreExists, BudgetTooSmall, StoreBusy
    and, where there is too little room from the start, OutOfSpace: nothing is left behind then.
    Where the disk fills up later, or the run is stopped, finished stages stay, and the same call
    goes on behind them.
    """
    check_free(target, target, preparation_of(target))
    files = files or SourceFiles(source.files)
    with prepared(source, target, options.mem_bytes, progress, fresh, files):
        return _write_store(source, files, target, options, progress, fresh, partition)


def _write_store(
    source: Source,
    files: SourceFiles,
    target: Path,
    options: IngestOptions,
    progress: Progress,
    fresh: bool,
    partition: NDArray[np.uint32] | None,
) -> IngestResult:
    give_back_freed()
    options = replace(options, partitioned=partition is not None)
    options.check()
    if options.partitioned and options.partition is not None:
        raise BadInput.at(
            "--partitions", options.partition.num_partitions, "none, as a partition is given",
            "leave one of them out",
        )  # fmt: skip
    source = with_reverses(source, options)
    contents = list_contents(source, options)
    facts = _sign_facts(source, options, partition)

    def stages(run: Run) -> "IngestStages":
        return IngestStages(run, partition)

    return write_store(source, files, contents, target, options, progress, facts, fresh, stages)


def write_store(
    source: Source,
    files: SourceFiles,
    contents: Contents,
    target: Path,
    options: IngestOptions,
    progress: Progress,
    signed: Facts,
    fresh: bool,
    stages: Callable[[Run], "IngestStages"],
) -> IngestResult:
    """Run the stages in a work folder beside the target.

    files    of the source, as they were when it was opened
    signed   everything that decides the store's bytes, files aside
    stages   makes them

    Raises what `ingest` does.
    """
    check_installed(options.partition)
    planned = whole_plan(contents, options, source.where)
    memory = plan_memory(contents, options)
    _check_disk(planned, target)
    facts = {"source": source.where, "layout": source.layout, "store": str(target)}
    progress.begin(planned.stages, {**facts, "plan": msgspec.to_builtins(planned)})
    work = WorkFolder(target, sign(signed, files.digest()), fresh)
    try:
        with (
            work,
            files.unchanged(),
            StoreWriter(
                target,
                block_bytes=options.block_bytes,
                buffer_bytes=memory.buffer,
                folder=work.path / STORE,
            ) as writer,
        ):
            run = Run(source, files, contents, options, memory, work, writer, progress)
            return stages(run).run()
    except (OutOfSpace, OSError, KeyboardInterrupt, SystemExit) as error:
        if not work.path.exists():
            raise
        left = f"what {len(work.stages)} stages made stays in {work.path}: the same command goes on"
        if isinstance(error, OutOfSpace):
            sizes = [format_bytes(n) for n in (planned.store_bytes, planned.temporary_bytes)]
            need = f"the store takes {sizes[0]}, its making {sizes[1]} more"
            raise OutOfSpace(f"{error}; {need}; {left}") from error
        progress.line(left)
        raise


class IngestStages:
    """The stages of one run."""

    def __init__(self, run: Run, partition: NDArray[np.uint32] | None) -> None:
        self._run, self._partition = run, partition
        self._graph = GraphStages(
            run.source, run.contents, run.options, run.memory.share, run.work.path, run.progress
        )
        self._starts: list[int] = []  # of each (type, partition)
        self._partitioning: Partitioning | None = None
        self._edges_per_s = 0.0

    def run(self) -> IngestResult:
        """All stages, in the order of `plan.plan_steps`."""
        run, contents = self._run, self._run.contents
        labels = run.stage(CHECK, self._check, made=self._label_files())["labels"]
        longest = run.stage(COUNT, lambda: {"longest": self._graph.count()}, made=self._counts())
        check_longest(contents, run.options, run.memory, longest["longest"])
        if run.options.renames:
            self._order(longest["longest"], labels)
        relations = tuple(self._write_relation(n) for n in range(len(contents.relations)))
        types = tuple(
            self._write_type(number, labels.get(t.name, {}))
            for number, t in enumerate(contents.types)
        )
        manifest = self._manifest(types, relations)
        if copies_nodes(run.options):
            self._graph.nodes = None
            manifest = InfluenceStages(run, manifest).write()
        run.files.check()  # nothing reads the source from here on
        errors = quantization_errors(run)
        manifest = run.writer.settle(manifest) if run.options.hops is None else self._hops(manifest)
        run.writer.appear()
        return IngestResult(manifest, tuple(run.results), errors, self._edges_per_s)

    def _hops(self, manifest: Manifest) -> Manifest:
        """Hops in the store that is about to appear; an earlier run may have added them.

        Raises BadInput: there cannot be any; the store appears without.
        """
        run, path = self._run, self._run.work.path / STORE
        assert run.options.hops is not None
        self._graph.nodes = None
        held = _held_manifest(path)
        if held is not None and any(t.hops for t in held.types):
            with StoreExtender(path, run.memory.buffer):  # removes what that run has left
                return held
        run.writer.settle(manifest)
        try:
            result = make_hops(path, run.options.hops, run.progress, run.options.mem_bytes)
        except BadInput as error:
            run.writer.appear()
            raise BadInput(f"{error}; {run.writer.path} is there, without hops") from error
        run.results += result.stages
        return result.manifest

    def _counts(self) -> list[str]:
        return [counts_file(i) for i in range(len(self._run.contents.relations))]

    def _splits_type(self, node_type: TypeContents) -> bool:
        """Whether a seeded split is to be made."""
        return bool(seeded_splits(node_type, 0, self._run.options))

    def _label_files(self) -> list[str]:
        types = enumerate(self._run.contents.types)
        return [_bits_file(number) for number, t in types if self._splits_type(t)]

    def _check(self) -> Facts:
        """Splits are sound; labels are looked at where their dtype, or a split, depends on them."""
        run = self._run
        labels: dict[str, Facts] = {}
        for number, t in enumerate(run.contents.types):
            check_splits(run.source, t.name)
            if t.label is None or not looks_at_label(t.label, run.options):
                continue
            rows, share = t.label.source, run.memory.share
            whole = rows.dtype.kind == "f" and are_whole(run.source, rows, share)
            labels[t.name] = {"dtype": label_dtype(rows, whole)}
            if self._splits_type(t):
                bits = labelled_bits(run.source, rows, label_dtype(rows, whole), share)
                labels[t.name]["labelled"] = int(np.bitwise_count(bits).sum(dtype=np.int64))
                save_array(run.path(_bits_file(number)), bits)
        for r in run.contents.relations:
            check_edge_splits(run.source, r.source)
        return {"labels": labels}

    def _order(self, longest_bytes: int, labels: dict[str, Facts]) -> None:
        run, graph = self._run, self._graph
        in_memory = needs_columns(run.options)
        if run.work.find(ORDER) is None and needs_columns(run.options):
            in_memory = run.work.find(COLUMNS_STAGE) is None and graph.fits(longest_bytes)
            if not in_memory:
                run.stage(
                    COLUMNS_STAGE, lambda: graph.columns(in_memory=False), made=[COLUMNS, DEGREES]
                )

        def hold() -> None:
            if in_memory and not graph.holds_columns:
                graph.columns(in_memory=True)

        def partition() -> Facts:
            hold()
            report, rate = graph.partition(self._classes(labels))
            return {_PARTITIONING: msgspec.to_builtins(report), _RATE: rate}

        def body() -> Facts:
            hold()
            return {"starts": graph.order(self._partition)}

        spent = [] if reads_columns(run.contents) else [COLUMNS, DEGREES]
        if run.options.partition is not None:
            found = run.stage(PARTITION_STAGE, partition, made=[PARTITION])
            self._partitioning = msgspec.convert(found[_PARTITIONING], Partitioning)
            self._edges_per_s = float(found[_RATE])
            spent.append(PARTITION)
        facts = run.stage(ORDER, body, made=[RANK], spent=spent)
        self._starts = facts["starts"]
        if graph.nodes is None:
            graph.load_order()

    def _classes(self, labels: dict[str, Facts]) -> NodeClasses:
        """Those of training nodes, as the source or a seeded split has them."""
        run = self._run
        numbers = {t.name: number for number, t in enumerate(run.contents.types)}

        def seeded(t: TypeContents) -> Callable[[], Iterator[NDArray[np.int64]]] | None:
            if not self._splits_type(t):
                return None
            return partial(self._seeded, numbers[t.name], labels[t.name]["labelled"], 0)

        dtypes = {name: facts["dtype"] for name, facts in labels.items()}
        return source_classes(run.source, run.contents, dtypes, run.memory.share, seeded)

    def _write_relation(self, number: int) -> Relation:
        return RelationStages(self._run, self._graph, number).write()

    def _write_type(self, number: int, label_facts: Facts) -> NodeType:
        run, t = self._run, self._run.contents.types[number]
        self._write_ids(t)
        place = self._placing(t)
        for rows in t.features:
            write_features(run, rows, place)
        label = None
        if t.label is not None:
            label = t.label.array
            if label_facts:
                label = msgspec.structs.replace(label, dtype=label_facts["dtype"])
            pieces = label_pieces(run.source, t.label.source, label.dtype, run.memory.share)
            write_placed(run, label, pieces, place)
        for rows in t.splits:
            write_split(run, rows)
        splits = {r.source.name: r.array for r in t.splits}
        if self._splits_type(t):
            splits = self._seeded_splits(number, label_facts["labelled"])
        num_partitions, path = self._write_partitions(number)
        return NodeType(
            name=t.name,
            first=t.first,
            num_nodes=t.num_nodes,
            original_id=t.original_id,
            store_id=t.store_id,
            label=label,
            features={r.source.name: r.array for r in t.features},
            splits=splits,
            num_partitions=num_partitions,
            partition_offsets_path=path,
        )

    def _write_ids(self, t: TypeContents) -> None:
        nodes = self._graph.nodes
        order = nodes and nodes.order[t.first : t.stop]
        rank = nodes and nodes.rank[t.first : t.stop]
        write_ids(self._run, ids_stage(t), t.original_id, order, t.store_id, rank, t.first)

    def _placing(self, t: TypeContents) -> Place:
        """Brings rows of a type into the order of its nodes."""
        run, nodes = self._run, self._graph.nodes
        rank = nodes and nodes.rank[t.first : t.stop]
        local = rank - np.uint32(t.first) if rank is not None and t.first else rank

        def place(pieces: Iterator[NDArray[Any]], array: RowArray, emit: Emit) -> None:
            place_rows(pieces, array, local, run.memory.share, run.work.path, emit, run.progress)

        return place

    def _seeded_splits(self, number: int, total: int) -> dict[str, RowArray]:
        run, t = self._run, self._run.contents.types[number]
        arrays = seeded_splits(t, total, run.options)
        splits = dict(zip(SPLITS, arrays, strict=True))
        for i, array in enumerate(arrays):
            ids = self._seeded(number, total, i)
            write_in_order(run, array, ids, [_bits_file(number)] if i == len(arrays) - 1 else [])
        return splits

    def _seeded(self, number: int, total: int, split: int) -> Iterator[NDArray[np.int64]]:
        """Ids of a seeded split of a type."""
        run, t = self._run, self._run.contents.types[number]
        path = run.path(_bits_file(number))  # it is gone when an earlier run has made the splits
        bits = load_array(path, np.uint8) if path.exists() else np.empty(0, np.uint8)
        places = split_sizes(run.options.split, total)[split]
        return seeded_ids(bits, t.num_nodes, total, places, split_key(run.options.seed, number))

    def _write_partitions(self, number: int) -> tuple[int, str]:
        """(partitions, path of their offsets) of a type."""
        run, t = self._run, self._run.contents.types[number]
        if not run.options.in_partitions:
            return 0, ""
        count = (len(self._starts) - 1) // len(run.contents.types)
        offsets = np.array(self._starts[number * count : (number + 1) * count + 1], np.uint64)
        path = partition_path(t)
        run.stage(path, lambda: run.writer.side(path, offsets), arrays=[path])
        return count, path

    def _manifest(self, types: tuple[NodeType, ...], relations: tuple[Relation, ...]) -> Manifest:
        options = self._run.options
        return Manifest(
            format=FORMAT_VERSION,
            block_bytes=options.block_bytes,
            id_dtype=self._run.contents.id_dtype,
            types=types,
            relations=relations,
            order=options.order,
            undirected=options.undirected,
            duplicates="drop" if options.drop_equal else "keep",
            self_loops=options.self_loops,
            partitioning=self._partitioning,
        )


def _held_manifest(path: Path) -> Manifest | None:
    """Of a store that an earlier run has settled."""
    try:
        return open_store(path).manifest
    except NotAStore:
        return None


def _bits_file(number: int) -> str:
    """Name of the temporary file of the labelled nodes of a type."""
    return f"labelled-{number}"


def _sign_facts(
    source: Source, options: IngestOptions, partition: NDArray[np.uint32] | None
) -> Facts:
    """Of everything that decides the store's bytes, files aside."""
    return {
        "layout": source.layout,
        "num_nodes": dict(source.num_nodes),
        "relations": [list(r[:4]) for r in source.relations],
        "partition": 0 if partition is None else google_crc32c.value(bytes(byte_view(partition))),
        **option_facts(options),
    }


def option_facts(options: IngestOptions) -> Facts:
    """The same, of the pipeline and the options."""
    return {
        "pipeline": [_PIPELINE, FORMAT_VERSION],
        "options": {k: v for k, v in asdict(options).items() if k != "mem_bytes"},
    }


def _check_disk(planned: IngestPlan, target: Path) -> None:
    """Raises OutOfSpace before anything is written, where the store cannot fit."""
    store, temporary = planned.store_bytes, planned.temporary_bytes
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    left = target.absolute().with_name(f".{target.name}.work")  # of an earlier run: room too
    taken = sum(p.stat().st_blocks * 512 for p in left.rglob("*") if p.is_file())
    free = shutil.disk_usage(folder).free + taken
    if store + temporary > free:
        raise OutOfSpace(
            f"{folder}: found {format_bytes(free)} free, expected {format_bytes(store)} "
            f"for the store and {format_bytes(temporary)} for its making; free some "
            "space, or choose another disk"
        )


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
