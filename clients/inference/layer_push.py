"""A layer that adds up contributions in one pass, reading rows and graph at the same time.

Edges are read by source (`by_source`).  So a node's contribution is added to the sums of its
neighbors as soon as its row is read, and only sums are in memory.  Columns of these that do not fit
are computed later: contributions to them pass through files, or are computed again from rows,
whichever reads less (`plan.Later`).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.format import RowArray
from clients.inference.by_source import edges_by_source, tile_bytes
from clients.inference.edges import Nodes, whole_columns
from clients.inference.layer import (
    Columns,
    Inputs,
    LayerRows,
    LayerStage,
    Running,
    num_bytes,
    writing,
)
from clients.inference.model import Relation
from clients.inference.plan import Later, LayerPlan, Slice
from clients.inference.rows import SCAN_BYTES, STEP_ROWS
from preprocess.kernels.hops import add_shares

_Edges = Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]


class _Given(NamedTuple):
    """Contributions of a step's nodes with edges, in some columns: (nodes, columns) each."""

    own: NDArray[Any] | None  # to their own result; None: no relation leads to their type
    sent: Mapping[Relation, NDArray[Any]]  # to each of their neighbors


class PushedLayer(LayerStage):
    """Computes a layer that has `OrderedLayer.adds`, in one pass."""

    def __init__(
        self, inputs: Inputs, number: int, plan: LayerPlan, before: Mapping[str, LayerRows]
    ) -> None:
        super().__init__(inputs, number, plan, before)
        connected = inputs.connected
        later = {
            name: plan.slices[1:] if plan.later.get(name) is Later.GIVEN else ()
            for name in self._used
        }
        self._own = {
            name: self._columns(f"own{i}", connected.receives[name].num_rows, 1, later[name])
            for i, name in enumerate(self._into)
        }
        self._sent = {
            r: self._columns(f"sent{i}", connected.gives[r].num_rows, 1, later[r[0]])
            for i, r in enumerate(self._step.layers)
        }
        self._again: dict[str, LayerRows] = {}  # rows that later slices are computed from
        for i, name in enumerate(self._used):
            if plan.later.get(name) is Later.AGAIN:
                self._again[name] = before[name]
            elif plan.later.get(name) is Later.ENTERED:
                rows, width = inputs.types[name].num_nodes, inputs.steps.entered[name]
                self._again[name] = LayerRows((self._array(f"entered{i}", rows, width),))

    @property
    def _entered(self) -> dict[str, RowArray]:
        """Projected rows (see `ModelSteps.enter`) that are kept in files for later slices."""
        later = self._plan.later
        return {n: r.arrays[0] for n, r in self._again.items() if later[n] is Later.ENTERED}

    @property
    def _again_bytes(self) -> int:
        each = sum(num_bytes(a) for rows in self._again.values() for a in rows.files)
        once = sum(map(num_bytes, self._entered.values()))  # already counted as passing
        return max(0, self.num_slices - 1) * each - once

    @property
    def _edges_bytes(self) -> int:
        connected, manifest = self._inputs.connected, self._inputs.store.manifest
        if connected.reverses:
            return self._graph_bytes
        stored = (self._inputs.relations[r] for r in self._step.layers)
        return sum(tile_bytes(manifest, r, self._plan.tile_edges) for r in stored)

    def _passing(self) -> Iterable[Columns]:
        whole = {Slice(0, 0): array for array in self._entered.values()}
        return [*self._own.values(), *self._sent.values(), whole]

    def _compute(self, now: Running) -> None:
        for i, some in enumerate(self._plan.slices):
            sums = self._summed(now, some)
            for name in self._into:  # each is freed once it is written
                self._write(now, sums.pop(name), self._made[name].arrays[i])

    def _summed(self, now: Running, some: Slice) -> dict[str, NDArray[Any]]:
        """Sums by type, for the nodes that have in-edges: (nodes, columns of the slice)."""
        receives, dtype = self._inputs.connected.receives, self._inputs.steps.numpy_dtype
        shape = some.stop - some.first
        sums = {name: np.zeros((receives[name].num_rows, shape), dtype) for name in self._into}
        heavy = self._inputs.connected.heavy
        lost = {r: np.zeros((heavy[r].size, shape), dtype) for r in self._step.layers}
        for name in self._used:
            stored = some.first > 0 and name not in self._again
            with closing((self._stored if stored else self._computed)(now, name, some)) as given:
                self._push(now, name, given, sums, lost)
        for r, rows in lost.items():
            sums[r[2]][heavy[r]] -= rows
        return sums

    def _write(self, now: Running, sums: NDArray[Any], out: RowArray) -> None:
        with now.run.hidden.rows(out) as writer:
            for first in range(0, sums.shape[0], STEP_ROWS):
                rows = torch.from_numpy(sums[first : first + STEP_ROWS])
                writer.append(self._step.activate(rows).numpy())

    def _push(
        self,
        now: Running,
        name: str,
        given: Iterator[_Given],
        sums: Mapping[str, NDArray[Any]],
        lost: Mapping[Relation, NDArray[Any]],
    ) -> None:
        """Add the contributions of all nodes of a type."""
        nodes, first, own_row = self._inputs.types[name], 0, 0
        with (
            ExitStack() as held,
            now.run.progress.stage(f"rows of {name}", nodes.num_nodes, "nodes") as stage,
        ):
            edges: dict[Relation, list[_Edges]] = {}
            out = [r for r in self._step.layers if r[0] == name]
            for r in out:
                store, parts = edges_by_source(now.run, r, self._inputs.connected.reverses)
                scan, target = SCAN_BYTES // max(1, len(out) * len(parts)), self._inputs.types[r[2]]
                columns = (whole_columns(store, part, target, scan) for part in parts)
                edges[r] = [held.enter_context(closing(part)) for part in columns]
            for own, sent in given:
                stop = min(first + STEP_ROWS, nodes.num_nodes)
                if own is not None:
                    sums[name][own_row : own_row + own.shape[0]] += own
                    own_row += own.shape[0]
                for r, rows in sent.items():
                    for part in edges[r]:
                        self._send(r, rows, part, (first, stop), sums[r[2]], lost[r])
                stage.advance(stop - first)
                first = stop

    def _send(
        self,
        relation: Relation,
        rows: NDArray[Any],
        edges: _Edges,
        nodes: tuple[int, int],
        sums: NDArray[Any],
        lost: NDArray[Any],
    ) -> None:
        """Add the rows of sending nodes in [first, stop) to the sums of their neighbors."""
        connected, (first, stop) = self._inputs.connected, nodes
        senders, targets = connected.gives[relation], connected.receives[relation[2]]
        at = 0
        while first < stop:
            degrees, ids = next(edges)
            known = degrees[senders.among(first, first + degrees.size)]
            origins = np.repeat(np.arange(at, at + known.size, dtype=np.uint64), known)
            to = targets.rows(ids).view(np.uint64)
            shares, heavy = connected.shares[relation], connected.heavy[relation]
            add_shares(rows, origins, to, shares, heavy, lost, sums)
            first, at = first + degrees.size, at + known.size

    # -- contributions -----------------------------------------------------------------------------

    def _computed(self, now: Running, name: str, some: Slice) -> Generator[_Given]:
        """Contributions from rows.  Slice 0 also writes lone nodes' results, and later files."""
        layers, connected, first = self._step.layers, self._inputs.connected, 0
        columns, into = slice(some.first, some.stop), self._into.get(name, [])
        with ExitStack() as held:
            made = self._made[name].lone if into and some.first == 0 else None
            later = writing(held, now.files, self._own.get(name, {}))
            sent = [r for r in layers if r[0] == name]
            later_sent = {r: writing(held, now.files, self._sent[r]) for r in sent}
            lone = None if made is None else held.enter_context(now.run.hidden.rows(made))
            for h in self._rows(now, name, some):
                stop, own, rows = first + h.size(0), None, {}
                if into:
                    received = connected.receives[name].among(first, stop)
                    given = reduce(torch.add, (layers[r].targets(h) for r in into))
                    if lone is not None:
                        lone.append(self._step.activate(given[~received][..., 0]).numpy())
                    later(given[received])
                    own = given[received][:, columns, 0].numpy()
                for r in sent:
                    given = layers[r].sources(h)[connected.gives[r].among(first, stop)]
                    later_sent[r](given)
                    rows[r] = given[:, columns, 0].contiguous().numpy()
                yield _Given(own, rows)
                first = stop

    def _rows(self, now: Running, name: str, some: Slice) -> Iterator[Tensor]:
        """Rows of a type as input of the layer."""
        entered, before = self._entered.get(name), self._before[name]
        if entered is None:
            yield from self._inputs.read(now.run.hidden, name, before)
        elif some.first:
            yield from self._inputs.read(now.files, name, self._again[name])
        else:
            with now.files.rows(entered) as out:
                for h in self._inputs.read(now.run.hidden, name, before):
                    out.append(h.numpy())
                    yield h

    def _stored(self, now: Running, name: str, some: Slice) -> Generator[_Given]:
        """Contributions to a later slice, read from files."""
        connected, num_nodes = self._inputs.connected, self._inputs.types[name].num_nodes
        with ExitStack() as held:

            def reading(nodes: Nodes, columns: Columns) -> Callable[[int, int], NDArray[Any]]:
                cursor = held.enter_context(self._cursor(now, (columns[some],)))
                return lambda first, stop: cursor.take(nodes.how_many(first, stop))

            own = None
            if name in self._into:
                own = reading(connected.receives[name], self._own[name])
            sent = {
                r: reading(connected.gives[r], columns)
                for r, columns in self._sent.items()
                if r[0] == name
            }
            for first in range(0, num_nodes, STEP_ROWS):
                span = first, min(first + STEP_ROWS, num_nodes)
                rows = {r: take(*span) for r, take in sent.items()}
                yield _Given(None if own is None else own(*span), rows)
