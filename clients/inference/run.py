"""Inference layer by layer: stages, each of which reads rows and graph in order.

A layer is computed in two passes (docs/derivations/inference.md).  The first reads the rows of all
nodes and computes what each gives to its neighbors and to its own result.  The second reads the
graph, adds up over each node's neighbors, whose share is in memory, and writes the rows of the next
layer.  What does not fit memory is computed some columns at a time.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blockstore.errors import BudgetTooSmall
from blockstore.format import RowArray
from blockstore.store import Store
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from clients.inference.model import ModelSteps, Relation, steps_of
from clients.inference.passing import Passing, shared_width, target_width
from clients.inference.plan import BUFFER_BYTES, InferencePlan, LayerPlan, Slice, plan_inference
from clients.inference.results import Result, ResultRun, find_result
from clients.inference.rows import STEP_ROWS, RowCursor, RowFolder, row_array, whole_columns
from clients.inference.senders import Places, find_senders
from clients.inference.source import find_store
from clients.models import OrderedLayer
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import Ran, StageResult
from preprocess.pipeline.stage import Cost, RunPlan, Stage, resumable
from preprocess.pipeline.work import STORE, WorkFolder, sign

_PIPELINE = 1  # goes up when stages or their files change: nothing older is taken over
_PASSING = "passing"  # a folder for what only one layer needs


@dataclass(frozen=True, slots=True)
class InferenceResult(Ran):
    """What was computed, and the bytes that each stage read and wrote."""

    out: str
    num_rows: int
    num_out: int
    plan: InferencePlan
    stages: tuple[StageResult, ...]  # those of earlier runs included

    def __str__(self) -> str:
        return (
            f"{self.out}: {self.num_rows:,} rows of {self.num_out}, {self.elapsed_s:.1f} s, "
            f"{format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} written, "
            f"at most {format_bytes(self.peak_bytes)} of memory"
        )


def layerwise(
    model: nn.Module,
    endpoint: str | Path,
    out: str | Path,
    *,
    split: str = "",
    node_type: str = "",
    store: str = "",
    mem_bytes: int = 2 << 30,
    progress: Progress | None = None,
) -> InferenceResult:
    """Compute what a model gives for all nodes of a store, each with all of its neighbors.

    model       of `clients.models`, without dropout here; its dtype is that of the computation
    endpoint    of a daemon of this machine, which tells where its store lies, or a store's path
    out         FILE.npy: row i is that of the node with original id i; FILE.parquet: columns `id`
                and `rows`; array:NAME: an array of features that the store gets
    split       rows of these nodes alone, in their order; with FILE.parquet
    node_type   whose rows are wanted, if the store has several types with labels
    store       its name, if the daemon serves several
    mem_bytes   of this process; it changes no byte of the result

    Returns what was read and written, and the time it took.  Stopped or killed, the same call goes
    on after the last layer that was finished.

    Raises Refused, NoDaemon, BadInput, BudgetTooSmall, StoreExists, OutOfSpace, CorruptBlock.
    """
    opened = find_store(str(endpoint), store)
    opened.check_whole("inference")
    steps = steps_of(model, opened.manifest, node_type)
    result = find_result(str(out), opened, steps, split)
    shown = Progress() if progress is None else progress
    plan = plan_inference(steps, opened.manifest, mem_bytes)
    senders, ahead = _find_senders(opened, steps, plan, shown)
    counts = {relation: int(places[-1]) for relation, places in senders.items()}
    try:
        smaller = plan_inference(steps, opened.manifest, mem_bytes, counts)
    except BudgetTooSmall:  # the places themselves have no room
        smaller = None
    if smaller is not None and smaller.num_slices <= plan.num_slices:
        plan = smaller
    else:
        senders = {}
    made = _Inference(opened, steps, plan, result, senders)
    stages = made.stages()
    facts = {
        "inference": _PIPELINE, "store": opened.manifest.fingerprint, "model": _digest(model),
        "slices": [[some.stop for some in p.slices] for p in plan.layers],
    }  # fmt: skip
    with (
        resumable(result.target, sign(facts, b""), shown, RunPlan.of(stages)) as work,
        StoreWriter(
            work.path / "whole", block_bytes=opened.manifest.block_bytes, folder=work.path / STORE,
            buffer_bytes=BUFFER_BYTES,
        ) as writer,
    ):  # fmt: skip
        run = InferenceRun(work, shown, opened, writer, plan.share)
        run.execute(stages)
        found = (*ahead, *run.results)
        return InferenceResult(str(out), result.num_rows, steps.num_out, plan, found)


def _find_senders(
    store: Store, steps: ModelSteps, plan: InferencePlan, progress: Progress
) -> tuple[dict[Relation, Places], list[StageResult]]:
    """Of relations of layers that do not fit memory, and what it took to find them.

    A target that gets its own part from what it gives as a source must be among these: such
    relations are left out.
    """
    tight = (s for s, p in zip(steps.steps, plan.layers, strict=True) if not p.resident)
    wanted = {r for step in tight for r, own in step.layers.items() if not shared_width(r, own)}
    types = {t.name: t for t in store.manifest.types}
    senders: dict[Relation, Places] = {}
    if not wanted:
        return senders, []
    with progress.recorded("sources with edges") as took:
        for stored in store.manifest.relations:
            relation = (stored.src, stored.name, stored.dst)
            if relation in wanted:
                places = find_senders(store, stored, types[stored.src], progress)
                if places is not None:
                    senders[relation] = places
    return senders, [took.result()]


class InferenceRun(ResultRun):
    """The store that is read, and rows of layers that are over."""

    def __init__(
        self, work: WorkFolder, progress: Progress, store: Store, writer: StoreWriter, share: int
    ) -> None:
        super().__init__(work, progress, store, share, writer)
        self.hidden = RowFolder(writer, work.path / STORE)


class _LayerInput(NamedTuple):
    """Where rows of a type lie, and what they pass through before a layer has them."""

    arrays: tuple[RowArray, ...]  # side by side; (): the type has no features
    of_store: bool
    enter: nn.Module | None


class _Inference:
    """The stages: a layer each, then the result."""

    def __init__(
        self,
        store: Store,
        steps: ModelSteps,
        plan: InferencePlan,
        result: Result,
        senders: Mapping[Relation, Places],
    ) -> None:
        self._steps, self._plan, self._result, self._senders = steps, plan, result, senders
        self._types = {t.name: t for t in store.manifest.types}
        self._relations = {(r.src, r.name, r.dst): r for r in store.manifest.relations}
        self._block_bytes = store.manifest.block_bytes
        self._dtype = torch.empty(0, dtype=steps.dtype).numpy().dtype

    def stages(self) -> list[Stage[InferenceRun]]:
        rows = {
            name: _LayerInput((t.features["x"],) if self._steps.widths[name] else (), True, enter)
            for name, enter in self._steps.enter.items()
            for t in [self._types[name]]
        }
        made: list[Stage[InferenceRun]] = []
        for number, layer in enumerate(self._plan.layers):
            after = rows | self._hidden(number, layer)
            arrays = [a.path for name in after if after[name] != rows[name] for a in after[name][0]]
            made.append(Stage(
                f"layer {number + 1} of {len(self._plan.layers)}", self._cost(number, rows, after),
                partial(self._layer, number, rows, after), arrays=arrays,
            ))  # fmt: skip
            rows = after
        last = rows[self._steps.output_type.name]
        passing = self._result.num_bytes
        cost = Cost(sum(map(_bytes, last.arrays)) + passing, 2 * passing, passing)
        return [
            *made,
            Stage(f"write {self._result.name}", cost, partial(self._write, last), ends=True),
        ]

    def _hidden(self, number: int, plan: LayerPlan) -> dict[str, _LayerInput]:
        """Rows that a layer writes, of the types that it computes: an array for each slice."""
        layers = self._steps.steps[number].layers
        layer = next(iter(layers.values()))
        found = {}
        for index, name in enumerate(self._types):
            if not any(dst == name for _, _, dst in layers):
                continue
            nodes, width = self._types[name].num_nodes, layer.num_out // layer.parts
            arrays = tuple(
                row_array(
                    f"layer{number + 1}/type{index}/columns{i}", self._dtype, nodes,
                    (some.stop - some.first) * width, self._block_bytes,
                )
                for i, some in enumerate(plan.slices)
            )  # fmt: skip
            found[name] = _LayerInput(arrays, False, None)
        return found

    def _cost(
        self, number: int, rows: dict[str, _LayerInput], after: dict[str, _LayerInput]
    ) -> Cost:
        layers, plan = self._steps.steps[number].layers, self._plan.layers[number]
        used = {name for src, _, dst in layers for name in (src, dst)}
        read = sum(_bytes(a) for name in used for a in rows[name].arrays)
        passing, item = 0, self._dtype.itemsize
        for relation, layer in layers.items():
            src, dst = (self._types[relation[i]].num_nodes for i in (0, 2))
            if relation in self._senders:
                src = int(self._senders[relation][-1])
            passing += dst * layer.parts * target_width(relation, layer) * item
            if not plan.resident:
                kept = plan.first_kept and relation == self._first_joined(number)
                parts = layer.parts - plan.slices[0].stop * kept
                passing += src * parts * layer.source_width * item
            read += self._relations[relation].num_blocks * self._block_bytes * len(plan.slices)
        written = sum(
            _bytes(a) for name in after if after[name] != rows[name] for a in after[name][0]
        )
        into = [dst for _, _, dst in layers]
        partial_sums = sum(
            (into.count(name) - 1) * _bytes(a) for name in set(into) for a in after[name].arrays
        )
        passing += partial_sums
        return Cost(read + passing, written + passing, passing)

    def _layer(
        self,
        number: int,
        rows: dict[str, _LayerInput],
        after: dict[str, _LayerInput],
        run: InferenceRun,
    ) -> None:
        plan, step = self._plan.layers[number], self._steps.steps[number]
        folder = run.path(_PASSING)
        shutil.rmtree(folder, ignore_errors=True)
        with (
            StoreWriter(
                folder / "whole", block_bytes=self._block_bytes, folder=folder,
                buffer_bytes=BUFFER_BYTES,
            ) as writer,
            torch.no_grad(),
        ):  # fmt: skip
            passing = Passing(
                RowFolder(writer, folder), plan, self._steps.dtype, self._block_bytes,
                self._first_joined(number) if plan.first_kept else None, self._senders,
            )  # fmt: skip
            for name in self._types:
                if any(name in (src, dst) for src, _, dst in step.layers):
                    self._project(run, step.layers, name, rows[name], passing)
            for i, some in enumerate(plan.slices):
                for name in self._types:
                    if after[name] != rows[name]:
                        self._join(run, number, name, some, after[name].arrays[i], passing)
        shutil.rmtree(folder)

    def _first_joined(self, number: int) -> Relation:
        """The relation whose sources a layer needs first."""
        layers = self._steps.steps[number].layers
        return next(r for name in self._types for r in layers if r[2] == name)

    def _project(
        self,
        run: InferenceRun,
        layers: Any,
        name: str,
        rows: _LayerInput,
        passing: Passing,
    ) -> None:
        """What nodes of a type give to their neighbors and to themselves."""
        first, nodes = 0, self._types[name].num_nodes
        with ExitStack() as held, run.progress.stage(f"rows of {name}", nodes, "nodes") as stage:
            takers = [
                taker
                for relation, layer in layers.items()
                for take, end in ((passing.take_sources, 0), (passing.take_targets, 2))
                if relation[end] == name
                for taker in take(held, relation, layer, nodes)
            ]
            for h in self._read(run, rows, nodes):
                for taker in takers:
                    taker(h, first)
                first += h.size(0)
                stage.advance(h.size(0))

    def _read(self, run: InferenceRun, rows: _LayerInput, num_nodes: int) -> Iterator[Tensor]:
        """Rows of a type as a layer has them, (STEP_ROWS, width) at a time."""
        store = run.store if rows.of_store else run.hidden.store
        with RowCursor(store, rows.arrays, self._dtype) as cursor:
            for first in range(0, num_nodes, STEP_ROWS):
                count = min(STEP_ROWS, num_nodes - first)
                if not rows.arrays:  # what enters is the same for all nodes
                    h = torch.ones(count, 1, dtype=self._steps.dtype)
                else:
                    h = torch.from_numpy(cursor.take(count))
                yield h if rows.enter is None else rows.enter(h)

    def _join(
        self,
        run: InferenceRun,
        number: int,
        name: str,
        some: Slice,
        out: RowArray,
        passing: Passing,
    ) -> None:
        """Rows of a type after the layer, of a slice of its parts: sums over relations into it."""
        step = self._steps.steps[number]
        into = [r for r in step.layers if r[2] == name]
        before: RowArray | None = None  # sums over the relations so far
        for i, relation in enumerate(into):
            last = i == len(into) - 1
            array = out if last else passing.sums(out, i)
            folder = run.hidden if last else passing.folder
            with ExitStack() as held:
                writer = held.enter_context(folder.write(array))
                sums = None
                if before is not None:
                    cursor = RowCursor(passing.folder.store, [before], self._dtype)
                    sums = held.enter_context(cursor)
                for found in self._joined(run, step.layers[relation], relation, some, passing):
                    if sums is not None:
                        found += torch.from_numpy(sums.take(found.size(0)))
                    writer.append((self._steps.activated(number, found) if last else found).numpy())
            before = array

    def _joined(
        self,
        run: InferenceRun,
        layer: OrderedLayer,
        relation: tuple[str, str, str],
        some: Slice,
        passing: Passing,
    ) -> Iterator[Tensor]:
        """What a layer gives to the targets of a relation, in order: rows of a slice."""
        stored, source = self._relations[relation], self._types[relation[0]]
        sources = passing.sources(relation, layer, some)
        parts, first = some.stop - some.first, 0
        shared, width = shared_width(relation, layer), target_width(relation, layer)
        with (
            passing.targets(relation, some) as targets,
            run.progress.stage(f"edges {relation[1]}", stored.num_edges, "edges") as stage,
        ):
            for degrees, ids in whole_columns(run.store, stored, source.first, source.num_nodes):
                dst = np.repeat(np.arange(degrees.size), degrees)
                edge_index = torch.from_numpy(np.stack([passing.places(relation, ids), dst]))
                own = torch.from_numpy(targets.take(degrees.size))
                own = own.view(degrees.size, parts, width)
                if shared:
                    given = sources[first : first + degrees.size, :, :shared]
                    own = torch.cat([given, own], -1)
                first += degrees.size
                yield layer.join(sources, own, edge_index)
                stage.advance(ids.size)

    def _write(self, last: _LayerInput, run: InferenceRun) -> None:
        def rows() -> Iterator[NDArray[Any]]:
            with torch.no_grad():  # of the thread that asks for the rows
                for h in self._read(run, last, self._steps.output_type.num_nodes):
                    leave = self._steps.leave
                    yield (h if leave is None else leave(h)).numpy()

        self._result.write(run, rows())


def _bytes(array: RowArray) -> int:
    return array.num_rows * array.row_bytes


def _digest(model: nn.Module) -> str:
    """32 hex digits over the names, shapes and values of a model."""
    total = hashlib.blake2b(type(getattr(model, "net", model)).__name__.encode(), digest_size=16)
    for name, value in model.state_dict().items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()
