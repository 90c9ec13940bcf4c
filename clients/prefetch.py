"""Read the batches of a dataset ahead of the trainer, and move them to its device."""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from clients.dataset import ReadStep, SteppedDataset
from clients.device.calibration import Choice
from clients.device.devices import open_device
from clients.device.stage import DeviceStaging, Ready
from clients.hopwise.dataset import HopDataset
from loaderd.api.errors import Refused

B = TypeVar("B")


class _Item(NamedTuple):
    """What the reading thread hands to the trainer."""

    step: ReadStep | None  # None: `error` was raised
    ready: Ready | None  # the batch on its way to a device, if it goes to one
    error: BaseException | None = None


class Prefetcher(Generic[B]):
    """Iterates the epochs of a dataset as the dataset itself does, with a thread that reads ahead.

    A state counts the batches that were handed out, not those read ahead.  While an iteration runs,
    use the dataset only through this object.
    """

    def __init__(
        self,
        dataset: SteppedDataset[B],
        device: torch.device | str = "cuda",
        depth: int = 2,
        mode: str = "auto",
        cache_bytes: int | None = None,
    ) -> None:
        """`depth`: most batches that are read ahead or in transfer, beyond the trainer's.

        mode   how rows of sampled batches get to the device.  "staging": gathered by the host, then
               copied.  "direct": gathered by the GPU from the daemon's memory.  "cached": likewise,
               but the hottest rows from a cache in its own memory of `cache_bytes` (None: an eighth
               of what is free).  "auto": all three are measured within the first batches, and the
               fastest is used; a mode that does not work is left out, and `choice` says why.
               Batches are the same.  On the CPU, "auto" hands batches on as they are.

        Raises Refused, ValueError: no such device.
        """
        if not isinstance(dataset, SteppedDataset):
            raise Refused(
                f"dataset: {type(dataset).__name__}, expected one of ours (NeighborDataset, ...); "
                "of a loader give its .dataset"
            )
        if depth < 1:
            raise Refused(f"depth {depth}: expected at least 1 batch")
        self.dataset, self.depth = dataset, depth
        self.device = torch.device(device)
        self.waited_s = 0.0  # total time that the trainer waited
        views = isinstance(dataset, HopDataset) and dataset.views
        if views and self.device.type == "cpu":
            raise Refused(
                "views=True, read ahead: such batches hold until the next one is asked for; "
                "leave views out, or prefetch to a GPU"
            )
        self._stage: DeviceStaging | None = None
        if self.device.type != "cpu" or mode != "auto":
            on = open_device(self.device)
            self.device = on.device
            self._stage = DeviceStaging(on, mode, dataset.rows_by_device, views, cache_bytes)
        dataset.lay_out_in(self._stage)
        self._run: _ReadThread | None = None

    def __len__(self) -> int:
        return self.dataset.num_steps

    def __iter__(self) -> "Iterator[B]":
        """Start to read an epoch at once; it ends any earlier iterator."""
        self._end()
        run = _ReadThread(self.dataset, self.dataset.ahead(), self._stage, self.depth)
        self._run = run
        batches = self._batches(run)
        weakref.finalize(batches, run.stop)  # ends the thread of an abandoned iterator
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one iterated, as the dataset does."""
        self._end()
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state to save, to continue after the last batch that was handed out."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next iteration, after the last batch that `state` counts as consumed."""
        self._end()
        self.dataset.load_state_dict(state)

    def choice(self) -> Choice | None:
        """How rows get to the device, and why; None: still measuring, or the CPU."""
        return None if self._stage is None else self._stage.choice()

    @property
    def files_by(self) -> str:
        """What read the arrays in files (`HopDataset(files=...)`); "" before the first batch."""
        return "" if self._stage is None else self._stage.files_by

    def close(self) -> None:
        """End the thread, wait for the device, and detach from the daemon."""
        self._end()
        if self._stage is not None:
            self._stage.close()
        self.dataset.close()
        self.dataset.lay_out_in(None)

    def __enter__(self) -> "Prefetcher[B]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _batches(self, run: "_ReadThread") -> "Iterator[B]":
        """The batches of one epoch."""
        item = self._take(run)
        while item.step is not None:
            read = item.step.batch
            if read is not None:
                run.room.release()  # another one may be read
            if item.ready is not None:
                assert run.stage is not None
                run.stage.device.adopt(item.ready.memory, item.ready.mark)
                read = item.ready.batch
            for batch in self.dataset.hand_out(item.step, read):
                yield batch
                self._refuse_older(run)
            if item.step.position is None:
                break
            item = self._take(run)
        run.stop()
        if item.error is not None:
            raise item.error

    def _take(self, run: "_ReadThread") -> _Item:
        self._refuse_older(run)
        begun = time.perf_counter()
        item = run.items.get()
        self.waited_s += time.perf_counter() - begun
        return item

    def _refuse_older(self, run: "_ReadThread") -> None:
        if run.stopped and self._run is not run:
            raise RuntimeError("a newer iterator of this dataset has taken over")

    def _end(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


class _ReadThread:
    """A thread that reads steps ahead of the trainer."""

    def __init__(
        self,
        dataset: SteppedDataset[Any],
        steps: Iterator[ReadStep],
        stage: DeviceStaging | None,
        depth: int,
    ) -> None:
        self.stage, self.stopped = stage, False
        self._halt = partial(dataset.halt, dataset.run)
        self.room = threading.Semaphore(depth)  # for batches not taken yet
        self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._read, args=(steps,), name="prefetch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the steps that it has read are dropped."""
        # `stopped` is set before `halt`, so that the thread drops the error that ends its wait for
        # the daemon; then `room` wakes a thread that waits for room, and `items` a trainer that
        # waits for a batch
        if not self.stopped:
            self.stopped = True
            if self._thread.is_alive():
                self._halt()
        self.room.release()
        self.items.put(_Item(None, None))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _next(self, steps: Iterator[ReadStep]) -> ReadStep:
        """The next batch, or the end."""
        if self.stage is not None:
            self.stage.begin()
        with contextlib.nullcontext() if self.stage is None else self.stage.device.order():
            step = next(steps)
            while step.batch is None and step.position is not None:  # left out
                self.items.put(_Item(step, None))
                step = next(steps)
        return step

    def _rest(self) -> None:
        """Before a wait for the trainer: release the daemon's memory, which others may need."""
        if self.stage is not None:
            self.stage.finish()

    def _read(self, steps: Iterator[ReadStep]) -> None:
        try:
            while True:
                if not self.room.acquire(blocking=False):
                    self._rest()
                    self.room.acquire()
                if self.stopped:
                    break
                step = self._next(steps)
                ready = None
                if self.stage is not None and step.batch is not None:
                    ready = self.stage.move(step.batch)
                    step = step._replace(batch=True)
                self.items.put(_Item(step, ready))
                if step.position is None:
                    self._rest()
                    break
        except BaseException as error:  # the trainer gets it at its next batch
            self.items.put(_Item(None, None, None if self.stopped else error))


prefetch = Prefetcher  # reads like a function: `for batch in prefetch(dataset, "cuda")`
