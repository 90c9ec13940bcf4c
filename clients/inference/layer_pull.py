"""A layer in two passes: contributions of sources are in memory while targets are computed.

The first pass reads the rows of all nodes and computes what each contributes to its neighbors and
to its own result; nodes without in-edges are then done.  The second reads the graph, joins for each
node the contributions of its neighbors in memory, and writes the rows of the next layer.  If they
do not fit in memory, some columns are computed at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from blockstore.format import RowArray
from clients.inference.edges import whole_columns
from clients.inference.layer import Columns, Inputs, LayerRows, LayerStage, Running, writing
from clients.inference.model import Relation
from clients.inference.plan import LayerPlan, Slice
from clients.models import OrderedLayer

_Take = Callable[[Tensor, int], None]  # takes input rows, and the number of the first one


class PulledLayer(LayerStage):
    """Computes any layer of any store in two passes."""

    def __init__(
        self, inputs: Inputs, number: int, plan: LayerPlan, before: Mapping[str, LayerRows]
    ) -> None:
        super().__init__(inputs, number, plan, before)
        layers, connected = self._step.layers, inputs.connected
        self._sources: dict[Relation, Columns] = {}
        self._targets: dict[Relation, Columns] = {}
        for i, (r, layer) in enumerate(layers.items()):
            rows, spilled = connected.gives[r].num_rows, plan.spilled(r)
            self._sources[r] = self._columns(f"sources{i}", rows, layer.source_width, spilled)
            rows = connected.receives[r[2]].num_rows
            width = layer.target_width - _shared_width(r, layer)
            self._targets[r] = self._columns(f"targets{i}", rows, width, plan.slices)
        self._sums: dict[str, list[Columns]] = {}  # by type: partial sums over its relations so far
        for i, (name, relations) in enumerate(self._into.items()):
            layer = layers[relations[0]]
            rows, width = connected.receives[name].num_rows, layer.num_out // layer.parts
            self._sums[name] = [
                self._columns(f"sums{j}/type{i}", rows, width, plan.slices)
                for j in range(len(relations) - 1)
            ]

    def _passing(self) -> Iterable[Columns]:
        return chain(self._sources.values(), self._targets.values(), *self._sums.values())

    def _compute(self, now: Running) -> None:
        for name in self._used:
            self._read_rows(now, name)
        for i, some in enumerate(self._plan.slices):
            for name in self._into:
                self._join(now, name, some, self._made[name].arrays[i])

    # -- the first pass ----------------------------------------------------------------------------

    def _read_rows(self, now: Running, name: str) -> None:
        """Compute what nodes of a type contribute to their neighbors and to themselves."""
        first, nodes = 0, self._inputs.types[name].num_nodes
        progress = now.run.progress
        with ExitStack() as held, progress.stage(f"rows of {name}", nodes, "nodes") as stage:
            takers = [self._take_sources(now, held, r) for r in self._step.layers if r[0] == name]
            if name in self._into:
                takers.append(self._take_targets(now, held, name))
            for h in self._inputs.read(now.run.hidden, name, self._before[name]):
                for take in takers:
                    take(h, first)
                first += h.size(0)
                stage.advance(h.size(0))

    def _take_sources(self, now: Running, held: ExitStack, relation: Relation) -> _Take:
        """Store contributions of sources: slice 0 in memory if planned so, others in files."""
        layer, nodes = self._step.layers[relation], self._inputs.connected.gives[relation]
        parts, done = self._plan.slices[0].stop if relation in self._plan.kept else 0, 0
        shape = nodes.num_rows, parts, layer.source_width
        whole = torch.empty(shape, dtype=self._inputs.steps.dtype)
        if parts:
            now.kept[relation] = whole
        write = writing(held, now.files, self._sources[relation])

        def take(h: Tensor, first: int) -> None:
            nonlocal done
            given = layer.sources(h)[nodes.among(first, first + h.size(0))]
            whole[done : done + given.size(0)] = given[:, :parts]
            write(given)
            done += given.size(0)

        return take

    def _take_targets(self, now: Running, held: ExitStack, name: str) -> _Take:
        """Write contributions of targets to files, and the results of nodes without in-edges."""
        nodes, made = self._inputs.connected.receives[name], self._made[name].lone
        writers = {r: writing(held, now.files, self._targets[r]) for r in self._into[name]}
        lone = None if made is None else held.enter_context(now.run.hidden.rows(made))

        def take(h: Tensor, first: int) -> None:
            received = nodes.among(first, first + h.size(0))
            sums: Tensor | None = None
            for relation, write in writers.items():
                layer = self._step.layers[relation]
                if lone is None and not self._targets[relation]:
                    continue  # all of it equals the contributions of sources
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

    def _join(self, now: Running, name: str, some: Slice, out: RowArray) -> None:
        """Compute a slice of a type's rows after the layer: sums over the relations into it."""
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

    def _joined(self, now: Running, relation: Relation, some: Slice) -> Iterator[Tensor]:
        """The results of a relation's layer for its targets, in order, for one slice."""
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

    def _load(self, now: Running, array: RowArray) -> Tensor:
        out = torch.empty(array.num_rows, array.row_items, dtype=self._inputs.steps.dtype)
        with self._cursor(now, (array,)) as cursor:
            cursor.fill(out.numpy())
        return out


def _shared_width(relation: Relation, layer: OrderedLayer) -> int:
    """Numbers of a target's contribution that it shares with the same node as a source."""
    return layer.shared_width if relation[0] == relation[2] else 0
