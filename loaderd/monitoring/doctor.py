"""Check what a machine offers a daemon; each check has a finding and a remedy."""

import contextlib
import fcntl
import mmap
import os
import platform
import random
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from statistics import median

import msgspec

from blockstore.errors import BudgetTooSmall, StoreError
from blockstore.io.arena import Arena, available_memory
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.disks import SLOW
from blockstore.io.files import open_to_read, probe_direct
from blockstore.io.ring import DEPTH, QueueOwner
from blockstore.kernels.crc import page_crcs
from blockstore.kernels.jit import cache_folder
from blockstore.store import Store, open_store
from blockstore.units import format_bytes
from loaderd.memory.ledger import EngineSettings, make_budget, served_rows
from loaderd.monitoring.report import table

KERNEL_WELL = (5, 14)  # memory taken at once
FILES_BESIDE = 64 + 4 * 64  # descriptors of the daemon itself, and of 64 clients
SHM = "/dev/shm"  # noqa: S108
SHM_WELL = 1 << 30
DISK_WELL = 500 << 20  # bytes/s
DISK_S, DISK_THREADS, READ_BYTES = 1.0, 8, 1 << 20
HUGE_WELL = 64 << 20
F_GET_SEALS = 1034


class State(StrEnum):
    """How a check went."""

    ok = "ok"
    warn = "warn"  # works, could be better
    fail = "fail"  # the daemon would not start, or not serve


class MachineCheck(msgspec.Struct, frozen=True):
    """One check and its result."""

    name: str
    state: State
    found: str
    remedy: str = ""  # what to do if the state is not ok


def _judge(name: str, good: bool, found: str, remedy: str) -> MachineCheck:
    """Good, or a warning with its remedy."""
    return MachineCheck(name, State.ok if good else State.warn, found, "" if good else remedy)


def judge_kernel(release: str) -> MachineCheck:
    """Judge a kernel by its release, such as `6.1.0-18-amd64`."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    remedy = "starting touches memory page by page: Linux 5.14 or newer takes it at once"
    return _judge("kernel", version >= KERNEL_WELL, release, remedy)


def judge_cores(cores: int) -> MachineCheck:
    """Judge the number of cores that this process may run on."""
    remedy = "trainer and daemon share one core: give the daemon cores of its own"
    return _judge("cores", cores >= 2, f"{cores} to run on", remedy)


def judge_memory(mem_bytes: int, free: int, source: str) -> MachineCheck:
    """`--mem` against what could be taken now; `source` says what leaves it."""
    found = f"{source} leaves {format_bytes(free)}, --mem is {format_bytes(mem_bytes)}"
    if mem_bytes > free:
        less = format_bytes(free * 4 // 5)
        remedy = f"give --mem {less} or less, or raise the limit (MemoryMax=)"
        return MachineCheck("memory", State.fail, found, remedy)
    remedy = "trainers need memory, too: give a smaller --mem"
    return _judge("memory", mem_bytes <= free * 9 // 10, found, remedy)


def judge_memlock(limit: int, mem_bytes: int) -> MachineCheck:
    """The limit of locked memory, bytes; -1: none."""
    unlimited = limit == resource.RLIM_INFINITY
    found = f"{format_bytes(limit)}, --mem is {format_bytes(mem_bytes)}"
    remedy = (
        "the daemon locks nothing; what pins its memory (RDMA, io_uring) would be refused: "
        "LimitMEMLOCK=infinity, or ulimit -l unlimited"
    )
    good = unlimited or limit >= mem_bytes
    return _judge("memlock", good, "unlimited" if unlimited else found, remedy)


def judge_swap(swap_kib: int) -> MachineCheck:
    """Swap of the machine, KiB."""
    remedy = "the daemon's memory may be swapped out: swapoff -a, or MemorySwapMax=0 in its unit"
    found = format_bytes(swap_kib << 10) if swap_kib else "none"
    return _judge("swap", not swap_kib, found, remedy)


def judge_files(soft: int, hard: int, shards: int) -> MachineCheck:
    """The limit of open files against the store's shards."""
    need = shards + FILES_BESIDE
    found = f"at most {soft}, {shards} shards and 64 clients need {need}"
    if soft == resource.RLIM_INFINITY or soft >= need:
        return MachineCheck("open files", State.ok, found)
    how = f"ulimit -n {need}" if hard >= need else f"LimitNOFILE={need}"
    state = State.fail if soft < shards + 32 else State.warn
    return MachineCheck("open files", state, found, f"raise it: {how}")


def judge_shm(free: int) -> MachineCheck:
    """Free bytes of /dev/shm, which the daemon does not use; trainers' loader workers do."""
    remedy = (
        "torch passes batches of DataLoader workers through it: docker run --shm-size=8g, or "
        "mount -o remount,size=8G /dev/shm"
    )
    return _judge(SHM, free >= SHM_WELL, f"{format_bytes(free)} free", remedy)


def judge_disk(bytes_s: float, direct: bool) -> MachineCheck:
    """Random reads of 1 MiB, eight at a time."""
    found = f"{format_bytes(int(bytes_s))}/s in random reads of 1M, {DISK_THREADS} at a time"
    found += "" if direct else " (buffered: the page cache may have answered)"
    remedy = "epochs larger than memory wait for it: put the store on a local NVMe disk"
    return _judge("disk speed", bytes_s >= DISK_WELL, found, remedy)


def judge_pages(huge_bytes: int, whole: int) -> MachineCheck:
    """Judge how many of an arena's `whole` bytes lie on huge pages, as the daemon asks for."""
    found = f"{format_bytes(huge_bytes)} of {format_bytes(whole)} of shared memory"
    remedy = (
        "batches from memory come more slowly: use Linux 6.1 or newer; where free memory lies in "
        "pieces, echo 1 > /proc/sys/vm/compact_memory before the start"
    )
    return _judge("huge pages", huge_bytes >= whole, found, remedy)


# -- looking --------------------------------------------------------------------------------------


def _check_memfd() -> MachineCheck:
    """Makes an arena of two pages, and checks that its size is sealed."""
    try:
        with Arena(1, 2 * mmap.PAGESIZE) as arena:
            seals = fcntl.fcntl(arena.fd, F_GET_SEALS)
            os.close(arena.open_to_read())
    except (OSError, BudgetTooSmall) as error:
        remedy = "allow memfd_create and its seals in the container's seccomp profile"
        return MachineCheck("memfd", State.fail, str(error), remedy)
    return MachineCheck("memfd", State.ok, f"sealed ({seals:#x})")


def _check_pages() -> Iterator[MachineCheck]:
    """Makes an arena of some huge pages; if none can be made, other checks say why."""
    with contextlib.suppress(OSError, BudgetTooSmall), Arena(1, HUGE_WELL) as arena:
        yield judge_pages(arena.huge_bytes, HUGE_WELL)


def judge_kernel_cache(folder: str | None) -> MachineCheck:
    """`folder`: where compiled kernels are kept; None: nowhere."""
    remedy = (
        "every start, of trainers too, compiles for about a minute: let the installation be "
        "written, or give this user a folder of its own (XDG_CACHE_HOME, NUMBA_CACHE_DIR)"
    )
    return _judge("kernel cache", folder is not None, folder or "none", remedy)


def _check_shm() -> MachineCheck:
    try:
        stat = os.statvfs(SHM)
    except OSError as error:
        remedy = "mount a tmpfs there: torch passes batches of DataLoader workers through it"
        return MachineCheck(SHM, State.warn, error.strerror or str(error), remedy)
    return judge_shm(stat.f_bavail * stat.f_frsize)


def _check_gpu() -> MachineCheck:
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [re.search(r"Model:\s*(.+)", c.read_text()) for c in cards]
    nodes = list(Path("/dev").glob("nvidia[0-9]*")) + list(Path("/dev").glob("kfd"))
    if not nodes:
        found = f"{len(cards)} of the machine, no device here" if cards else "none; none is needed"
    else:
        found = ", ".join(n[1] for n in names if n) or f"{len(nodes)} devices"
    remedy = "this container has not been given it: docker run --gpus all"
    return _judge("GPU", bool(nodes) or not cards, found, remedy)


def _swap_kib() -> int:
    found = re.search(r"SwapTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return int(found[1]) if found else 0


def _shards(store: Store) -> list[Path]:
    files = [store.graph(r) for r in store.manifest.relations]
    files += [store.rows(r.array) for r in served_rows(store.manifest)]
    return [path for f in files for path in f.shards]


def judge_queue(refusal: str) -> MachineCheck:
    """`refusal`: why reads do not go through io_uring; '': they do."""
    found = refusal or f"io_uring: each reader thread has up to {DEPTH} reads in flight"
    remedy = (
        "each reader thread has one read in flight: allow io_uring (kernel.io_uring_disabled=0; "
        "in the seccomp profile io_uring_setup and io_uring_enter), or give more --readers"
    )
    return _judge("reads", not refusal, found, remedy)


def judge_disks(rates: Mapping[str, float]) -> MachineCheck:
    """Whether disks that blocks are dealt over read as fast as each other: bytes/s by folder."""
    slowest = min(rates, key=lambda folder: rates[folder])
    usual = median(rate for folder, rate in rates.items() if folder != slowest)
    found = ", ".join(f"{folder} {format_bytes(int(rate))}/s" for folder, rate in rates.items())
    remedy = f"every batch waits for {slowest}: replace it, or deal the store without it"
    return _judge("disks", rates[slowest] * SLOW >= usual, found, remedy)


def _check_direct(mode: str) -> MachineCheck:
    good = mode == "O_DIRECT"
    found = "the store's file system takes it" if good else mode
    remedy = "reads pass the page cache, at the cost of copies: use ext4, xfs or btrfs"
    return _judge("O_DIRECT", good, found, remedy)


def measure_disk(shards: Sequence[Path], direct: bool, seconds: float = DISK_S) -> float:
    """Bytes per second of random reads in aligned pieces of 1 MiB, or of the files' length."""
    fds = [open_to_read(path, direct) for path in shards]
    try:
        pieces = [
            (fd, offset)
            for fd in fds
            for offset in range(0, max(os.fstat(fd).st_size - READ_BYTES, 0) + 1, READ_BYTES)
        ]
        if not direct:
            for fd in fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()

        def read(seed: int) -> int:
            view, total = byte_view(aligned_buffer(READ_BYTES)), 0
            draw = random.Random(seed)  # noqa: S311
            while time.perf_counter() - begun < seconds:
                fd, offset = draw.choice(pieces)
                total += os.preadv(fd, [view], offset)
            return total

        with ThreadPoolExecutor(DISK_THREADS) as threads:
            total = sum(threads.map(read, range(DISK_THREADS)))
        return total / (time.perf_counter() - begun)
    finally:
        for fd in fds:
            os.close(fd)


def examine(settings: EngineSettings, path: Path | None) -> Iterator[MachineCheck]:
    """All checks; those of a store if `path` is given."""
    yield judge_kernel(platform.release())
    yield judge_cores(len(os.sched_getaffinity(0)))
    yield judge_memory(settings.mem_bytes, *available_memory())
    yield judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], settings.mem_bytes)
    yield judge_swap(_swap_kib())
    yield _check_memfd()
    yield judge_kernel_cache(cache_folder(page_crcs))
    yield _check_shm()
    with QueueOwner() as owner:
        yield judge_queue(owner.refusal)
    yield from _check_pages()
    yield _check_gpu()
    if path is None:
        yield judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE), 0)
    else:
        yield from _examine_store(settings, path)


def _examine_store(settings: EngineSettings, path: Path) -> Iterator[MachineCheck]:
    try:
        store = open_store(path)
        make_budget(store.manifest, settings)
    except BudgetTooSmall as error:
        yield MachineCheck("store", State.fail, str(error), "give a larger --mem")
    except (StoreError, OSError) as error:
        remedy = "give the folder of a store: blockstore ingest"
        yield MachineCheck("store", State.fail, str(error), remedy)
        return
    else:
        yield MachineCheck("store", State.ok, f"{path} (fingerprint {store.manifest.fingerprint})")
    shards = _shards(store)
    yield judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE), len(shards))
    missing = [s for s in shards if not s.exists()]
    if missing:
        found = f"{missing[0]} is missing"
        yield MachineCheck("shards", State.fail, found, "blockstore verify STORE")
    elif shards:
        modes = [probe_direct(s) for s in {s.stat().st_dev: s for s in shards}.values()]
        mode = next((m for m in modes if m != "O_DIRECT"), "O_DIRECT")
        direct = mode == "O_DIRECT"
        yield _check_direct(mode)
        yield judge_disk(measure_disk(shards, direct), direct)
        if store.stripes is not None and len(store.stripes.folders) > 1:
            parts = zip(store.stripes.folders, store.stripes.parts(), strict=True)
            own = {
                folder: [s for s in shards if s.is_relative_to(part) and s.stat().st_size]
                for folder, part in parts
            }
            if all(own.values()):
                yield judge_disks({f: measure_disk(files, direct) for f, files in own.items()})


def checks_text(checks: Sequence[MachineCheck]) -> str:
    """A line for each check, and below it what to do."""
    lines = table(
        [("check", "", "found"), *((c.name, c.state, c.found) for c in checks)], frozenset()
    )
    indent = " " * (max(len(c.name) for c in checks) + 2)
    for i, check in reversed(list(enumerate(checks))):
        if check.remedy:
            lines.insert(i + 2, f"{indent}-> {check.remedy}")
    return "\n".join(lines)
