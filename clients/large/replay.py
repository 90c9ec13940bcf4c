"""Forward, backward and optimizer of batches of one shape, replayed as one CUDA graph."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from clients.large.padding import PaddedBatch

__all__ = ["ReplayedStep", "check_recordable", "record"]

_WARM_UPS = 3  # on the stream that is captured: libraries allocate at their first calls


class ReplayedStep:
    """A training step that is recorded with its first batch, and replayed with each."""

    def __init__(
        self, backward: Callable[[PaddedBatch], Tensor], step: Callable[[], object]
    ) -> None:
        """Neither may have the host wait for the device.

        backward   computes the gradients of a batch, and gives what the step is to return
        step       of the optimizer, which has stepped before
        """
        self._backward, self._step = backward, step
        self._fixed: PaddedBatch | None = None  # the tensors that the graph reads
        self._replay: Callable[[], object] = lambda: None
        self._result = torch.empty(0)

    def __call__(self, batch: PaddedBatch) -> Tensor:
        """What `backward` gave; it is another batch's after the next call."""
        # seeds that there are differ in number, and no model reads their places or further arrays
        batch = replace(batch, input_id=batch.input_id[:0], features={})
        if self._fixed is None:
            self._fixed = batch.map(torch.clone)
            self._replay = record(self._run, self._warm_up, batch.n_id.device)
        else:
            new: list[Tensor] = []
            batch.map(lambda tensor: new.append(tensor) or tensor)  # type: ignore[func-returns-value]
            self._fixed.map(lambda tensor: tensor.copy_(new.pop(0)))
        self._replay()
        return self._result

    def _warm_up(self) -> None:
        assert self._fixed is not None
        self._backward(self._fixed)

    def _run(self) -> None:
        assert self._fixed is not None
        self._result = self._backward(self._fixed)
        self._step()


def check_recordable(device: torch.device, world_size: int) -> None:
    """Raises ValueError: steps there are not recorded."""
    if device.type != "cuda" or world_size > 1:
        raise ValueError(
            f"cuda_graph: found device '{device}' and {world_size} ranks, expected one rank with "
            "a CUDA device; leave cuda_graph out"
        )


def record(
    run: Callable[[], object], warm_up: Callable[[], object], device: torch.device
) -> Callable[[], object]:
    """Have a GPU record what `run` does, without doing it; the result does it.

    Random numbers go on from where the generator is at each replay.
    """
    state = torch.cuda.get_rng_state(device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            warm_up()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.set_rng_state(state, device)
    return graph.replay
