"""Ranks of a training job for tests: processes that are started once and then given tasks.

torch is imported once, in the fork server of `multiprocessing`.  The store through which ranks find
each other is this process's, as torchrun's agent has it: it stays if a rank is killed.  There is
one for all tasks, as now and then it takes five seconds to open.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

import clients.ranks
from clients.ranks import joined

WAIT_S = 60
PRELOADED = ["torch._dynamo", "tests.clients.split_trainer"]  # optimizers import the first one


class Pool:
    """Processes that run functions as ranks of a group."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._tasks = 0
        pipes = [context.Pipe() for _ in range(size)]
        self.processes = [
            context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            for _, theirs in pipes
        ]
        for process in self.processes:
            process.start()
        self._pipes = [ours for ours, _ in pipes]
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], *arguments: Any, world: int) -> list[Any]:
        """What `function(ranks, *arguments)` gives on each rank of a group of this size."""
        found = self.outcomes(range(world), function, *arguments, world=world)
        assert all(done for done, _ in found), "\n".join(text for done, text in found if not done)
        return [value for _, value in found]

    def outcomes(
        self,
        of: Iterable[int],
        function: Callable[..., Any],
        *arguments: Any,
        world: int,
        timeout_s: float = 60.0,
    ) -> list[tuple[bool, Any]]:
        """Of some ranks: whether the function came to an end, and its value or its traceback."""
        self._tasks += 1
        for rank, pipe in enumerate(self._pipes[:world]):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world)}
            pipe.send((place, self._tasks, timeout_s, function, arguments))
        found = []
        for rank in of:
            assert self._pipes[rank].poll(WAIT_S), f"rank {rank} of {function.__name__} hangs"
            found.append(self._pipes[rank].recv())
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def pool(size: int) -> Iterator[Pool]:
    opened = Pool(size)
    try:
        yield opened
    finally:
        opened.close()


def _serve(pipe: "Connection", port: int) -> None:
    """Tasks, one after another, until the other end is closed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody is asked for the host's address
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            place, task, timeout_s, function, arguments = pipe.recv()
        except EOFError:  # nobody asks more
            return
        met = distributed.PrefixStore(str(task), store)
        try:
            with (
                patch.object(clients.ranks, "rendezvous", lambda *_, **__: iter([[met]])),  # noqa: B023
                joined(timeout_s, place) as ranks,
            ):
                value = True, function(ranks, *arguments)
        except BaseException:
            value = False, traceback.format_exc()
        pipe.send(value)
