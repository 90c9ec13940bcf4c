"""Memory, reads and CPU time of processes, from /proc."""

import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def descendants(root: int) -> list[int]:
    """A process and all its living descendants."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for children in (PROC / str(pid) / "task").glob("*/children"):
            todo += [int(child) for child in _read(children).split()]
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """RssAnon + RssShmem of processes, the arena counted once."""
    anonymous, shared = 0, 0
    for pid in pids:
        fields = counts_of(PROC / str(pid) / "status")
        anonymous += fields.get("RssAnon", 0)
        shared = max(shared, fields.get("RssShmem", 0))
    return 1024 * (anonymous + shared)


def proportional_bytes(pids: Iterable[int]) -> int:
    """As above, but each page counts once: forked workers share their parent's, clients the arena.

    Walks page tables, which takes milliseconds per gigabyte: do not call while timing.
    """
    fields = [counts_of(PROC / str(pid) / "smaps_rollup") for pid in pids]
    return 1024 * sum(f.get("Pss_Anon", 0) + f.get("Pss_Shmem", 0) for f in fields)


def bytes_read(pids: Iterable[int]) -> int:
    """Bytes that storage delivered to processes and their ended children."""
    return sum(counts_of(PROC / str(pid) / "io").get("read_bytes", 0) for pid in pids)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of processes and their ended children."""
    ticks = 0
    for pid in pids:
        fields = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
        ticks += sum(int(f) for f in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def counts_of(path: Path) -> dict[str, int]:
    """Parse `name: number [unit]` lines; {} if the process is gone."""
    pairs = (line.partition(":") for line in _read(path).splitlines())
    values = {name: rest.split() for name, _, rest in pairs}
    return {name: int(rest[0]) for name, rest in values.items() if rest and rest[0].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
