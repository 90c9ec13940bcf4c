"""A control group that limits the memory of the processes in it."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_END_S = 30.0
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class ControlGroup:
    """A memory control group with a limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._v1 = folder, (folder / "memory.limit_in_bytes").exists()
        self._write("memory.limit_in_bytes" if self._v1 else "memory.max", limit)

    def join(self) -> None:
        """Move the calling process in."""
        self._write("cgroup.procs", os.getpid())

    def kills(self) -> int:
        """Number of processes in it that the OOM killer has killed."""
        name = "memory.oom_control" if self._v1 else "memory.events"
        for line in (self._folder / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def end(self) -> None:
        """Kill the processes that a failed run left behind, and wait until all have left."""
        deadline = time.monotonic() + _END_S
        while pids := (self._folder / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._folder}: processes {', '.join(pids)} do not end")
            time.sleep(0.01)

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))


@contextmanager
def group(limit: int) -> Iterator[ControlGroup]:
    """A control group, removed at the end.  Raises OSError if none can be made."""
    parent = _V1 if (_V1 / "cgroup.procs").exists() else _V2
    folder = parent / f"blockstore-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        made = ControlGroup(folder, limit)
        try:
            yield made
        finally:
            made.end()
    finally:
        folder.rmdir()
