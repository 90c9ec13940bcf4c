"""Trainers that run in processes of their own, and record what they read."""

import gc
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch

from clients.dataset import SteppedDataset
from clients.split import SplitDataset
from clients.torch import HopDataset, NeighborDataset
from loaderd.api.errors import NoDaemon, Refused, SessionLost

PLANS = ("minibatch", "hyperbatch", "macrobatch", "chunks", "rows", "split")
OWNERS = "halves"  # an owner map of two; trainers of plan "split" are its first owner
METHODS: dict[str, Literal["cr", "rr"]] = {"chunks": "cr", "rows": "rr"}
DIGEST_CHARS = 32
STEP_S = 0.005  # time per batch of a trainer beside a fuzzer


def dataset(endpoint: str, plan: str, **options: Any) -> SteppedDataset[Any]:
    """A dataset of a plan, for a store that `tools.faults.runner.make_store` made."""
    if plan in METHODS:
        return HopDataset(endpoint, method=METHODS[plan], **options)
    if plan == "split":
        fanouts = (5, 3)
        return SplitDataset(endpoint, num_neighbors=fanouts, owners=OWNERS, owner=0, **options)
    return NeighborDataset(
        endpoint, num_neighbors=(5, 3), plan=plan, window=4,
        hyperbatch=8 if plan == "hyperbatch" else 0,
        macro_partitions=1 if plan == "macrobatch" else 0, **options,
    )  # fmt: skip


def digest(batch: Any) -> str:
    """Digest of all arrays of a batch of any plan."""
    found = hashlib.sha256()
    x = batch.x if isinstance(batch.x, list) else [batch.x]
    names = ("y", "edge_index", "n_id", "input_id")
    more = getattr(batch, "features", {}).values()
    for tensor in (*x, *(getattr(batch, name, None) for name in names), *more):
        if tensor is not None:
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:DIGEST_CHARS]


def replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


class Work(NamedTuple):
    """The options of trainers that save no state."""

    endpoint: str
    folder: Path  # for what they write
    batch_size: int
    seed: int
    daemon_may_die: bool = False

    def dataset(self, plan: str) -> SteppedDataset[Any]:
        return dataset(self.endpoint, plan, batch_size=self.batch_size, seed=self.seed)


def write_counts(work: Work, name: str, counts: Counter[str]) -> None:
    """Publish what a trainer has read so far."""
    replace(work.folder / f"{name}.json", json.dumps(counts))


def read_epoch(
    data: SteppedDataset[Any],
    plan: str,
    counts: Counter[str],
    go_on: Callable[[], bool] = lambda: True,
    maximum: int = 1 << 30,
) -> list[str]:
    """Digests of the first `maximum` batches of the next epoch."""
    found = []
    for batch in data:
        found.append(digest(batch))
        counts[f"{plan} batches"] += 1
        if len(found) >= maximum or not go_on():
            break
    counts["epochs"] += 1
    return found


def check_again(expected: list[str], found: list[str], plan: str) -> None:
    """Raises SystemExit: epoch 0, as far as it was read, differs from the first time."""
    if found != expected[: len(found)]:
        raise SystemExit(f"{plan}: epoch 0 is not what it was the first time")


def read_every_plan(work: Work, name: str, stop: Event) -> None:
    """Until `stop` is set, read epochs 0 and 1 of each plan in turn, attaching again each time.

    Ends with an error if epoch 0 of a plan does not give the same batches every time.
    """
    logging.basicConfig(level=logging.ERROR)
    counts, expected = Counter[str](), dict[str, list[str]]()
    while not stop.is_set():
        for plan in PLANS:
            data = work.dataset(plan)
            for epoch in range(2):
                found = read_epoch(data, plan, counts, lambda: not stop.is_set())
                if epoch == 0:
                    check_again(expected.setdefault(plan, found), found, plan)
            data.close()
            write_counts(work, name, counts)


def read_again(work: Work, name: str, stop: Event) -> None:
    """Read epoch 0 over and over in one session, whose number is in the counts."""
    counts, data = Counter[str](), work.dataset("minibatch")
    expected = read_epoch(data, "minibatch", counts)
    counts["session"] = data.attached().session

    def go_on() -> bool:
        time.sleep(STEP_S)
        return not stop.is_set()

    while not stop.is_set():
        write_counts(work, name, counts)
        data.set_epoch(0)
        check_again(expected, read_epoch(data, "minibatch", counts, go_on), "minibatch")
    data.close()
    write_counts(work, name, counts)


def read_briefly(work: Work, name: str, seed: int) -> None:
    """Attach and read part of an epoch of a random plan, two or three times.

    Leaves without detaching one time in four.
    """
    logging.basicConfig(level=logging.ERROR)
    random, counts = Random(seed), Counter[str]()
    with suppress(*(SessionLost, NoDaemon) if work.daemon_may_die else ()):
        for _ in range(random.randint(2, 3)):
            data = work.dataset(plan := random.choice(PLANS))
            try:
                read_epoch(data, plan, counts, maximum=random.randint(1, 40))
            except Refused:  # other sessions use the memory
                counts["refused"] += 1
            counts["attached"] += 1
            if random.random() < 0.75:
                data.close()
    write_counts(work, name, counts)


class Member(NamedTuple):
    """One trainer of a `TrainerJob`."""

    plan: str
    rank: int = 0
    world_size: int = 1
    endpoint: str = ""  # if not the job's


class TrainerJob(NamedTuple):
    """The options of trainers that save their state, each known by its number."""

    endpoint: str
    folder: Path  # for what they write
    members: tuple[Member, ...]
    batch_size: int
    save_every: int  # steps
    think_s: float  # a step

    def dataset(self, number: int) -> SteppedDataset[Any]:
        """The dataset of a trainer."""
        plan, rank, world_size, endpoint = self.members[number]
        return dataset(
            endpoint or self.endpoint, plan, batch_size=self.batch_size, seed=3, rank=rank,
            world_size=world_size, reconnect_s=120.0,
        )  # fmt: skip

    def state(self, rank: int) -> Path:
        """The file in which a rank saves its state."""
        return self.folder / f"state-{rank}.json"

    def log(self, rank: int, start: int) -> Path:
        """The log of a rank from one start to its end."""
        return self.folder / f"log-{rank}-{start:04d}"

    @property
    def last_epoch(self) -> Path:
        """The file with the last epoch of all trainers, written once it is known."""
        return self.folder / "last-epoch"


def train(job: TrainerJob, rank: int, start: int) -> None:
    """Train from the last saved state to the end of the last epoch.

    The log has a line "from EPOCH STEP" (the last step consumed before), "EPOCH STEP DIGEST" for
    each batch, and finally "end" with the descriptors and arenas that this process still holds.
    """
    log = os.open(job.log(rank, start), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    logging.basicConfig(filename=job.folder / f"notes-{rank}-{start:04d}")
    try:
        before = open_files()
        _train(job, rank, log)
        gc.collect()
        leaked = {k: n for k, n in open_files().items() if n > before.get(k, 0)}
        _put(log, f"end {json.dumps(leaked)}")
    except BaseException as error:
        _put(log, f"error {type(error).__name__}: {error}")
        raise
    finally:
        os.close(log)


def _train(job: TrainerJob, rank: int, log: int) -> None:
    data = job.dataset(rank)
    epoch, step = 0, -1
    if job.state(rank).exists():
        state = json.loads(job.state(rank).read_text())
        data.load_state_dict(state)
        epoch, step = state["epoch"], state["step"]
        data.set_epoch(epoch)
    _put(log, f"from {epoch} {step}")
    consumed = 0
    while not job.last_epoch.exists() or epoch <= int(job.last_epoch.read_text()):
        for batch in data:
            _put(log, f"{batch.epoch} {batch.step} {digest(batch)}")
            time.sleep(job.think_s)
            consumed += 1
            if consumed % job.save_every == 0:
                replace(job.state(rank), json.dumps(data.state_dict()))
        epoch += 1
    data.close()


def _put(log: int, line: str) -> None:
    os.write(log, f"{line}\n".encode())


def open_files(pid: int | str = "self") -> dict[str, int]:
    """Descriptors of a process by kind, and its mappings of arenas."""
    kinds: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            kinds[path.readlink().name.partition(":[")[0]] += 1
    maps = Path(f"/proc/{pid}/maps").read_text()
    kinds["arenas mapped"] = maps.count("memfd:blockstore-arena")
    return dict(kinds)
