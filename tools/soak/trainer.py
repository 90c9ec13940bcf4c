"""Trainers of `tools.soak`: one that lasts and reads by every plan in turn, and visitors."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from clients.dataset import SteppedDataset
from clients.torch import HopDataset, NeighborDataset
from loaderd.errors import Refused
from tools.storm_trainer import digest, digest_rows

PLANS = ("minibatch", "hyperbatch", "macrobatch", "chunks", "rows")


class Work(NamedTuple):
    """What all trainers of a soak read."""

    endpoint: str
    folder: Path  # of what they write
    batch_size: int
    seed: int

    def dataset(self, plan: str) -> SteppedDataset[Any]:
        """Batches of a plan."""
        if plan in ("chunks", "rows"):
            return HopDataset(
                self.endpoint, batch_size=self.batch_size, seed=self.seed,
                method="cr" if plan == "chunks" else "rr",
            )  # fmt: skip
        return NeighborDataset(
            self.endpoint, num_neighbors=[5, 3], batch_size=self.batch_size, seed=self.seed,
            plan=plan, window=4, hyperbatch=8 if plan == "hyperbatch" else 0,
            macro_partitions=1 if plan == "macrobatch" else 0,
        )  # fmt: skip


class Counts:
    """What a trainer has read, for who watches."""

    def __init__(self, path: Path) -> None:
        """`path` gets it again and again."""
        self._path = path
        self.found: Counter[str] = Counter()

    def write(self) -> None:
        """The newest, whole."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self.found))
        fresh.replace(self._path)


def read_epoch(
    data: SteppedDataset[Any], plan: str, counts: Counts, most: int, go_on: Callable[[], bool]
) -> list[str]:
    """Digests of the first `most` batches of the next epoch."""
    find: Callable[[Any], str] = digest_rows if plan in ("chunks", "rows") else digest
    found = []
    for batch in data:
        found.append(find(batch))
        counts.found[f"{plan} batches"] += 1
        if len(found) >= most or not go_on():
            break
    counts.found["epochs"] += 1
    return found


def last(work: Work, name: str, stop: Event) -> None:
    """Until it is told to stop: all plans in turn, each anew, epoch 0 and the next.

    Epoch 0 of a plan gives the same batches every time.  Ends with an error where it does not.
    """
    logging.basicConfig(level=logging.ERROR)
    counts = Counts(work.folder / f"{name}.json")
    expected: dict[str, list[str]] = {}
    while not stop.is_set():
        for plan in PLANS:
            data = work.dataset(plan)
            for epoch in range(2):
                found = read_epoch(data, plan, counts, 1 << 30, lambda: not stop.is_set())
                same = expected.setdefault(plan, found) if epoch == 0 else found
                if found != same[: len(found)]:
                    raise SystemExit(f"{plan}: epoch 0 is not what it was the first time")
            data.close()
            counts.write()


def visit(work: Work, name: str, seed: int) -> None:
    """A trainer that attaches, reads a part of an epoch by some plan, twice or thrice, and goes.

    One of four leaves without a word.
    """
    logging.basicConfig(level=logging.ERROR)
    random = Random(seed)
    counts = Counts(work.folder / f"{name}.json")
    for _ in range(random.randint(2, 3)):
        data = work.dataset(plan := random.choice(PLANS))
        try:
            read_epoch(data, plan, counts, random.randint(1, 40), lambda: True)
        except Refused:  # the others have the memory
            counts.found["refused"] += 1
        counts.found["attached"] += 1
        if random.random() < 0.75:
            data.close()
    counts.write()
