"""Base of the computation of one layer: what it reads, writes and passes through files.

The two ways, `layer_pull` and `layer_push`, are derived in docs/derivations/inference.md.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from blockstore.format import NodeType, RowArray
from blockstore.format import Relation as StoredRelation
from blockstore.store import Store
from blockstore.writer import StoreWriter
from clients.inference.edges import Connected
from clients.inference.model import ModelSteps, Relation, by_relation
from clients.inference.plan import BUFFER_BYTES, LayerPlan, Slice
from clients.inference.results import InferenceRun
from clients.inference.rows import STEP_ROWS, RowCursor, row_array, store_of
from preprocess.pipeline.stage import Cost

_FOLDER = "passing"  # temporary files of one layer
Columns = dict[Slice, RowArray]  # an array for each slice


class LayerRows(NamedTuple):
    """Where rows of a type lie, and the module applied to them before a layer."""

    arrays: tuple[RowArray, ...]  # side by side; (): the type has no features
    of_store: bool = False
    enter: nn.Module = nn.Identity()
    lone: RowArray | None = None  # rows of nodes without in-edges; `arrays` has all others

    @property
    def files(self) -> tuple[RowArray, ...]:
        return self.arrays if self.lone is None else (*self.arrays, self.lone)


@dataclass(frozen=True)
class Inputs:
    """Inputs of all layers: the store, the model and the nodes with edges."""

    store: Store
    steps: ModelSteps
    connected: Connected

    @cached_property
    def types(self) -> dict[str, NodeType]:
        return {t.name: t for t in self.store.manifest.types}

    @cached_property
    def relations(self) -> dict[Relation, StoredRelation]:
        return by_relation(self.store.manifest)

    def first_rows(self) -> dict[str, LayerRows]:
        return {
            name: LayerRows((t.features["x"],) if self.steps.widths[name] else (), True, enter)
            for name, enter in self.steps.enter.items()
            for t in [self.types[name]]
        }

    def read(self, written: StoreWriter, name: str, rows: LayerRows) -> Iterator[Tensor]:
        """Rows of a type as input of a layer, (STEP_ROWS, width) at a time.

        written   where they lie, if not in the store
        """
        num_nodes, dtype = self.types[name].num_nodes, self.steps.numpy_dtype
        store = self.store if rows.of_store else store_of(written)
        lone = () if rows.lone is None else (rows.lone,)
        with RowCursor(store, rows.arrays, dtype) as cursor, RowCursor(store, lone, dtype) as apart:
            for first in range(0, num_nodes, STEP_ROWS):
                count = min(STEP_ROWS, num_nodes - first)
                if not rows.arrays:  # the input is the same for all nodes
                    h = np.ones((count, 1), dtype)
                elif rows.lone is None:
                    h = cursor.take(count)
                else:
                    nodes, stop = self.connected.receives[name], first + count
                    received, some = nodes.among(first, stop), nodes.how_many(first, stop)
                    h = np.empty((count, rows.lone.row_items), dtype)
                    h[received], h[~received] = cursor.take(some), apart.take(count - some)
                yield rows.enter(torch.from_numpy(h))


class Running(NamedTuple):
    """State of a layer while it is computed."""

    run: InferenceRun
    files: StoreWriter  # intermediate results between two passes
    kept: dict[Relation, Tensor]  # such results in memory, until they are joined


class LayerStage(ABC):
    """A layer as a stage: what it reads, writes, and passes between its passes."""

    def __init__(
        self, inputs: Inputs, number: int, plan: LayerPlan, before: Mapping[str, LayerRows]
    ) -> None:
        """`number`: from 0; `before`: input rows of all types."""
        self._inputs, self._plan, self._before = inputs, plan, before
        self._step = inputs.steps.steps[number]
        self._into = {
            name: relations
            for name in inputs.types
            if (relations := [r for r in self._step.layers if r[2] == name])
        }
        self._made: dict[str, LayerRows] = {}
        for i, (name, relations) in enumerate(self._into.items()):
            layer = self._step.layers[relations[0]]
            rows, width = inputs.connected.receives[name].num_rows, layer.num_out // layer.parts
            where, rest = f"layer{number + 1}/type{i}", inputs.types[name].num_nodes - rows
            made = self._columns(where, rows, width, plan.slices)
            lone = self._array(f"{where}/lone", rest, layer.num_out) if rest else None
            self._made[name] = LayerRows(tuple(made.values()), lone=lone)

    @property
    def after(self) -> dict[str, LayerRows]:
        """Rows of all types after this layer."""
        return {**self._before, **self._made}

    @property
    def made(self) -> list[RowArray]:
        """Arrays that this layer writes for the next one."""
        return [array for rows in self._made.values() for array in rows.files]

    @property
    def num_slices(self) -> int:
        return len(self._plan.slices)

    @property
    def cost(self) -> Cost:
        read = self._before_bytes + self.num_slices * self._edges_bytes + self._again_bytes
        passing = sum(num_bytes(a) for columns in self._passing() for a in columns.values())
        return Cost(read + passing, sum(map(num_bytes, self.made)) + passing, passing)

    @property
    def min_bytes(self) -> int:
        """Bytes of its input and output rows, and of the graph, once each."""
        return self._before_bytes + sum(map(num_bytes, self.made)) + self._graph_bytes

    @property
    def _again_bytes(self) -> int:
        """Bytes of rows that are read again for later slices."""
        return 0

    @property
    def _used(self) -> list[str]:
        """Types whose rows this layer needs."""
        ends = {name for src, _, dst in self._step.layers for name in (src, dst)}
        return [name for name in self._before if name in ends]

    @property
    def _before_bytes(self) -> int:
        return sum(num_bytes(a) for name in self._used for a in self._before[name].files)

    @property
    def _edges_bytes(self) -> int:
        """Bytes of the edges of all relations, as read for each slice."""
        return self._graph_bytes

    @property
    def _graph_bytes(self) -> int:
        blocks = sum(self._inputs.relations[r].num_blocks for r in self._step.layers)
        return blocks * self._inputs.store.manifest.block_bytes

    def run(self, run: InferenceRun) -> None:
        folder = run.path(_FOLDER)
        shutil.rmtree(folder, ignore_errors=True)
        with (
            StoreWriter(
                folder, block_bytes=run.hidden.block_bytes, buffer_bytes=BUFFER_BYTES
            ) as passing,
            torch.no_grad(),
        ):  # fmt: skip
            self._compute(Running(run, passing, {}))
        shutil.rmtree(folder)

    @abstractmethod
    def _passing(self) -> Iterable[Columns]:
        """Intermediate arrays in files, each written once and read once."""

    @abstractmethod
    def _compute(self, now: Running) -> None:
        """Write all arrays of `made`."""

    def _cursor(self, now: Running, arrays: tuple[RowArray, ...]) -> RowCursor:
        return RowCursor(store_of(now.files), arrays, self._inputs.steps.numpy_dtype)

    def _columns(self, path: str, num_rows: int, width: int, slices: tuple[Slice, ...]) -> Columns:
        """An array for each slice, with `width` numbers per part; none if `width` is 0."""
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


def writing(held: ExitStack, writer: StoreWriter, arrays: Columns) -> Callable[[Tensor], None]:
    """A function to call with consecutive (rows, all parts, width), which writes all `arrays`."""
    writers = [(some, held.enter_context(writer.rows(array))) for some, array in arrays.items()]

    def write(given: Tensor) -> None:
        for some, out in writers:
            out.append(given[:, some.first : some.stop].contiguous().numpy())

    return write
