"""Layer-wise inference as resumable stages, each of which reads rows and graph in order."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from blockstore.store import Store
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from clients.inference.by_source import sorting_stage
from clients.inference.edges import find_connected
from clients.inference.layer import Inputs, LayerStage, num_bytes
from clients.inference.layer_pull import PulledLayer
from clients.inference.layer_push import PushedLayer
from clients.inference.model import ModelSteps, steps_of
from clients.inference.plan import (
    BUFFER_BYTES,
    InferencePlan,
    LayerPlan,
    Slice,
    plan_inference,
)
from clients.inference.results import InferenceRun, Result, find_result
from clients.inference.source import find_store
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import Ran, StageResult
from preprocess.pipeline.stage import Cost, RunPlan, Stage, resumable
from preprocess.pipeline.work import STORE, sign

_MUCH = 1.1  # reads above this multiple of rows and graph are reported
_PIPELINE = 4  # increased when stages or their files change: older work is not resumed


@dataclass(frozen=True, slots=True)
class InferenceResult(Ran):
    """What was computed, and the bytes that each stage read and wrote."""

    out: str
    num_rows: int
    num_out: int
    plan: InferencePlan
    stages: tuple[StageResult, ...]  # including those of earlier runs

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
    """Compute a model's output for all nodes of a store, each with all of its neighbors.

    model       of `clients.models`, run without dropout; its dtype is that of the computation
    endpoint    of a daemon on this machine, which tells where its store lies, or a store's path
    out         FILE.npy: row i is that of the node with original id i; FILE.parquet: columns `id`
                and `rows`; array:NAME: an array of features that is added to the store
    split       rows of these nodes alone, in their order; with FILE.parquet
    node_type   whose rows are wanted, if the store has several types with labels
    store       its name, if the daemon serves several
    mem_bytes   memory of this process; it changes no byte of the result

    Returns the bytes read and written, and the time taken.  If stopped or killed, the same call
    continues after the last finished layer.

    Raises Refused, NoDaemon, BadInput, BudgetTooSmall, StoreExists, OutOfSpace, CorruptBlock.
    """
    opened = find_store(str(endpoint), store)
    opened.check_whole("inference")
    steps = steps_of(model, opened.manifest, node_type)
    result = find_result(str(out), opened, steps, split)
    shown = Progress() if progress is None else progress
    with shown.recorded("nodes with edges") as took:
        inputs, plan = _plan(opened, steps, mem_bytes)
    layers, ahead = _layers(inputs, plan.layers), []
    if plan.tile_edges:
        ahead.append(sorting_stage(opened, plan.tile_edges))
    stages = [*ahead, *_stages(inputs, layers, result)]
    _tell(layers, ahead, shown)
    facts = {
        "inference": _PIPELINE, "store": opened.manifest.fingerprint, "model": _digest(model),
        "slices": [[some.stop for some in p.slices] for p in plan.layers],
    }  # fmt: skip
    with (
        resumable(result.target, sign(facts, b""), shown, RunPlan.of(stages)) as work,
        StoreWriter(
            work.path / STORE, block_bytes=opened.manifest.block_bytes, buffer_bytes=BUFFER_BYTES
        ) as writer,
    ):  # fmt: skip
        run = InferenceRun(work, shown, opened, writer, plan.share)
        run.execute(stages)
        found = (took.result(), *run.results)
        return InferenceResult(str(out), result.array.num_rows, steps.num_out, plan, found)


def _plan(store: Store, steps: ModelSteps, mem_bytes: int) -> tuple[Inputs, InferencePlan]:
    """Decide how layers are computed, and what is in memory."""
    connected = find_connected(store, steps.numpy_dtype if steps.adds else None)
    if not _pushes(Inputs(store, steps, connected)):
        connected = connected._replace(shares={})
    plan = plan_inference(steps, store.manifest, mem_bytes, connected)
    return Inputs(store, steps, connected), plan


def _pushes(inputs: Inputs) -> bool:
    """Whether to push layers: if that reads less, assuming that all fits in memory.  It changes the
    rounding of sums, so it must not depend on the memory.

    Sorting edges by source reads the graph once more; pulling passes the targets' contributions
    through files in each layer.
    """
    connected, steps = inputs.connected, inputs.steps.steps
    if not connected.shares or connected.reverses:
        return bool(connected.shares)
    whole = [
        LayerPlan((Slice(0, next(iter(s.layers.values())).parts),), frozenset(s.layers))
        for s in steps
    ]
    pulled = Inputs(inputs.store, inputs.steps, connected._replace(shares={}))
    passing = sum(layer.cost.passing for layer in _layers(pulled, whole))
    return sorting_stage(inputs.store, 1 << 62).cost.read <= passing


def _layers(inputs: Inputs, plans: Sequence[LayerPlan]) -> list[LayerStage]:
    layers: list[LayerStage] = []
    kind, rows = PushedLayer if inputs.connected.shares else PulledLayer, inputs.first_rows()
    for number, of_layer in enumerate(plans):
        layers.append(kind(inputs, number, of_layer, rows))
        rows = layers[-1].after
    return layers


def _tell(layers: list[LayerStage], ahead: list[Stage[InferenceRun]], progress: Progress) -> None:
    """Report sorting, and each layer that will read much more than its rows and graph once
    each."""
    for stage in ahead:
        progress.line(
            f"{stage.name}: {format_bytes(stage.cost.read)} of the graph will be read, and "
            f"{format_bytes(stage.cost.written)} written, once for all layers"
        )
    for number, layer in enumerate(layers, 1):
        cost, slices = layer.cost, layer.num_slices
        if cost.read <= _MUCH * layer.min_bytes:
            continue
        progress.line(
            f"layer {number} of {len(layers)} will read {format_bytes(cost.read)}, "
            f"{cost.read / layer.min_bytes:.2f} times its rows and graph: "
            f"{format_bytes(cost.passing)} pass through files, and the graph is read {slices} times"
            + ("; a larger --mem takes less" if slices > 1 else "")
        )


def _stages(inputs: Inputs, layers: list[LayerStage], result: Result) -> list[Stage[InferenceRun]]:
    """One stage per layer, then one that writes the result."""
    name, leave = inputs.steps.output_type.name, inputs.steps.leave
    last, passing = layers[-1].after[name], num_bytes(result.array)

    def write(run: InferenceRun) -> None:
        def rows() -> Iterator[NDArray[Any]]:
            with torch.no_grad():  # set per thread: for the one that takes the rows
                for h in inputs.read(run.hidden, name, last):
                    yield leave(h).numpy()

        result.write(run, rows())

    cost = Cost(sum(map(num_bytes, last.files)) + passing, 2 * passing, passing)
    return [
        *(
            Stage(
                f"layer {number} of {len(layers)}", layer.cost, layer.run,
                arrays=[array.path for array in layer.made],
            )
            for number, layer in enumerate(layers, 1)
        ),
        Stage(f"write {result.name}", cost, write, ends=True),
    ]  # fmt: skip


def _digest(model: nn.Module) -> str:
    """32 hex digits over the names, shapes and values of a model."""
    total = hashlib.blake2b(type(getattr(model, "net", model)).__name__.encode(), digest_size=16)
    for name, value in model.state_dict().items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()
