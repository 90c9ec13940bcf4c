"""Tasks on Ray, local or on a cluster: the only module that uses it.

Each task requests one processor and `--mem` bytes of memory from Ray, so a node runs as many tasks
at a time as it has room for.  If a worker or a node dies, Ray runs its tasks again elsewhere.
"""

import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from threading import current_thread, main_thread
from typing import Any

from blockstore.units import format_bytes
from preprocess.errors import BadInput, ExecutorLost
from preprocess.pipeline.tasks import Task, TaskResult, run_task

_ADDRESS = re.compile(r"auto|local:(?P<workers>\d+)|ray://[^/:]+:\d+")
_EXPECTED = "auto, local:N with at least one worker, or ray://HOST:PORT"
_OLDEST = (2, 60)  # oldest version of Ray that is known to work
_RETRIES = 32  # of a task whose process or node has died
_AHEAD = 2  # tasks submitted for each worker, so that it can begin the next one at once
_OBJECT_BYTES = 80 << 20  # of Ray's object store, which is not used: about the minimum it accepts


@contextmanager
def ray_executor(address: str, mem_bytes: int) -> Iterator["RayExecutor"]:
    """Connect to the Ray at an address, or start a local one and stop it at the end.

    mem_bytes   memory of a task

    Raises BadInput: no such address, Ray is not installed or of another version, too little memory.
    """
    ray = _import_ray(address)
    before = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(sys.stderr):  # Ray prints messages about dead workers to stdout
        _connect(ray, address)
        try:
            if current_thread() is main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray has replaced the handler
            yield RayExecutor(ray, address, mem_bytes)
        finally:
            ray.shutdown()


class RayExecutor:
    """An `Executor` on a Ray that this process is connected to."""

    def __init__(self, ray: Any, address: str, mem_bytes: int) -> None:
        """Raises BadInput if no node has a processor and `mem_bytes` of memory."""
        self._ray, self._address = ray, address
        self._remote = ray.remote(run_task).options(
            num_cpus=1, memory=mem_bytes, max_retries=_RETRIES, name="blockstore ingest"
        )
        held = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.workers = sum(
            int(min(node.get("CPU", 0), node.get("memory", 0) // mem_bytes)) for node in held
        )
        if not self.workers:
            maximum = format_bytes(int(max((node.get("memory", 0) for node in held), default=0)))
            raise BadInput.at(
                f"--ray {address}", f"nodes of at most {maximum} of memory",
                f"one with a processor and {format_bytes(mem_bytes)} for a task",
                "give less --mem, or let Ray have more",
            )  # fmt: skip

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[int, TaskResult]]:
        """Yield (number, result) as tasks end.  Raises what a task raises; ExecutorLost."""
        running: dict[Any, int] = {}
        following = 0
        try:
            while running or following < len(tasks):
                while following < len(tasks) and len(running) < _AHEAD * self.workers:
                    running[self._remote.remote(tasks[following])] = following
                    following += 1
                ended, _ = self._ray.wait(list(running), num_returns=1)
                for ref in ended:
                    yield running.pop(ref), self._result(ref)
        finally:
            for ref in running:
                self._ray.cancel(ref, force=True)

    def _result(self, ref: Any) -> TaskResult:
        errors = self._ray.exceptions
        try:
            found: TaskResult = self._ray.get(ref)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            text = " ".join(str(error).split())
            raise ExecutorLost(
                f"--ray {self._address}: a task was lost {_RETRIES + 1} times, or Ray was: {text}; "
                "the same command goes on"
            ) from error
        return found


def _import_ray(address: str) -> Any:
    """Import Ray.  Raises BadInput: a malformed address, or no suitable Ray is installed."""
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["workers"] is not None and not int(found["workers"])):
        raise BadInput.at("--ray", address, _EXPECTED, "correct it")
    if find_spec("ray") is None:
        raise BadInput.at(
            f"--ray {address}", "no Ray", "it to be installed",
            'pip install "blockstore[ray]", or leave --ray out',
        )  # fmt: skip
    installed = version("ray")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise BadInput.at(
            f"--ray {address}", f"Ray {installed}", f"{oldest} or newer",
            'pip install -U "blockstore[ray]"',
        )  # fmt: skip
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return importlib.import_module("ray")


def _connect(ray: Any, address: str) -> None:
    """Connect.  Raises BadInput: nothing answers, or a Ray of another version."""
    kind, _, workers = address.partition(":")
    how: dict[str, Any] = {"address": address}
    if kind == "local":
        how = {
            "address": "local", "num_cpus": int(workers), "include_dashboard": False,
            "object_store_memory": _OBJECT_BYTES,
        }  # fmt: skip
    try:
        ray.init(**how, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds; RuntimeError for another version
        text = " ".join(str(error).split())
        raise BadInput.at(
            f"--ray {address}", text.rstrip("."), f"a Ray of version {ray.__version__} there",
            "correct the address, or install the cluster's version",
        ) from error  # fmt: skip
