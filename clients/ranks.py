"""The processes that train together: a single one, or those that torchrun started."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.rendezvous import rendezvous

TIMEOUT_S = 600.0
_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
_NOTICED_S = 1.0  # a killed process closes its sockets some moments before it has ended


class RankLost(RuntimeError):
    """Another process of the training has ended or is stopped; the rest cannot continue."""


class SplitPlace(NamedTuple):
    """A rank's place if batches are divided into shares, and each share is split by owner."""

    share: int = 0  # rank // owners
    shares: int = 1
    owner: int = 0
    owners: int = 0  # 0: not known yet, or batches are not split
    group: Any = None  # of the owners of this share, for their exchanges alone


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    world_size: int = 1
    local: int = 0  # among those of this host
    timeout_s: float = TIMEOUT_S  # of a collective

    def device(self, name: str) -> torch.device:
        """The device of this process: with "cuda", each process of a host has a GPU of its own."""
        several = name == "cuda" and self.world_size > 1
        return usable_device(f"cuda:{self.local}" if several else name)

    def split_place(self, owners: int) -> SplitPlace:
        """This rank's place among shares of `owners` owners each.  Raises ValueError.

        All ranks create the groups of all shares in the same order, as torch requires.
        """
        if self.world_size % owners:
            raise ValueError(
                f"{self.world_size} ranks: expected {owners}, one for each owner of the map, or a "
                "multiple; start so many, or choose another map"
            )
        share, owner = divmod(self.rank, owners)
        shares, groups = self.world_size // owners, []
        limit = timedelta(seconds=self.timeout_s)
        for first in range(0, self.world_size, owners) if self.world_size > 1 else ():
            groups.append(distributed.new_group(range(first, first + owners), timeout=limit))
        return SplitPlace(share, shares, owner, owners, groups[share] if groups else None)

    def refuse_different(self, what: str, value: str) -> None:
        """Raise ValueError, on all ranks, if `value` is not the same on all of them."""
        values = [value] * self.world_size
        if self.world_size > 1:
            distributed.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"{what}: found {values[0]} on rank 0 and {other} on rank {rank}, expected one "
                    "for all ranks; start them all again"
                )

    def of_first(self, value: Any) -> Any:
        """The `value` of rank 0, on all ranks."""
        values = [value]
        if self.world_size > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]

    def maximum(self, values: list[int]) -> list[int]:
        """The maximum of each value over all ranks."""
        found = torch.tensor(values)
        if self.world_size > 1:
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
        largest: list[int] = found.tolist()
        return largest

    def add_up(self, values: Tensor) -> None:
        """Replace `values` by their sum over all ranks."""
        if self.world_size > 1:
            distributed.all_reduce(values)

    def total(self, *values: float) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        self.add_up(sums)
        result: list[float] = sums.tolist()
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            distributed.barrier()


class FlatGradients:
    """The gradients of a model, as views of one tensor that all ranks add up at once.

    A parameter that takes no part in a step has a gradient of zeros, for any number of ranks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """All parameters have one dtype and lie on one device."""
        self._ranks = ranks
        parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + 2)  # the last two: loss, labelled seeds
        for parameter, stop in zip(parameters, accumulate(sizes), strict=True):
            parameter.grad = self.flat[stop - parameter.numel() : stop].view_as(parameter)

    def of_mean(self, loss: Tensor, count: Tensor) -> tuple[float, int]:
        """Compute the gradients of the mean loss over all ranks.

        loss    sum of the losses of this rank, 0-d; it requires grad on every rank
        count   number of these losses, 0-d; 0 is possible

        Returns both, added up over all ranks.
        """
        self.clear()
        self.add(loss, count)
        return self.mean(everywhere=True)

    def clear(self) -> None:
        self.flat.zero_()

    def add(self, loss: Tensor, count: Tensor) -> None:
        """Add the gradients of a sum of losses, which requires grad; arguments as of `of_mean`."""
        torch.autograd.backward(loss)
        self.flat[-2] += loss.detach()
        self.flat[-1] += count

    def mean(self, everywhere: bool) -> tuple[float, int]:
        """Divide the added gradients by the number of losses: of all ranks, or of this one.

        Returns the sum of the losses, and their number.
        """
        total, counted = self.mean_on_device(everywhere).tolist()
        return total, int(counted)

    def mean_on_device(self, everywhere: bool) -> Tensor:
        """As `mean`, but returns a tensor (2,), so that the host waits for nothing."""
        if everywhere:
            self._ranks.add_up(self.flat)
        totals = self.flat[-2:].clone()
        self.flat /= totals[1].clamp(min=1)
        return totals


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
def joined(timeout_s: float = TIMEOUT_S, environment: Any = os.environ) -> Iterator[Ranks]:
    """Join the process group of torchrun's variables; without them, a single process.

    Uses gloo, and NCCL between GPUs.

    timeout_s   how long a collective waits for the other ranks

    Raises RankLost: another process of this host has ended, or was stopped for that long.
    """
    rank, world_size, local = (int(environment.get(name, value)) for name, value in _VARIABLES)
    ranks = Ranks(rank, world_size, local, timeout_s)
    if world_size == 1:
        yield ranks
        return
    limit = timedelta(seconds=timeout_s)
    store, *_ = next(rendezvous("env://", rank, world_size, timeout=limit))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=limit
    )
    store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
    processes = [store.get(f"process/{r}").decode().split() for r in range(world_size)]
    try:
        yield ranks
    except RuntimeError as error:
        lost = _lost(ranks, store, processes)
        if lost:
            raise RankLost(
                f"rank {rank}: {lost}, expected all {world_size} ranks; start them all "
                "again, they go on from --checkpoint"
            ) from error
        raise
    finally:
        distributed.destroy_process_group()


def _lost(ranks: Ranks, store: Any, processes: list[list[str]]) -> str:
    """The rank of this host that was lost first, as far as is known; "" if none was.

    Ranks that notice a loss end too, and others may notice those: the first report counts.
    """
    until, found = time.monotonic() + _NOTICED_S, ""
    while not found and time.monotonic() < until:
        for rank, (host, pid) in enumerate(processes):
            state = _process_state(int(pid)) if host == socket.gethostname() else ""
            if state and rank != ranks.rank and not found:
                found = f"rank {rank} (process {pid}) {state}"
        time.sleep(0.01)
    with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
        store.set_timeout(timedelta(seconds=_NOTICED_S))
        found = store.compare_set("lost", "", found).decode() if found else found
    return found


def _process_state(pid: int) -> str:
    """Why a process of this host cannot take part; "" if it can."""
    try:
        # "pid (name) state ...": a name may have any character in it
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    return {"Z": "has ended", "X": "has ended", "T": "is stopped"}.get(state, "")
