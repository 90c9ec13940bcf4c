"""Pack epochs ahead of training: batches and their rows, beside the store, all or nothing.

The batches of an epoch are sampled in order, and their structure is appended to an array.  Rows
that most batches want stay in memory when the pack is served, and are written once.  Other rows are
written once for each group of batches that wants them: the rows of the store are read in order, and
each is copied to the blocks of these groups.  Nothing is read at random.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, PAGE_BYTES, ROOT, RowArray, row_geometry
from blockstore.kernels.order import count_nodes
from blockstore.root import digest
from blockstore.store import open_store
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from loaderd.memory.ledger import served_rows
from loaderd.sampling.packed.format import (
    PACK_VERSION,
    Pack,
    PackedEpoch,
    PackedGroup,
    make_record,
    num_pages,
    pack_path,
    page_array,
    place_pages,
    write_pack,
    write_record,
)
from loaderd.sessions.offline import OfflineSampler
from preprocess.files.array_file import ArrayFile, load_array, save_array
from preprocess.packs.fill import (
    BlocksWriter,
    PagesWriter,
    WantedRows,
    fill_groups,
    wanted_rows,
)
from preprocess.packs.plan import (
    MAX_WANTS,
    Grouping,
    PackEstimate,
    PackJob,
    PackOptions,
    choose_hot,
    count_levels,
    estimate_pack,
    hot_nodes,
)
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import Ran, StageResult
from preprocess.pipeline.stage import Cost, Facts, PipelineRun, RunPlan, Stage, resumable
from preprocess.pipeline.work import STORE, check_free, sign

_HOT = "hot"  # temporary file: store ids of the rows that stay
_PIPELINE = 2  # increased when stages or their files change: older work folders are not resumed


@dataclass(frozen=True, slots=True)
class PackResult(Ran):
    """The pack that was written, and the cost of the run."""

    path: Path
    pack: Pack
    seeds: int  # of an epoch
    epoch_bytes: int  # bytes that a session reads in an epoch, on average
    stages: tuple[StageResult, ...]  # those of earlier runs included

    def text(self) -> str:
        epochs, hot = self.pack.epochs, sum(self.pack.hot)
        groups = sum(len(epoch.groups) for epoch in epochs)
        batches = sum(len(epoch.nodes) for epoch in epochs)
        cold = sum(sum(group.rows) for epoch in epochs for group in epoch.groups)
        return "\n".join([
            f"{self.path}: {len(epochs)} epochs of {len(epochs[0].nodes):,} batches",
            f"rows        {hot:,} stay, {cold / batches:,.0f} a batch come in {groups:,} groups",
            f"an epoch    reads {format_bytes(self.epoch_bytes)}, "
            f"{self.epoch_bytes / self.seeds / 1e3:.1f} KB a seed",
            f"took        {self.elapsed_s:.1f} s; {self.moved}",
        ])  # fmt: skip


def pack_epochs(
    path: Path, options: PackOptions, progress: Progress, fresh: bool = False
) -> PackResult:
    """Pack epochs of the store at `path`, beside it.

    fresh   begin from scratch, whatever an earlier run has left

    Raises Refused, BudgetTooSmall, OutOfSpace, StoreBusy, StoreExists, NotAStore,
    CorruptBlock, BatchFailed.  If the disk fills up, or the run is stopped, finished stages stay
    beside the store, and the same call resumes after them.
    """
    job = PackJob.of(open_store(path), options)
    target = pack_path(job.store.path, job.resolved, options.request.world_size)
    check_free(target, target)
    with ExitStack() as sampling:
        sampler = sampling.enter_context(open_sampler(job))
        made = PackStages(job, estimate_pack(job, sampler))
        stages = made.stages()
        facts = {
            "packs": _PIPELINE, "resolved": msgspec.to_builtins(job.resolved),
            "world": options.request.world_size, "epochs": options.epochs,
            "hot": options.hot_bytes, "group": options.group,
        }  # fmt: skip
        planned = RunPlan.of(stages, made.result_bytes)._replace(facts={"pack": str(target)})
        with (
            resumable(target, sign(facts, b""), progress, planned, fresh) as work,
            StoreWriter(
                work.path / STORE, block_bytes=job.store.manifest.block_bytes,
                buffer_bytes=job.memory.buffer,
            ) as writer,
            ThreadPoolExecutor(options.threads, thread_name_prefix="pack") as pool,
        ):  # fmt: skip
            run = PackRun(work, progress, writer, sampler, pool)
            run.execute(stages[: made.first_rows])
            sampling.close()
            del sampler, run.sampler
            gc.collect()  # the engine's memory is held by reference cycles
            RunPlan.of(stages, made.exact_bytes(run)).check_disk(target)
            run.execute(stages[made.first_rows :])
            return made.result(run, target)


def open_sampler(job: PackJob) -> OfflineSampler:
    """The engine that samples."""
    return OfflineSampler(job.store, job.options.all_ranks(), job.memory.settings)


@dataclass(eq=False)
class PackRun(PipelineRun):
    writer: StoreWriter
    sampler: OfflineSampler
    pool: ThreadPoolExecutor


class PackStages:
    """The stages of a pack, separate for each epoch, so that a run can resume between epochs."""

    def __init__(self, job: PackJob, estimate: PackEstimate) -> None:
        self._job, self._estimate = job, estimate
        self._epochs = range(job.options.epochs)
        self._served = served_rows(job.store.manifest)
        self._type_of = {i: n for n, t in enumerate(job.types) for i in t.served}
        self._dtype = job.store.manifest.id_dtype
        self._ids = ITEM_BYTES[self._dtype]

    @property
    def result_bytes(self) -> int:
        return self._estimate.hot_bytes + len(self._epochs) * self._estimate.epoch_bytes

    @property
    def passing_bytes(self) -> int:
        """Bytes of rows read from the store: each array once for each epoch."""
        arrays = [rows.array for rows in self._served]
        return len(self._epochs) * sum(a.num_rows * a.row_bytes for a in arrays)

    def stages(self) -> list[Stage[PackRun]]:
        job, e = self._job, self._estimate
        nodes = job.store.manifest.num_nodes
        records = e.batches * e.record_bytes
        of_batches = self._ids * e.batches * e.nodes
        made: list[Stage[PackRun]] = []
        for epoch in self._epochs:
            files = {f"wants.{epoch}": 2 * nodes, f"nodes.{epoch}": of_batches}
            made.append(Stage(
                _sampled(epoch), Cost(0, records + of_batches), partial(self._sample, epoch),
                files, [f"wants.{epoch - 1}"] * (epoch > 0), [_structure(epoch)],
            ))  # fmt: skip
        width = min([sum(t.row_bytes) for t in job.types], default=1)
        last = self._epochs[-1]
        made.append(Stage(
            "choose rows that stay", Cost(2 * nodes), self._choose,
            {_HOT: self._ids * (e.hot_bytes // width)}, [f"wants.{last}"],
        ))  # fmt: skip
        listed = self._ids * e.batches * (e.cold_bytes // width)
        for epoch in self._epochs:
            made.append(Stage(
                _placed(epoch), Cost(2 * of_batches, listed), partial(self._place, epoch),
                {f"cold.{epoch}": listed}, [f"nodes.{epoch}"], [_places(epoch)],
            ))  # fmt: skip
        self.first_rows = len(made)
        for served, rows in enumerate(self._served):
            share = rows.array.row_bytes / sum(job.types[self._type_of[served]].row_bytes)
            read = rows.array.num_rows * rows.array.row_bytes
            for epoch in self._epochs:
                written = share * (e.batches * e.cold_bytes + e.hot_bytes * (epoch == 0))
                arrays = [_rows(served, which) for which in _filled_with(epoch)]
                body = partial(self._fill, served, epoch)
                name = _filled(rows.name, epoch)
                made.append(Stage(name, Cost(read, int(written)), body, arrays=arrays))
        made.append(Stage("pack", Cost(), self._commit, ends=True))
        return made

    # -- structure --------------------------------------------------------------------------------

    def _sample(self, epoch: int, run: PackRun) -> Facts:
        sampler, nodes = run.sampler, self._job.store.manifest.num_nodes
        wants = np.zeros(nodes, np.uint16)
        if epoch:
            wants = load_array(run.path(f"wants.{epoch - 1}"), np.uint16)
        steps = range(sampler.plan.num_steps)
        pages, counts = list[int](), list[int]()
        out = PagesWriter(run.writer, _structure(epoch))
        with (
            ArrayFile(run.path(f"nodes.{epoch}"), self._dtype) as listed,
            run.progress.stage(_sampled(epoch), len(steps), "batches") as stage,
        ):
            for sampled in sampler.batches(epoch, steps):
                structure, arrays = sampled.structure, sampled.arrays
                record = make_record(structure, arrays, self._job.dtypes)
                size = num_pages(record.num_bytes)
                raw = np.empty((size, PAGE_BYTES), np.uint8)
                write_record(record, raw.reshape(-1))
                out.append(raw)
                for piece in arrays.nodes:
                    count_nodes(piece, MAX_WANTS, wants)
                    listed.append(piece)
                pages.append(size)
                counts.append(structure.num_nodes)
                stage.advance(1)
        out.close()
        save_array(run.path(f"wants.{epoch}"), wants)
        return {"pages": pages, "nodes": counts}

    # -- places -----------------------------------------------------------------------------------

    def _choose(self, run: PackRun) -> Facts:
        wants = load_array(run.path(f"wants.{self._epochs[-1]}"), np.uint16)
        types = self._job.types
        levels = [count_levels(wants, t) for t in types]
        widths = [sum(t.row_bytes) for t in types]
        hot, rows = self._job.options.hot_bytes, list[int]()
        with ArrayFile(run.path(_HOT), self._dtype) as file:
            for t, share in zip(types, choose_hot(levels, widths, hot), strict=True):
                first = file.size
                for piece in hot_nodes(wants, t, share):
                    file.append(piece)
                rows.append(file.size - first)
        return {"rows": rows}

    def _place(self, epoch: int, run: PackRun) -> Facts:
        job, facts = self._job, run.facts(_sampled(epoch))
        counts, groups = facts["nodes"], list[list[Any]]()
        first = list(accumulate(counts, initial=0))
        grouping = Grouping(
            job.store.manifest.num_nodes,
            job.types,
            load_array(run.path(_HOT), self._dtype),
            job.options.group,
        )
        out = PagesWriter(run.writer, _places(epoch))
        with (
            ArrayFile(run.path(f"nodes.{epoch}"), self._dtype) as listed,
            ArrayFile(run.path(f"cold.{epoch}"), self._dtype) as cold,
            run.progress.stage(_placed(epoch), len(counts), "batches") as stage,
        ):

            def nodes_of(batch: int) -> NDArray[Any]:
                return listed.read(first[batch], counts[batch])

            for group in grouping.groups(len(counts), nodes_of):
                for batch in range(group.first, group.stop):
                    raw = np.zeros((place_pages(counts[batch]), PAGE_BYTES), np.uint8)
                    places = raw.reshape(-1).view(np.uint32)
                    np.take(grouping.place, nodes_of(batch), out=places[: counts[batch]])
                    out.append(raw)
                cold.append(group.nodes)
                groups.append([group.stop - group.first, list(group.rows)])
                stage.advance(group.stop - group.first)
        out.close()
        return {"groups": groups}

    # -- rows -------------------------------------------------------------------------------------

    def _groups(self, epoch: int | None, run: PackRun) -> list[tuple[int, ...]]:
        """Rows of each type in each group; rows that stay (`epoch` None) form a single group."""
        if epoch is None:
            return [tuple(run.facts(_CHOSEN)["rows"])]
        return [tuple(rows) for _, rows in run.facts(_placed(epoch))["groups"]]

    def _array(self, served: int, epoch: int | None, run: PackRun) -> RowArray:
        """The array of an epoch's rows, in which each group begins with a new block."""
        rows, number = self._served[served].array, self._type_of[served]
        per_block = row_geometry(rows, self._job.store.manifest.block_bytes).rows_per_block
        blocks = sum(-(-group[number] // per_block) for group in self._groups(epoch, run))
        return RowArray(_rows(served, epoch), rows.dtype, blocks * per_block, rows.row_shape)

    def exact_bytes(self, run: PackRun) -> int:
        """Bytes on disk of all arrays, after the rows to write have been chosen."""
        block, total = self._job.store.manifest.block_bytes, 0
        for array in self.pack(run).arrays():
            geometry = row_geometry(array, block)
            total += geometry.num_blocks * geometry.slot_bytes
        return total

    def _fill(self, served: int, epoch: int, run: PackRun) -> None:
        job, number = self._job, self._type_of[served]
        rows, t = self._served[served].array, job.types[number]
        title = _filled(self._served[served].name, epoch)
        with ExitStack() as stack:
            wanted = list[WantedRows]()
            for which in _filled_with(epoch):
                array = self._array(served, which, run)
                out = stack.enter_context(BlocksWriter(run.writer, array))
                name = _HOT if which is None else f"cold.{which}"
                ids = stack.enter_context(ArrayFile(run.path(name), self._dtype))
                wanted += wanted_rows(ids, self._groups(which, run), number, out)
            stage = stack.enter_context(run.progress.stage(title, rows.num_rows, "rows"))
            fill_groups(job.store, rows, t.first, wanted, run.pool, job.memory, stage)

    # -- the end ----------------------------------------------------------------------------------

    def pack(self, run: PackRun) -> Pack:
        job = self._job
        block, served = job.store.manifest.block_bytes, range(len(self._served))
        epochs = []
        for epoch in self._epochs:
            sampled, placed = run.facts(_sampled(epoch)), run.facts(_placed(epoch))
            pages = sum(map(place_pages, sampled["nodes"]))
            epochs.append(PackedEpoch(
                structure=page_array(_structure(epoch), sum(sampled["pages"]), block),
                places=page_array(_places(epoch), pages, block),
                rows=tuple(self._array(s, epoch, run) for s in served),
                pages=tuple(sampled["pages"]),
                nodes=tuple(sampled["nodes"]),
                groups=tuple(PackedGroup(n, tuple(rows)) for n, rows in placed["groups"]),
            ))  # fmt: skip
        return Pack(
            format=PACK_VERSION,
            resolved=msgspec.structs.replace(job.resolved, cycle=0),
            world_size=job.options.request.world_size,
            block_bytes=block,
            dtypes=job.dtypes,
            hot=tuple(run.facts(_CHOSEN)["rows"]),
            hot_rows=tuple(self._array(s, None, run) for s in served),
            epochs=tuple(epochs),
        )

    def _commit(self, run: PackRun) -> None:
        files = run.writer.digests | {ROOT: digest((run.result / ROOT).read_bytes())}
        bound = {name: files[name] for name in sorted(files)}
        write_pack(run.result, msgspec.structs.replace(self.pack(run), files=bound))
        job = self._job
        run.appear(pack_path(job.store.path, job.resolved, job.options.request.world_size))

    def result(self, run: PackRun, target: Path) -> PackResult:
        pack, block = self.pack(run), self._job.store.manifest.block_bytes
        total = 0
        for array in pack.arrays()[len(pack.hot_rows) :]:
            total += row_geometry(array, block).num_pages * PAGE_BYTES
        each = total // len(pack.epochs)
        return PackResult(target, pack, self._job.resolved.num_seeds, each, run.results)


_CHOSEN = "choose rows that stay"


def _structure(epoch: int) -> str:
    return f"structure/{epoch}"


def _places(epoch: int) -> str:
    return f"places/{epoch}"


def _rows(served: int, epoch: int | None) -> str:
    return f"hot/{served}" if epoch is None else f"rows/{epoch}/{served}"


def _sampled(epoch: int) -> str:
    return f"sample epoch {epoch}"


def _placed(epoch: int) -> str:
    return f"places of epoch {epoch}"


def _filled(name: str, epoch: int) -> str:
    return f"{name} of epoch {epoch}"


def _filled_with(epoch: int) -> list[int | None]:
    """Epochs whose rows are filled in this pass: None, in the first, are the rows that stay."""
    return [None, epoch] if epoch == 0 else [epoch]
