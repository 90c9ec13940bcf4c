"""Pad batches to one shape, so that a model compiles once, or a step becomes one CUDA graph.

Each hop's nodes and edges are padded to a bound.  Padding edges lead from a padding node, whose
row is zero, to another one, whose result is not used.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from clients.torch import Batch

_MARGIN = 0.05  # by which a bound exceeds the largest batch of the first epoch
_WARM_UPS = 3  # runs before the capture: libraries allocate at their first calls
_NOBODY = -1  # label and id of a padding node: it has no loss


@dataclass(slots=True, repr=False, kw_only=True)
class PaddedBatch(Batch):
    """A batch whose `num_sampled_nodes`, `num_sampled_edges` and `batch_size` are the bounds.

    `input_id` has only real seeds; padding seeds have the label -1.
    """


class Padding:
    """Bounds on nodes and edges of each hop, learned from batches and then kept."""

    def __init__(self) -> None:
        self.larger = 0  # batches that exceeded the bounds, and were not padded
        self.settled = False
        self._nodes: list[int] = []
        self._edges: list[int] = []

    def observe(self, batch: Batch) -> None:
        """Extend the bounds to a batch."""
        self._nodes = _largest(self._nodes, batch.num_sampled_nodes)
        self._edges = _largest(self._edges, batch.num_sampled_edges)

    def settle(self, maxima: list[int]) -> None:
        """Fix the bounds; `maxima`: the property's maximum over all ranks."""
        hops = len(self._nodes)
        # room for at least one padding node
        self._nodes = [int(n * (1 + _MARGIN)) + 1 for n in maxima[:hops]]
        self._edges = [int(e * (1 + _MARGIN)) for e in maxima[hops:]]
        self.settled = True

    @property
    def maxima(self) -> list[int]:
        """Nodes, then edges by hop: the largest, or the bounds once these are settled."""
        return [*self._nodes, *self._edges]

    def state_dict(self) -> dict[str, Any]:
        """The bounds, and whether they are settled, for `load_state_dict`."""
        return {"settled": self.settled, "nodes": self._nodes, "edges": self._edges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the bounds that `state_dict` gave."""
        self.settled, self._nodes, self._edges = (state[n] for n in ("settled", "nodes", "edges"))

    def __call__(self, batch: Batch) -> Batch:
        """Pad a batch; one beyond the bounds is returned unchanged, and counted."""
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        fits = all(n < bound for n, bound in zip(nodes, self._nodes, strict=True))
        if not (fits and all(e <= bound for e, bound in zip(edges, self._edges, strict=True))):
            self.larger += 1
            return batch
        ends = list(accumulate(self._nodes))
        device = batch.n_id.device
        spans = zip(nodes, ends, self._nodes, strict=True)
        places = torch.cat(
            [torch.arange(end - bound, end - bound + n, device=device) for n, end, bound in spans]
        )
        parts = []
        for hop, (first, stop) in enumerate(pairwise(accumulate(edges, initial=0))):
            spare = places.new_tensor([[ends[hop + 1] - 1], [ends[hop] - 1]])
            spare = spare.expand(2, self._edges[hop] - (stop - first))
            parts += [places[batch.edge_index[:, first:stop]], spare]

        def fill(rows: Tensor | None, value: int = 0) -> Tensor | None:
            if rows is None:
                return None
            out = rows.new_full((ends[-1], *rows.shape[1:]), value)
            out[places] = rows
            return out

        own = {f.name: getattr(batch, f.name) for f in fields(Batch)}
        own |= {
            "x": fill(batch.x), "y": fill(batch.y, _NOBODY), "n_id": fill(batch.n_id, _NOBODY),
            "e_id": None, "edge_features": {}, "edge_weight": None, "edge_time": None,
            "edge_index": torch.cat(parts, dim=1),
            "features": {name: fill(rows) for name, rows in batch.features.items()},
            "batch_size": self._nodes[0], "num_sampled_nodes": self._nodes,
            "num_sampled_edges": self._edges,
        }  # fmt: skip
        return PaddedBatch(**own)


def _largest(known: list[int], found: list[int]) -> list[int]:
    return [max(pair) for pair in zip(known or found, found, strict=True)]


class ReplayedStep:
    """A training step that is recorded at its first batch, and replayed for each batch."""

    def __init__(
        self, backward: Callable[[PaddedBatch], Tensor], step: Callable[[], object]
    ) -> None:
        """Neither function may make the host wait for the device.

        backward   computes the gradients of a batch, and returns the step's result
        step       the optimizer's, which must have run once before
        """
        self._backward, self._step = backward, step
        self._fixed: PaddedBatch | None = None  # the tensors that the graph reads
        self._replay: Callable[[], object] = lambda: None
        self._result = torch.empty(0)

    def __call__(self, batch: PaddedBatch) -> Tensor:
        """The result of `backward`, valid until the next call."""
        # the number of real seeds varies, and no model reads their places or further arrays
        batch = replace(batch, input_id=batch.input_id[:0], features={})
        if self._fixed is None:
            self._fixed = batch.map(torch.clone)
            warm_up = partial(self._backward, self._fixed)
            self._replay = record(self._run, warm_up, batch.n_id.device)
        else:
            for fixed, new in zip(self._fixed.tensors(), batch.tensors(), strict=True):
                fixed.copy_(new)
        self._replay()
        return self._result

    def _run(self) -> None:
        assert self._fixed is not None
        self._result = self._backward(self._fixed)
        self._step()


def check_recordable(device: torch.device, world_size: int) -> None:
    """Raises ValueError: steps on this device, or with several ranks, cannot be recorded."""
    if device.type != "cuda" or world_size > 1:
        raise ValueError(
            f"cuda_graph: found device '{device}' and {world_size} ranks, expected one rank with "
            "a CUDA device; leave cuda_graph out"
        )


def record(
    run: Callable[[], object], warm_up: Callable[[], object], device: torch.device
) -> Callable[[], object]:
    """Capture `run` on a GPU without executing it; the returned function executes it.

    At each replay random numbers continue from the generator's current state.
    """
    state = torch.cuda.get_rng_state(device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            warm_up()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # in "global", the default mode, CUDA fails the capture as soon as another thread, such as the
    # one that reads ahead, waits for a copy
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    torch.cuda.set_rng_state(state, device)
    return graph.replay
