"""A layer that adds up what nodes give, in one pass: rows and graph are read beside each other.

Of a store with all reverses: a column of a relation's reverse has the edges out of a node.  So what
a node gives goes to the sums of its neighbors as soon as its row is read, and only sums are in
memory.  Columns of these that do not fit come later: what nodes give to them passes through files,
or is computed again, whichever reads less.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockstore.format import RowArray
from clients.inference.edges import whole_columns
from clients.inference.layer import Columns, Inputs, LayerRows, LayerStage, Running, writing
from clients.inference.model import Relation
from clients.inference.plan import LayerPlan, Slice
from clients.inference.rows import STEP_ROWS
from preprocess.kernels.hops import add_rows

_Edges = Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]


class _Given(NamedTuple):
    """What nodes with edges of a step give, in some columns: (nodes, columns) each."""

    own: NDArray[Any]  # to their own result
    sent: Mapping[Relation, NDArray[Any]]  # to each of their neighbors


class PushedLayer(LayerStage):
    """A layer with `OrderedLayer.adds`, of a store with all reverses."""

    def __init__(
        self, inputs: Inputs, number: int, plan: LayerPlan, before: Mapping[str, LayerRows]
    ) -> None:
        super().__init__(inputs, number, plan, before)
        num_rows = {name: nodes.num_rows for name, nodes in inputs.connected.receives.items()}
        later = plan.slices[1:] if plan.kept else ()
        self._own = {
            name: self._columns(f"own{i}", num_rows[name], 1, later)
            for i, name in enumerate(self._into)
        }
        self._sent = {
            r: self._columns(f"sent{i}", num_rows[r[0]], 1, later)
            for i, r in enumerate(self._step.layers)
        }

    @property
    def _passes(self) -> int:
        return 1 if self._plan.kept else len(self._plan.slices)

    def _passing(self) -> Iterable[Columns]:
        return [*self._own.values(), *self._sent.values()]

    def _compute(self, now: Running) -> None:
        for i, some in enumerate(self._plan.slices):
            sums = self._summed(now, some)
            for name in self._into:  # each goes as soon as it is written
                self._write(now, sums.pop(name), self._made[name].arrays[i])

    def _summed(self, now: Running, some: Slice) -> dict[str, NDArray[Any]]:
        """By type, of the nodes that have edges: (nodes, columns of the slice)."""
        stored = some.first > 0 and bool(self._plan.kept)
        receives, dtype = self._inputs.connected.receives, self._inputs.steps.numpy_dtype
        shape = some.stop - some.first
        sums = {name: np.zeros((receives[name].num_rows, shape), dtype) for name in self._into}
        for name in self._into:
            with closing((self._stored if stored else self._computed)(now, name, some)) as given:
                self._push(now, name, given, sums)
        return sums

    def _write(self, now: Running, sums: NDArray[Any], out: RowArray) -> None:
        with now.run.hidden.rows(out) as writer:
            for first in range(0, sums.shape[0], STEP_ROWS):
                rows = torch.from_numpy(sums[first : first + STEP_ROWS])
                writer.append(self._step.activate(rows).numpy())

    def _push(
        self, now: Running, name: str, given: Iterator[_Given], sums: Mapping[str, NDArray[Any]]
    ) -> None:
        """Add what all nodes of a type give."""
        nodes, first, own_row = self._inputs.types[name], 0, 0
        with (
            ExitStack() as held,
            now.run.progress.stage(f"rows of {name}", nodes.num_nodes, "nodes") as stage,
        ):
            edges: dict[Relation, _Edges] = {}
            for r in self._step.layers:
                if r[0] == name:
                    stored = self._inputs.relations[self._inputs.connected.reverses[r]]
                    columns = whole_columns(now.run.store, stored, self._inputs.types[r[2]])
                    edges[r] = held.enter_context(closing(columns))
            for own, sent in given:
                stop = min(first + STEP_ROWS, nodes.num_nodes)
                sums[name][own_row : own_row + own.shape[0]] += own
                for r, rows in sent.items():
                    self._send(r, rows, edges[r], (first, stop), sums[r[2]])
                own_row += own.shape[0]
                stage.advance(stop - first)
                first = stop

    def _send(
        self,
        relation: Relation,
        rows: NDArray[Any],
        edges: _Edges,
        nodes: tuple[int, int],
        sums: NDArray[Any],
    ) -> None:
        """Add rows of the nodes [first, stop) that have edges to the sums of their neighbors."""
        connected, (first, stop) = self._inputs.connected, nodes
        senders, targets = connected.receives[relation[0]], connected.receives[relation[2]]
        at = 0
        while first < stop:
            degrees, ids = next(edges)
            known = degrees[senders.among(first, first + degrees.size)]
            origins = np.repeat(np.arange(at, at + known.size, dtype=np.uint64), known)
            to = targets.rows(ids).view(np.uint64)
            shares = connected.shares[relation]
            add_rows(False, rows, 0, origins, to, 0, sums.shape[1], sums, shares)
            first, at = first + degrees.size, at + known.size

    # -- what nodes give ---------------------------------------------------------------------------

    def _computed(self, now: Running, name: str, some: Slice) -> Generator[_Given]:
        """From rows.  The first slice brings the results of nodes without edges, and files."""
        layers, nodes, first = self._step.layers, self._inputs.connected.receives[name], 0
        columns = slice(some.first, some.stop)
        with ExitStack() as held:
            made = self._made[name].lone if some.first == 0 else None
            later = writing(held, now.files, self._own[name])
            sent = [r for r in layers if r[0] == name]
            later_sent = {r: writing(held, now.files, self._sent[r]) for r in sent}
            lone = None if made is None else held.enter_context(now.run.hidden.rows(made))
            for h in self._inputs.read(now.run, name, self._before[name]):
                connected = nodes.among(first, first + h.size(0))
                first += h.size(0)
                own = sum(layers[r].targets(h) for r in self._into[name])
                assert isinstance(own, torch.Tensor)
                if lone is not None:
                    lone.append(self._step.activate(own[~connected][..., 0]).numpy())
                own = own[connected]
                later(own)
                rows = {}
                for r in sent:
                    given = layers[r].sources(h)[connected]
                    later_sent[r](given)
                    rows[r] = given[:, columns, 0].contiguous().numpy()
                yield _Given(own[:, columns, 0].numpy(), rows)

    def _stored(self, now: Running, name: str, some: Slice) -> Generator[_Given]:
        """The same of a later slice, from files."""
        nodes, num_nodes = self._inputs.connected.receives[name], self._inputs.types[name].num_nodes
        with ExitStack() as held:
            own = held.enter_context(self._cursor(now, (self._own[name][some],)))
            sent = {
                r: held.enter_context(self._cursor(now, (columns[some],)))
                for r, columns in self._sent.items()
                if r[0] == name
            }
            for first in range(0, num_nodes, STEP_ROWS):
                count = nodes.how_many(first, min(first + STEP_ROWS, num_nodes))
                yield _Given(own.take(count), {r: rows.take(count) for r, rows in sent.items()})
