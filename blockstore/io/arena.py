"""The arena: shared memory in equal slots, which only its maker can write."""

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.errors import BudgetTooSmall
from blockstore.io.mapping import HUGE_BYTES, map_shared
from blockstore.io.reclaim import set_immutable
from blockstore.units import format_bytes

STAMP_BYTES = 4096  # after the slots; the first 8 are not zero as long as the slots are intact
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 0x1, 0x2, 0x4
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_POPULATE_STEP = 256 << 20
_REFUSALS = 4  # of huge pages, after which no more are asked for: memory is too fragmented
_NO_LIMIT = 1 << 60
_LIMITS = (errno.ENOMEM, errno.EFBIG, errno.ENOSPC, errno.EFAULT)
# Memory of a daemon that has just ended comes back at some GiB/s: as long as free memory grows from
# one look to the next, nothing is refused yet.
_POLL_S, _POLLS, _GROWTH_BYTES = 0.2, 300, 4 << 20


class Arena(Closing):
    """`num_slots` slots of `slot_bytes` each in a memfd: prefaulted and mapped.

    data    uint8 (num_slots * slot_bytes,), page-aligned, writable
    fd      of the memory, of this process alone
    stamp   byte offset of the word that is not zero as long as the slots are intact
    huge_bytes   bytes on huge pages, from which random rows and neighbors are read faster

    Others get the descriptor that `open_to_read` returns.  The memory is not sealed against
    writing, because such a seal also forbids `MADV_REMOVE`, by which the memory of a daemon that
    died is freed although a client still maps it (see `reclaim.py`).  What keeps
    others from writing is that their descriptor is read-only, that its file mode keeps other users
    from opening it again, and, with the capability CAP_LINUX_IMMUTABLE, that its file can be
    opened for writing by nobody, root included.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Raises BudgetTooSmall: free memory, a control group's or the process's limit (`ulimit`)
        cannot hold it."""
        self.num_slots, self.slot_bytes, self.huge_bytes = num_slots, slot_bytes, 0
        self.stamp = num_slots * slot_bytes
        size = self.stamp + STAMP_BYTES
        free, source = _wait_for_memory(size)
        if size > free:
            raise BudgetTooSmall(
                f"the arena takes {format_bytes(size)}, {source} leaves {format_bytes(free)}: give "
                f"a smaller --mem, or free some memory"
            )
        self.fd = os.memfd_create("blockstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._take(size)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
            os.fchmod(self.fd, 0o400)
            with contextlib.suppress(OSError):  # without the capability, or before Linux 6.0
                set_immutable(self.fd, True)
        except OSError as error:
            os.close(self.fd)
            if error.errno not in _LIMITS:
                raise
            raise BudgetTooSmall(
                f"the arena takes {format_bytes(size)}, the system does not give it "
                f"({error.strerror}): give a smaller --mem, or raise the process's limits "
                "(ulimit -v, ulimit -f)"
            ) from error
        except BaseException:
            os.close(self.fd)
            raise

    def _take(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self._map = map_shared(self.fd, size, writable=True)
        self.data = self._map.array(self.stamp)
        self._prefault(size)
        self._map.array(1, self.stamp)[0] = 1

    def open_to_read(self) -> int:
        """A new descriptor, the caller's to close, by which the memory can only be read.

        Each is an open file of its own, so that `flock` distinguishes their holders.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def place_of(self, memory: NDArray[Any]) -> int:
        """Byte of the arena at which a piece of it begins."""
        return memory.ctypes.data - self.data.ctypes.data

    def _prefault(self, size: int) -> None:
        refusals = 0
        for start in range(0, size, _POPULATE_STEP):
            count = min(_POPULATE_STEP, size - start)
            whole = count // HUGE_BYTES * HUGE_BYTES
            if whole and refusals < _REFUSALS:
                if self._take_huge(start, whole):
                    self.huge_bytes += whole
                else:
                    refusals += 1
            self._populate(start, count)

    def _take_huge(self, start: int, count: int) -> bool:
        """Take a part as huge pages, whatever sysfs has chosen; False: not all of it.

        Each must have a small page already: the kernel refuses to collapse what is empty.
        """
        self._map.array(count, start)[::HUGE_BYTES] = 0
        try:
            self._map.advise(_MADV_COLLAPSE, start, count)
        except OSError:  # before Linux 6.1; or free memory lies in pieces
            return False
        return True

    def _populate(self, start: int, count: int) -> None:
        try:
            self._map.advise(_MADV_POPULATE_WRITE, start, count)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # a kernel before 5.14
            self._map.array(count, start)[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        os.close(self.fd)  # the mapping goes with its last view


def _wait_for_memory(size: int) -> tuple[int, str]:
    """`available_memory`, once it is enough or grows no more."""
    free, source = available_memory()
    for _ in range(_POLLS):
        if size <= free:
            break
        concurrency.sleep(_POLL_S)
        before, (free, source) = free, available_memory()
        if free < before + _GROWTH_BYTES:
            break
    return free, source


def available_memory() -> tuple[int, str]:
    """Bytes that could be taken now, and what limits them: free memory or a control group."""
    limits = [(_meminfo_available(), "free memory")]
    limits += [(room, f"the control group at {where}") for room, where in _cgroup_rooms()]
    return min(limits)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _cgroup_rooms() -> list[tuple[int, str]]:
    """Room below the memory limit of every control group, v1 or v2, that this process is in."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        while True:
            found += _room(group, *names)
            if group == root or root not in group.parents:
                break
            group = group.parent
    return found


def _room(group: Path, limit_name: str, usage_name: str) -> list[tuple[int, str]]:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = (group / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return []
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return []
    cache = 0  # page cache is given back under pressure
    for name in ("total_inactive_file", "total_active_file", "inactive_file", "active_file"):
        if name in stat:
            cache += int(stat[stat.index(name) + 1])
            if name == "total_active_file":
                break
    return [(max(0, int(limit) - usage + cache), str(group))]
