"""One layer, in two passes (docs/derivations/inference.md).

The first reads the rows of all nodes and computes what each gives to its neighbors and to its own
result; that of nodes without edges in is done then.  The second reads the graph, adds up over each
node's neighbors, whose share is in memory, and writes the rows of the next layer.  What does not
fit memory is computed some columns at a time.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from blockstore.format import NodeType, RowArray
from blockstore.format import Relation as StoredRelation
from blockstore.store import Store
from blockstore.writer import StoreWriter
from clients.inference.edges import Connected, whole_columns
from clients.inference.model import ModelSteps, Relation
from clients.inference.plan import BUFFER_BYTES, LayerPlan, Slice
from clients.inference.results import InferenceRun
from clients.inference.rows import STEP_ROWS, RowCursor, row_array, store_of
from clients.models import OrderedLayer
from preprocess.pipeline.stage import Cost

_FOLDER = "passing"  # for what only one layer needs
_Take = Callable[[Tensor, int], None]  # rows as the layer has them, and the number of the first
_Columns = dict[Slice, RowArray]  # an array for each slice


class LayerRows(NamedTuple):
    """Where rows of a type lie, and what they pass through before a layer has them."""

    arrays: tuple[RowArray, ...]  # side by side; (): the type has no features
    of_store: bool = False
    enter: nn.Module = nn.Identity()
    lone: RowArray | None = None  # of nodes without edges in; `arrays` has those of the others

    @property
    def files(self) -> tuple[RowArray, ...]:
        return self.arrays if self.lone is None else (*self.arrays, self.lone)


@dataclass(frozen=True)
class Inputs:
    """What all layers are computed from."""

    store: Store
    steps: ModelSteps
    connected: Connected

    @cached_property
    def types(self) -> dict[str, NodeType]:
        return {t.name: t for t in self.store.manifest.types}

    @cached_property
    def relations(self) -> dict[Relation, StoredRelation]:
        return {(r.src, r.name, r.dst): r for r in self.store.manifest.relations}

    def first_rows(self) -> dict[str, LayerRows]:
        return {
            name: LayerRows((t.features["x"],) if self.steps.widths[name] else (), True, enter)
            for name, enter in self.steps.enter.items()
            for t in [self.types[name]]
        }

    def read(self, run: InferenceRun, name: str, rows: LayerRows) -> Iterator[Tensor]:
        """Rows of a type as a layer has them, (STEP_ROWS, width) at a time."""
        num_nodes, dtype = self.types[name].num_nodes, self.steps.numpy_dtype
        store = self.store if rows.of_store else store_of(run.hidden)
        lone = () if rows.lone is None else (rows.lone,)
        with RowCursor(store, rows.arrays, dtype) as cursor, RowCursor(store, lone, dtype) as apart:
            for first in range(0, num_nodes, STEP_ROWS):
                count = min(STEP_ROWS, num_nodes - first)
                if not rows.arrays:  # what enters is the same for all nodes
                    h = np.ones((count, 1), dtype)
                elif rows.lone is None:
                    h = cursor.take(count)
                else:
                    received = self.connected.receives[name].among(first, first + count)
                    h = np.empty((count, rows.lone.row_items), dtype)
                    h[received] = cursor.take(int(np.count_nonzero(received)))
                    h[~received] = apart.take(int(np.count_nonzero(~received)))
                yield rows.enter(torch.from_numpy(h))


class _Running(NamedTuple):
    """A layer while it is computed."""

    run: InferenceRun
    files: StoreWriter  # what passes from the first pass to the second
    kept: dict[Relation, Tensor]  # the same in memory, until it is joined


class LayerStage:
    """What a layer reads, writes, and passes from one pass to the next; and how to run it."""

    def __init__(
        self, inputs: Inputs, number: int, plan: LayerPlan, before: Mapping[str, LayerRows]
    ) -> None:
        """`number`: from 0; `before`: rows of all types as the layer finds them."""
        self._inputs, self._plan, self._before = inputs, plan, before
        self._step, connected = inputs.steps.steps[number], inputs.connected
        layers = self._step.layers
        self._into = {
            name: relations
            for name in inputs.types
            if (relations := [r for r in layers if r[2] == name])
        }
        self._sources: dict[Relation, _Columns] = {}
        self._targets: dict[Relation, _Columns] = {}
        for i, (r, layer) in enumerate(layers.items()):
            rows, spilled = connected.gives[r].num_rows, plan.spilled(r)
            self._sources[r] = self._columns(f"sources{i}", rows, layer.source_width, spilled)
            rows = connected.receives[r[2]].num_rows
            width = layer.target_width - _shared_width(r, layer)
            self._targets[r] = self._columns(f"targets{i}", rows, width, plan.slices)
        self._made: dict[str, LayerRows] = {}
        self._sums: dict[str, list[_Columns]] = {}  # of a type: of ever more of its relations
        for i, (name, relations) in enumerate(self._into.items()):
            layer = layers[relations[0]]
            rows, width = connected.receives[name].num_rows, layer.num_out // layer.parts
            self._sums[name] = [
                self._columns(f"sums{j}/type{i}", rows, width, plan.slices)
                for j in range(len(relations) - 1)
            ]
            where, rest = f"layer{number + 1}/type{i}", inputs.types[name].num_nodes - rows
            made = self._columns(where, rows, width, plan.slices)
            lone = self._array(f"{where}/lone", rest, layer.num_out) if rest else None
            self._made[name] = LayerRows(tuple(made.values()), lone=lone)

    @property
    def after(self) -> dict[str, LayerRows]:
        """Rows of all types after it."""
        return {**self._before, **self._made}

    @property
    def made(self) -> list[RowArray]:
        """What it leaves to the next layer."""
        return [array for rows in self._made.values() for array in rows.files]

    @property
    def without_room(self) -> list[Relation]:
        """Relations of a layer that does not fit memory, of which only sources need rows."""
        if not any(self._sources.values()):
            return []
        return [r for r, layer in self._step.layers.items() if not _shared_width(r, layer)]

    @property
    def cost(self) -> Cost:
        used = {name for src, _, dst in self._step.layers for name in (src, dst)}
        read = sum(num_bytes(a) for name in used for a in self._before[name].files)
        blocks = sum(self._inputs.relations[r].num_blocks for r in self._step.layers)
        read += len(self._plan.slices) * blocks * self._inputs.store.manifest.block_bytes
        columns = [*self._sources.values(), *self._targets.values(), *chain(*self._sums.values())]
        passing = sum(num_bytes(array) for some in columns for array in some.values())
        return Cost(read + passing, sum(map(num_bytes, self.made)) + passing, passing)

    def run(self, run: InferenceRun) -> None:
        folder = run.path(_FOLDER)
        shutil.rmtree(folder, ignore_errors=True)
        with (
            StoreWriter(
                folder, block_bytes=run.hidden.block_bytes, buffer_bytes=BUFFER_BYTES
            ) as passing,
            torch.no_grad(),
        ):  # fmt: skip
            now = _Running(run, passing, {})
            for name in self._before:
                if any(name in (src, dst) for src, _, dst in self._step.layers):
                    self._read_rows(now, name)
            for i, some in enumerate(self._plan.slices):
                for name in self._into:
                    self._join(now, name, some, self._made[name].arrays[i])
        shutil.rmtree(folder)

    # -- the first pass ----------------------------------------------------------------------------

    def _read_rows(self, now: _Running, name: str) -> None:
        """What nodes of a type give to their neighbors and to themselves."""
        first, nodes = 0, self._inputs.types[name].num_nodes
        progress = now.run.progress
        with ExitStack() as held, progress.stage(f"rows of {name}", nodes, "nodes") as stage:
            takers = [self._take_sources(now, held, r) for r in self._step.layers if r[0] == name]
            if name in self._into:
                takers.append(self._take_targets(now, held, name))
            for h in self._inputs.read(now.run, name, self._before[name]):
                for take in takers:
                    take(h, first)
                first += h.size(0)
                stage.advance(h.size(0))

    def _take_sources(self, now: _Running, held: ExitStack, relation: Relation) -> _Take:
        """The first slice stays in memory if the plan says so; the others go to files."""
        layer, nodes = self._step.layers[relation], self._inputs.connected.gives[relation]
        parts, done = self._plan.slices[0].stop if relation in self._plan.kept else 0, 0
        shape = nodes.num_rows, parts, layer.source_width
        whole = torch.empty(shape, dtype=self._inputs.steps.dtype)
        if parts:
            now.kept[relation] = whole
        write = _writing(held, now.files, self._sources[relation])

        def take(h: Tensor, first: int) -> None:
            nonlocal done
            given = layer.sources(h)[nodes.among(first, first + h.size(0))]
            whole[done : done + given.size(0)] = given[:, :parts]
            write(given)
            done += given.size(0)

        return take

    def _take_targets(self, now: _Running, held: ExitStack, name: str) -> _Take:
        """To files; of nodes without edges in, the result."""
        nodes, made = self._inputs.connected.receives[name], self._made[name].lone
        writers = {r: _writing(held, now.files, self._targets[r]) for r in self._into[name]}
        lone = None if made is None else held.enter_context(now.run.hidden.rows(made))

        def take(h: Tensor, first: int) -> None:
            received = nodes.among(first, first + h.size(0))
            sums: Tensor | None = None
            for relation, write in writers.items():
                layer = self._step.layers[relation]
                if lone is None and not self._targets[relation]:
                    continue  # sources give all that these do
                given = layer.targets(h)
                write(given[received][..., _shared_width(relation, layer) :])
                if lone is not None:
                    nothing = given.new_zeros(1, layer.parts, layer.source_width)
                    no_edges = torch.empty((2, 0), dtype=torch.int64)
                    found = layer.join(nothing, given[~received], no_edges)
                    sums = found if sums is None else sums + found
            if lone is not None and sums is not None:
                lone.append(self._step.activate(sums).numpy())

        return take

    # -- the second pass ---------------------------------------------------------------------------

    def _join(self, now: _Running, name: str, some: Slice, out: RowArray) -> None:
        """Rows of a type after the layer, of a slice of its parts: sums over relations into it."""
        before: tuple[RowArray, ...] = ()  # sums over the relations so far
        partial_sums = [columns[some] for columns in self._sums[name]]
        for relation, array in zip(self._into[name], [*partial_sums, out], strict=True):
            last = array is out
            with (
                (now.run.hidden if last else now.files).rows(array) as writer,
                self._cursor(now, before) as sums,
            ):
                for found in self._joined(now, relation, some):
                    if before:
                        found += torch.from_numpy(sums.take(found.size(0)))
                    writer.append((self._step.activate(found) if last else found).numpy())
            before = (array,)

    def _joined(self, now: _Running, relation: Relation, some: Slice) -> Iterator[Tensor]:
        """What a layer gives to the targets of a relation, in order: rows of a slice."""
        layer, stored = self._step.layers[relation], self._inputs.relations[relation]
        connected = self._inputs.connected
        gives, receives = connected.gives[relation], connected.receives[relation[2]]
        spilled = self._sources[relation].get(some)
        sources = now.kept.pop(relation) if spilled is None else self._load(now, spilled)
        sources = sources.view(gives.num_rows, some.stop - some.first, layer.source_width)
        shared, first = _shared_width(relation, layer), 0
        array = self._targets[relation].get(some)
        with (
            self._cursor(now, () if array is None else (array,)) as targets,
            now.run.progress.stage(f"edges {relation[1]}", stored.num_edges, "edges") as stage,
        ):
            source = self._inputs.types[relation[0]]
            for degrees, ids in whole_columns(now.run.store, stored, source):
                received = receives.among(first, first + degrees.size)
                own_ids = np.arange(first, first + degrees.size)[received]
                first += degrees.size
                if not own_ids.size:
                    continue
                dst = np.repeat(np.arange(own_ids.size), degrees[received])
                edge_index = torch.from_numpy(np.stack([gives.rows(ids), dst]))
                own = torch.from_numpy(targets.take(own_ids.size))
                own = own.view(own_ids.size, sources.size(1), layer.target_width - shared)
                if shared:
                    given = sources[torch.from_numpy(gives.rows(own_ids)), :, :shared]
                    own = torch.cat([given, own], -1)
                yield layer.join(sources, own, edge_index)
                stage.advance(ids.size)

    def _load(self, now: _Running, array: RowArray) -> Tensor:
        out = torch.empty(array.num_rows, array.row_items, dtype=self._inputs.steps.dtype)
        with self._cursor(now, (array,)) as cursor:
            cursor.fill(out.numpy())
        return out

    # -- files -------------------------------------------------------------------------------------

    def _cursor(self, now: _Running, arrays: tuple[RowArray, ...]) -> RowCursor:
        return RowCursor(store_of(now.files), arrays, self._inputs.steps.numpy_dtype)

    def _columns(self, path: str, num_rows: int, width: int, slices: tuple[Slice, ...]) -> _Columns:
        """An array for each slice, of so many numbers a part; none if these are none."""
        return {
            s: self._array(f"{path}/columns{s.first}", num_rows, (s.stop - s.first) * width)
            for s in slices
            if width
        }

    def _array(self, path: str, num_rows: int, width: int) -> RowArray:
        dtype, block_bytes = self._inputs.steps.numpy_dtype, self._inputs.store.manifest.block_bytes
        return row_array(path, dtype, num_rows, width, block_bytes)


def num_bytes(array: RowArray) -> int:
    return array.num_rows * array.row_bytes


def _shared_width(relation: Relation, layer: OrderedLayer) -> int:
    """Numbers of a target that the same node gives as a source, if both are of one type."""
    return layer.shared_width if relation[0] == relation[2] else 0


def _writing(held: ExitStack, writer: StoreWriter, arrays: _Columns) -> Callable[[Tensor], None]:
    """What to call with (rows, all parts, width), in order."""
    writers = [(some, held.enter_context(writer.rows(array))) for some, array in arrays.items()]

    def write(given: Tensor) -> None:
        for some, out in writers:
            out.append(given[:, some.first : some.stop].contiguous().numpy())

    return write
