"""What all datasets share: a connection, a place in the epochs, batches in their order."""

import os
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clients.position import Position, check_resolved, dump_state, parse_state
from clients.session import Session
from loaderd.protocol import Attach, Attached, Resolved

B_co = TypeVar("B_co", covariant=True)


class Reader(Protocol):
    """Reads the batches of one session."""

    def read(self, step: int) -> Any:
        """The batch of a step, as arrays; waits for the daemon."""

    def close(self) -> None:
        """End helper threads."""


class Connection(NamedTuple):
    """What a dataset holds in the process that iterates it."""

    session: Session
    reader: Reader
    close: "weakref.finalize[Any, Any]"


class SteppedDataset(IterableDataset[B_co]):
    """Batches from a daemon, in an order fixed by (seed, epoch).

    Connects when first iterated (or asked for its length), in the process that does so.  Give it to
    `DataLoader(dataset, batch_size=None, num_workers=k)`, or iterate it as it is: no workers are
    needed.  Worker w of k serves steps w, w + k, ..., so the order is the same for every k.

    Epochs: the first iteration is epoch 0, each further one the next, whether or not the one before
    was finished; `set_epoch` chooses.  DataLoader workers are copies that see no count of the
    main process: with workers, call `set_epoch` before each epoch.
    """

    def __init__(
        self, endpoint: str, request: Attach, ids: NDArray[np.int64] | None = None
    ) -> None:
        """`ids`: of the seeds, where the request names no split."""
        super().__init__()
        self.endpoint = endpoint
        self._request, self._ids = request, ids
        self._position = Position()
        self._begun = False  # whether an iteration has started from `_position`
        self._saved: Resolved | None = None  # of a loaded state, to be compared
        self._connection: Connection | None = None

    @abstractmethod
    def _make_reader(self, session: Session) -> Reader:
        """Raises Refused: this dataset cannot deliver what the daemon serves."""

    @abstractmethod
    def _to_batch(self, arrays: Any, attached: Attached) -> B_co:
        """What the reader has read, as tensors."""

    def __len__(self) -> int:
        """Batches of an epoch; connects."""
        return self._connect().session.attached.num_steps

    def __iter__(self) -> Iterator[B_co]:
        """Start a run at once; it ends the run of any earlier iterator of this dataset."""
        info = get_worker_info()
        worker, stride = (0, 1) if info is None else (info.id, info.num_workers)
        session, reader, _ = self._connect()
        if self._begun:
            self._position = Position(self._position.epoch + 1)
        at = self._position = self._position.normalized(session.attached.num_steps)
        steps = range(at.first_step(worker, stride), session.attached.num_steps, stride)
        self._begun = True
        run = session.start(at.epoch, steps.start, stride) if steps else session.run
        positions = (Position(at.epoch, step, worker, stride) for step in steps)
        return self._batches(session, reader, run, positions)

    def attached(self) -> Attached:
        """What the daemon resolved the request to; connects."""
        return self._connect().session.attached

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one iterated: from its start, or where a loaded state left it."""
        if self._begun or epoch != self._position.epoch:
            self._position = Position(epoch)
            self._begun = False

    def skip_epoch(self) -> None:
        """Leave the next epoch to copies of this dataset, such as DataLoader workers."""
        self._position = Position(self._position.epoch + 1 + self._begun)
        self._begun = False

    def state_dict(self, batch: Any = None) -> dict[str, Any]:
        """What to save to go on after the last batch consumed here; connects.

        With DataLoader workers the main process consumes what others read: pass the last batch
        (anything with `epoch` and `step`).
        """
        attached = self.attached()
        position = self._position if batch is None else Position(batch.epoch, batch.step)
        return dump_state(attached.resolved, position.normalized(attached.num_steps))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, at the next iteration, after the last batch that `state` counts as consumed.

        Raises StateMismatch, here or at the first connect: the state is of another plan or store.
        """
        self._saved, position = parse_state(state)
        if self._connection is not None:
            check_resolved(self._saved, self._connection.session.attached.resolved)
        self._position, self._begun = position, False

    def close(self) -> None:
        """Detach from the daemon; the next iteration connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __getstate__(self) -> dict[str, Any]:
        """Parameters and position: a connection belongs to its process."""
        return self.__dict__ | {"_connection": None}

    def _connect(self) -> Connection:
        """The connection of this process: one that was inherited, or lost, is dropped."""
        held = self._connection
        if held is not None and held.session.pid == os.getpid() and not held.session.lost:
            return held
        self.close()
        session = Session(self.endpoint, self._request, self._ids)
        try:
            if self._saved is not None:
                check_resolved(self._saved, session.attached.resolved)
            reader = self._make_reader(session)
        except ValueError:
            session.close()
            raise
        close = weakref.finalize(self, _close, session, reader)
        self._connection = Connection(session, reader, close)
        return self._connection

    def _batches(
        self, session: Session, reader: Reader, run: int, positions: Iterator[Position]
    ) -> Iterator[B_co]:
        for position in positions:
            if session.run != run:
                raise RuntimeError("a newer iterator of this dataset has taken over")
            batch = self._to_batch(reader.read(position.step), session.attached)
            self._position = position
            yield batch


def _close(session: Session, reader: Reader) -> None:
    if session.pid == os.getpid():
        reader.close()
        session.close()


def gather_threads() -> int:
    """A second thread halves the gather of a large batch; among DataLoader workers it would not."""
    return 2 if get_worker_info() is None and len(os.sched_getaffinity(0)) >= 4 else 1


def to_tensor(array: NDArray[Any], dtype: str, is_label: bool) -> Tensor:
    """The tensor over an array of a store dtype; labels that are integers become int64."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if is_label and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64, copy=False))
    return torch.from_numpy(array)
