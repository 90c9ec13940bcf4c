"""One trainer of `tools.storm`: reads batches, writes down what it got, saves where it stands."""

import gc
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from clients.dataset import SteppedDataset
from clients.hopwise.dataset import HopBatch
from clients.torch import Batch, HopDataset, NeighborDataset
from loaderd.errors import NoDaemon, SessionLost, ShuttingDown

DIGEST_CHARS = 32
METHODS: dict[str, Literal["cr", "rr"]] = {"chunks": "cr", "rows": "rr"}  # plans of hops


class Member(NamedTuple):
    """One trainer of a storm."""

    plan: str
    rank: int = 0
    world_size: int = 1
    endpoint: str = ""  # another than the job's


class Job(NamedTuple):
    """What all trainers of a storm do; their numbers stand for them."""

    endpoint: str
    folder: Path  # of what they write
    members: tuple[Member, ...]
    fanouts: tuple[int, ...]
    batch_size: int
    save_every: int  # steps
    think_s: float  # a step
    macro_partitions: int = 1

    def dataset(self, number: int) -> SteppedDataset[Any]:
        """As each of them makes it."""
        plan, rank, world_size, endpoint = self.members[number]
        common: dict[str, Any] = {
            "batch_size": self.batch_size, "seed": 3, "rank": rank, "world_size": world_size,
            "reconnect_s": 120.0,
        }  # fmt: skip
        if plan in METHODS:
            return HopDataset(endpoint or self.endpoint, method=METHODS[plan], **common)
        return NeighborDataset(
            endpoint or self.endpoint,
            num_neighbors=self.fanouts,
            plan=plan,
            window=4,
            hyperbatch=16 if plan == "hyperbatch" else 0,
            macro_partitions=self.macro_partitions if plan == "macrobatch" else 0,
            **common,
        )

    def digest(self, number: int, batch: Any) -> str:
        """Of every array of a batch of a trainer."""
        return (digest_rows if self.members[number].plan in METHODS else digest)(batch)

    def state(self, rank: int) -> Path:
        """Where a rank saves its state."""
        return self.folder / f"state-{rank}.json"

    def log(self, rank: int, life: int) -> Path:
        """What a rank consumed in one of its lives."""
        return self.folder / f"log-{rank}-{life:04d}"

    @property
    def last_epoch(self) -> Path:
        """Holds the epoch after which trainers end; made when it is known."""
        return self.folder / "last-epoch"


def digest(batch: Batch) -> str:
    """Of every array of a batch."""
    arrays = (batch.x, batch.y, batch.edge_index, batch.n_id, batch.input_id)
    return _digest((*arrays, *batch.features.values()))


def digest_rows(batch: HopBatch) -> str:
    """Of every array of a hop-wise batch."""
    x = batch.x if isinstance(batch.x, list) else [batch.x]
    return _digest((*x, batch.y, batch.n_id, batch.input_id))


def _digest(tensors: Iterable[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(_bytes(tensor))
    return found.hexdigest()[:DIGEST_CHARS]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def train(job: Job, rank: int, life: int) -> None:
    """Go on from the last saved state, until the last epoch has ended.

    The log: a line "from EPOCH STEP" (the last step consumed before), "EPOCH STEP DIGEST" for each
    batch, and at the end "end" with descriptors and arenas that this process still holds.
    """
    log = os.open(job.log(rank, life), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    logging.basicConfig(filename=job.folder / f"notes-{rank}-{life:04d}")
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


def _train(job: Job, rank: int, log: int) -> None:
    data = job.dataset(rank)
    epoch, step = 0, -1
    if job.state(rank).exists():
        state = json.loads(job.state(rank).read_text())
        data.load_state_dict(state)
        epoch, step = state["epoch"], state["step"]
        data.set_epoch(epoch)
    else:
        first_connect(data)
    _put(log, f"from {epoch} {step}")
    consumed = 0
    while not job.last_epoch.exists() or epoch <= int(job.last_epoch.read_text()):
        for batch in data:
            _put(log, f"{batch.epoch} {batch.step} {job.digest(rank, batch)}")
            time.sleep(job.think_s)
            consumed += 1
            if consumed % job.save_every == 0:
                save(data.state_dict(), job.state(rank))
        epoch += 1
    data.close()


def first_connect(data: SteppedDataset[Any]) -> None:
    """Without a state nothing says that there is a daemon: one that is down is asked again."""
    while True:
        try:
            data.attached()
            return
        except (NoDaemon, SessionLost, ShuttingDown):
            time.sleep(0.1)


def save(state: dict[str, Any], path: Path) -> None:
    """The new one or the old one is there."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(state))
    fresh.replace(path)


def _put(log: int, line: str) -> None:
    os.write(log, f"{line}\n".encode())


def open_files(pid: int | str = "self") -> dict[str, int]:
    """Descriptors of a process by kind, and its mappings of arenas."""
    kinds: dict[str, int] = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = path.readlink().name.partition(":[")[0]
        except FileNotFoundError:  # of the listing itself
            continue
        kinds[name] = kinds.get(name, 0) + 1
    maps = Path(f"/proc/{pid}/maps").read_text()
    kinds["arenas mapped"] = maps.count("memfd:blockstore-arena")
    return kinds
