"""A trainer beside those that send anything: its batches are what they are in peace."""

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from clients.torch import NeighborDataset
from tools.storm_trainer import digest

END_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")


def dataset(endpoint: str) -> NeighborDataset:
    """What the trainer beside it reads."""
    return NeighborDataset(endpoint, num_neighbors=[5, 3], batch_size=128, seed=3, window=4)


def read_on(endpoint: str, notes: Path, going: Event, stop: Event) -> None:
    """Epoch 0 over and over.  `notes` gets the session, then what was found."""
    data = dataset(endpoint)
    expected = [digest(batch) for batch in data]
    notes.write_text(str(data._connect().session.attached.session))
    going.set()
    batches, wrong = 0, 0
    while not stop.is_set() and not wrong:
        data.set_epoch(0)
        for number, batch in enumerate(data):
            batches += 1
            wrong += digest(batch) != expected[number]
            time.sleep(0.005)
            if stop.is_set():
                break
    data.close()
    notes.write_text(json.dumps({"batches": batches, "wrong": wrong}))


@contextmanager
def beside(endpoint: str, folder: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """A trainer; its session, and (filled at the end) what it found.  Raises SystemExit."""
    going, stop, notes = _CONTEXT.Event(), _CONTEXT.Event(), folder / "beside"
    process = _CONTEXT.Process(target=read_on, args=(endpoint, notes, going, stop), daemon=True)
    process.start()
    found: dict[str, int] = {}
    try:
        if not going.wait(END_S):
            raise SystemExit("the trainer beside it does not begin")
        yield int(notes.read_text()), found
    finally:
        stop.set()
        process.join(END_S)
        process.kill()
    if process.exitcode:
        raise SystemExit(f"the trainer beside it ended with {process.exitcode}")
    found.update(json.loads(notes.read_text()))
    if found["wrong"] or not found["batches"]:
        raise SystemExit(f"the trainer beside it: {found}")
