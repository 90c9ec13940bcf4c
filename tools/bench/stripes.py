"""Stores with blocks striped over several disks of a given bandwidth, against one such disk.

The disks are loop devices with ext4; a control group limits the reads of processes that join.
Needs root, `losetup` and `mkfs.ext4`.
"""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from blockstore.make_stripes import copy_blocks, deal_store
from blockstore.store import BlockedFile
from blockstore.stripes import FORMAT, UNIT_BYTES, StripeSet
from blockstore.units import parse_bytes
from clients.torch import NeighborDataset
from tools.bench.disk import DEPTH, make_file, open_our_pages, open_ours
from tools.bench.harness import BenchOptions, BenchPlan, Ratio, Run, Side
from tools.bench.setup import counters, serving, total_bytes

_V1, _V2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")
_ROOM = 1.15  # size of an image over its contents: ext4 takes space, too


@dataclass(frozen=True)
class StripeOptions(BenchOptions):
    size: str = "256M"
    block_size: str = "1M"
    bandwidth: Annotated[str, "of each disk"] = "50M"
    disks: int = 2
    readers: int = DEPTH
    pages: Annotated[int, "read at random"] = 10_000
    store: Annotated[Path | None, "to be dealt, too, and epochs of it read"] = None
    plans: tuple[str, ...] = ("hyperbatch", "macrobatch")
    mem: str = "240M"
    fanouts: tuple[int, ...] = (5, 5)
    batch_size: int = 1000


class LoopDisks(NamedTuple):
    """Mounted devices, and the control group that limits reads of them."""

    folders: tuple[Path, ...]
    group: Path  # control group

    def join(self) -> None:
        """Limit the calling process, and all that it starts, to the bandwidth."""
        (self.group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def loop_disks(folder: Path, count: int, size: int, rate: int) -> Iterator[LoopDisks]:
    """Devices with room for `size` bytes and `rate` bytes/s each; removed at the end.

    Raises OSError, CalledProcessError: not possible on this machine, or for this user.
    """
    with ExitStack() as held:
        mounts, limits = [], []
        for i in range(count):
            image, mount = folder / f"disk{i}.img", folder / f"disk{i}"
            mount.mkdir(parents=True, exist_ok=True)
            held.callback(shutil.rmtree, mount, ignore_errors=True)
            with image.open("wb") as file:
                file.truncate(int(size * _ROOM) + (32 << 20))
            held.callback(image.unlink)
            device = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
            held.callback(_run, "losetup", "--detach", device)
            _run("mkfs.ext4", "-q", "-F", device)
            _run("mount", device, str(mount))
            held.callback(_run, "umount", str(mount))
            number = Path(device).stat().st_rdev
            limits.append((f"{os.major(number)}:{os.minor(number)}", rate))
            mounts.append(mount)
        yield LoopDisks(tuple(mounts), held.enter_context(_throttled(limits)))


@contextmanager
def _throttled(limits: list[tuple[str, int]]) -> Iterator[Path]:
    v1 = (_V1 / "blkio.throttle.read_bps_device").exists()
    group = (_V1 if v1 else _V2) / f"blockstore-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        for device, rate in limits:
            if v1:
                (group / "blkio.throttle.read_bps_device").write_text(f"{device} {rate}")
            else:
                (group / "io.max").write_text(f"{device} rbps={rate}")
        yield group
    finally:
        while (group / "cgroup.procs").read_text().split():  # until a side's processes end
            time.sleep(0.05)
        group.rmdir()


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def open_dealt(file: BlockedFile, disks: LoopDisks, given: StripeOptions) -> Iterator[Run]:
    """Rounds that read all blocks in order, then pages at random."""
    disks.join()
    slots = min(64, file.geometry.num_blocks)
    with (
        contextmanager(open_ours)(file, slots, given.readers) as blocks,
        contextmanager(open_our_pages)(file, given.pages, given.readers) as pages,
    ):
        yield lambda: {**blocks(), **pages()}


def read_epoch(store: Path, disks: LoopDisks, plan: str, given: StripeOptions) -> dict[str, float]:
    """Read an epoch from a fresh daemon, timed from its first batch on."""
    disks.join()
    with serving(store, store.parent, given.mem) as endpoint:
        batches = iter(
            NeighborDataset(
                endpoint, num_neighbors=list(given.fanouts), batch_size=given.batch_size,
                plan=plan, seed=1,
            )
        )  # fmt: skip
        next(batches)
        before, begun = counters(endpoint)["bytes_read"], time.perf_counter()
        rest = sum(1 for _ in batches)
        seconds = time.perf_counter() - begun
        read = counters(endpoint)["bytes_read"] - before
    return {"seconds": seconds, "batches": rest, "batches_per_s": rest / seconds, "MB": read / 1e6}


def stripes(given: StripeOptions) -> Iterator[BenchPlan]:
    """Blocks dealt over disks of a set bandwidth, against all of them on one of these."""
    size, setting = parse_bytes(given.size), {"cache": "cold", "bandwidth": given.bandwidth}
    room = size + (total_bytes(given.store) if given.store is not None else 0)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "disk.bin"
    counts = (1, given.disks)
    few, many = names = [f"{count} disk{'s' * (count > 1)}" for count in counts]
    stores = [given.folder / f"store-of{count}" for count in counts]
    try:
        file = make_file(path, size, parse_bytes(given.block_size))
        with loop_disks(given.folder, given.disks, 2 * room, parse_bytes(given.bandwidth)) as disks:
            dealt = [_deal_file(file, disks.folders[:count]) for count in counts]
            sides = [
                Side(name, open_dealt, (each, disks, given))
                for name, each in zip(names, dealt, strict=True)
            ]
            yield BenchPlan(sides, setting, [
                Ratio("blocks_of_one", many, "GB_per_s", few),
                Ratio("pages_of_one", many, "reads_per_s", few),
            ])  # fmt: skip
            if given.store is None:
                return
            for count, store in zip(counts, stores, strict=True):
                shutil.rmtree(store, ignore_errors=True)
                shutil.copytree(given.store, store)
                folders = [folder / f"store-of{count}" for folder in disks.folders[:count]]
                deal_store(store, folders, lambda _count: None)
            for plan in given.plans:
                sides = [
                    Side(name, read_epoch, (store, disks, plan, given))
                    for name, store in zip(names, stores, strict=True)
                ]
                setting |= {"plan": plan, "mem": given.mem}
                yield BenchPlan(sides, setting, [Ratio("rate_of_one", many, "batches_per_s", few)])
    finally:
        path.unlink(missing_ok=True)
        for store in stores:
            shutil.rmtree(store, ignore_errors=True)


def _deal_file(file: BlockedFile, folders: tuple[Path, ...]) -> BlockedFile:
    names = tuple(str(folder / f"of{len(folders)}") for folder in folders)
    deal = StripeSet(FORMAT, "bench", UNIT_BYTES, names, ()).deal(file.path, file.geometry)
    dealt = replace(file, shards=deal.files, deal=deal)
    copy_blocks(file, dealt, lambda _count: None)
    return dealt
