"""Who takes part in training: one process, or those that torchrun started."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    world_size: int = 1
    local: int = 0  # among those of this host

    def device(self, name: str) -> torch.device:
        """Where this process trains: of "cuda", each process of a host has a GPU of its own."""
        several = name == "cuda" and self.world_size > 1
        return usable_device(f"cuda:{self.local}" if several else name)

    def wrap(self, model: nn.Module, *, partly_used: bool = False) -> nn.Module:
        """The model, with gradients averaged over all ranks.

        partly_used   a batch may leave out parameters, as where it has no edge of a relation
        """
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, find_unused_parameters=partly_used)

    def total(self, *values: float) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            distributed.all_reduce(sums)
        result: list[float] = sums.tolist()
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            distributed.barrier()


def usable_device(name: str) -> torch.device:
    """The device of this name.  Raises ValueError: there is none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device {name!r}: {reason}, expected one that this torch can use, such as cpu"
        ) from error
    return device


@contextlib.contextmanager
def joined(environment: Any = os.environ) -> Iterator[Ranks]:
    """The group that torchrun's variables name; one process without them.

    Over gloo, and NCCL between GPUs.
    """
    ranks = Ranks(*(int(environment.get(name, value)) for name, value in _VARIABLES))
    if ranks.world_size == 1:
        yield ranks
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size)
    try:
        yield ranks
    finally:
        distributed.destroy_process_group()
