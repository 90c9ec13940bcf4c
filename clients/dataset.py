"""Base class of all datasets: the connection, the position in the epochs, batches in order."""

import contextlib
import logging
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from clients.connection.buffers import BufferPool, Memory
from clients.connection.place import Backoff, find_endpoint
from clients.connection.position import Position, check_resolved, dump_state, parse_state
from clients.connection.remote import open_session
from clients.connection.request import checked_epoch, checked_request
from clients.connection.session import Halted, Session, StepsLeftOut
from clients.describing import Describing
from clients.sharding import refuse_second_batching, refuse_second_sharding
from loaderd.api.errors import NoDaemon, SessionLost, ShuttingDown
from loaderd.api.protocol import Attach, Attached, Resolved

RECONNECT_S = 60.0  # long enough to restart a daemon on a large store
_log = logging.getLogger(__name__)

B_co = TypeVar("B_co", covariant=True)


class DatasetOptions(TypedDict, total=False):
    """Keyword options of every dataset.

    seed          random seed of the order of seeds and of all draws; 0 by default
    shuffle       take the seeds in a new order each epoch; True by default
    rank          of this process among `world_size` that share each batch; 0 of 1 by default
    window        batches in flight at a time, 0: the daemon chooses; it changes no batch
    store         name of the daemon's store, if it serves several
    reconnect_s   seconds to wait for a daemon that does not run; by default 60 for one that went
                  away, and 0 before the first connection
    """

    seed: int
    shuffle: bool
    rank: int
    world_size: int
    window: int
    store: str
    reconnect_s: float | None


def make_request(kind: type, options: Mapping[str, Any], own: Mapping[str, Any]) -> Attach:
    """Build a dataset's request from its options and the fields that it sets itself.

    kind   `TypedDict` of the known options; those left out have the defaults of `Attach`

    Raises TypeError: an unknown option.
    """
    if unknown := sorted(options.keys() - kind.__annotations__.keys()):
        expected = ", ".join(sorted(kind.__annotations__))
        raise TypeError(f"found the option {unknown[0]!r}, expected some of {expected}")
    sent = {name: value for name, value in options.items() if name in Attach.__struct_fields__}
    return Attach(token=0, request=0, **(sent | {**own}))


class Reader(Protocol):
    """Reads the batches of one session."""

    def read(self, step: int) -> Any:
        """The batch of a step; waits for the daemon."""

    def close(self) -> None:
        """End helper threads, if there are any; the session stays open."""


class ReadStep(NamedTuple):
    """One step of a run that is read ahead."""

    batch: Any  # what `_read_step` returned; None: skipped steps, or the run's end
    position: Position | None  # None: the run's end
    iteration: int  # the run's number


class Connection(NamedTuple):
    """The open connection of a dataset, in the process that iterates it."""

    session: Session
    reader: Reader
    close: "weakref.finalize[Any, Any]"


class SteppedDataset(Describing, IterableDataset[B_co]):
    """Batches from a daemon, in an order fixed by (seed, epoch).

    Connects when first iterated (or asked for its length or for facts about its store: `num_nodes`,
    `splits`, ...), in the process that does so.  An endpoint on this host without a daemon is
    refused when the dataset is made (after `reconnect_s` seconds, if given).  Give it to
    `DataLoader(dataset, batch_size=None, num_workers=k)`, or iterate it as it is: no workers are
    needed.  Worker w of k serves steps w, w + k, ..., so the order is the same for every k.

    Epochs: the first iteration is epoch 0, and each further one is the next epoch, even if the
    previous one was not finished; `set_epoch` chooses.  DataLoader workers are copies that do not
    see the main process's count: with workers, call `set_epoch` before each epoch.

    Once connected (or given a state), a dataset keeps its plan: if the daemon goes away, it waits
    up to `reconnect_s` seconds for one that serves the same store, and continues at the next step.
    Batches handed out before stay valid.  Another store, plan or sampler raises StateMismatch,
    which names what differs.
    """

    def __init__(
        self,
        endpoint: str,
        request: Attach,
        ids: NDArray[np.int64] | None = None,
        reconnect_s: float | None = None,
    ) -> None:
        """`ids`: of the seeds, if the request names no split.

        Raises Refused, NoDaemon: the endpoint names no daemon, or none is there.
        """
        super().__init__()
        self._request, self._ids = checked_request(request), ids
        self._first_s = reconnect_s or 0.0  # how long to wait for the first connection
        self.reconnect_s = RECONNECT_S if reconnect_s is None else reconnect_s
        self.endpoint, self._daemon = find_endpoint(endpoint, self._first_s)
        self._position = Position()
        self._begun = False  # whether an iteration has handed out batches from `_position` on
        self._resolved: Resolved | None = None  # what every session must resolve to
        self._num_steps: int | None = None
        self._counts = False  # whether the next session asks for the number of classes
        self._counted: Attached | None = None
        self._iteration = 0
        self._running: Session | None = None  # session asked for this iteration's steps
        self._connection: Connection | None = None
        self._memory: Memory | None = None

    def _ask_for(self, **fields: Any) -> None:
        """Change the request; the caller closes a session that is already open."""
        self._request = checked_request(structs.replace(self._request, **fields))

    @abstractmethod
    def _make_reader(self, session: Session) -> Reader:
        """Raises Refused: this dataset cannot deliver what the daemon serves."""

    # -- overridden by datasets that read several steps at once ------------------------------------

    rows_by_device = True  # whether a device may gather rows out of the arena

    def _asked(self) -> Attach:
        """The request that a session sends."""
        return self._request

    def _count_steps(self, attached: Attached) -> int:
        """Steps of an epoch."""
        return attached.num_steps

    def _reads(self, epoch: int, steps: range) -> Iterable[int]:
        """The first step of each read."""
        del epoch
        return steps

    def _start(self, session: Session, at: Position) -> None:
        session.start(at.epoch, at.step, at.stride)
        self._running = session

    def _read_step(self, connection: Connection, step: int) -> Any:
        """Do the read that begins with `step`; `hand_out` yields the batches in it."""
        return connection.reader.read(step)

    def hand_out(self, step: ReadStep, read: Any) -> Iterator[B_co]:
        """Yield the batches of one read, and count each as consumed as it is taken.

        read   what was read, perhaps moved to a device since; None: nothing
        """
        self.consume(step)
        if read is not None:
            yield read

    # ----------------------------------------------------------------------------------------------

    counts_seeds = False  # whether `len` counts seeds, as for the dataset of a PyG loader

    def __len__(self) -> int:
        """Batches of an epoch, or its seeds, if `counts_seeds`; connects, the first time."""
        return self.attached().resolved.num_seeds if self.counts_seeds else self.num_steps

    @property
    def num_steps(self) -> int:
        """Batches of an epoch; connects, the first time."""
        return self._plan()[1]

    def __iter__(self) -> Iterator[B_co]:
        """Start a run at once; it ends the run of any earlier iterator of this dataset."""
        return self._consumed(self.ahead())

    def ahead(self) -> Iterator[ReadStep]:
        """As `__iter__`, but a step counts as consumed only when it is given to `consume`.

        May be iterated in another thread; all other threads then use only `consume`, `halt` and
        `state_dict` of this dataset.
        """
        refuse_second_sharding(self._request.world_size)
        refuse_second_batching()
        info = get_worker_info()
        worker, stride = (0, 1) if info is None else (info.id, info.num_workers)
        session = self._connect().session
        num_steps = self._count_steps(session.attached)
        # an iteration that handed out batches is over, finished or not: the next epoch begins; one
        # that handed out none (or a state that was loaded since) leaves the position as it is
        if self._begun:
            self._position, self._begun = Position(self._position.epoch + 1), False
        at = self._position = self._position.normalized(num_steps)
        steps = range(at.first_step(worker, stride), num_steps, stride)
        self._iteration += 1
        self._running = None
        if steps:
            with contextlib.suppress(SessionLost):  # the first read connects again
                self._start(session, Position(at.epoch, steps.start, worker, stride))
        positions = (Position(at.epoch, s, worker, stride) for s in self._reads(at.epoch, steps))
        return self._steps(positions, self._iteration)

    def consume(self, step: ReadStep) -> None:
        """Count a step of the newest run as consumed: a state continues after it."""
        if step.iteration != self._iteration:
            return
        if step.position is not None:
            self._position = step.position
        if step.batch is not None or step.position is None:
            self._begun = True

    @property
    def run(self) -> int:
        """The number of the newest run."""
        return self._iteration

    def halt(self, run: int) -> None:
        """From any thread: end a run, if it is the newest; its wait for the daemon ends too."""
        if self._iteration != run:
            return
        self._iteration += 1
        held = self._connection
        if held is not None:
            held.session.halt()

    @property
    def request(self) -> Attach:
        """The request that was made from its options."""
        return self._request

    def attached(self) -> Attached:
        """What the daemon resolved the request to; connects."""
        return self._connect().session.attached

    def counted(self) -> Attached:
        """As `attached`, with the number of classes; may open a second session to ask for it."""
        if self._counted is None:
            self._counts = self._connection is None
            attached = self.attached()
            if not self._counts:
                attached = self._ask(structs.replace(self._asked(), classes=True))
            self._counted, self._counts = attached, False
        return self._counted

    def _ask(self, request: Attach) -> Attached:
        """The daemon's answer to a request for the same seeds, in a session of its own."""
        session = open_session(self.endpoint, request, self._ids)
        try:
            return session.attached
        finally:
            session.close()

    def lay_out_in(self, memory: Memory | None) -> None:
        """Lay batches out in `memory` from now on; None: each in buffers of its own."""
        if memory is not self._memory:
            self._drop()
            self._memory = memory

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one iterated: from its start, or from a loaded state's position."""
        refuse_second_sharding(self._request.world_size)
        epoch = checked_epoch(epoch)
        if self._begun or epoch != self._position.epoch:
            self._position = Position(epoch)
            self._begun = False

    def skip_epoch(self) -> None:
        """Leave the next epoch to copies of this dataset, such as DataLoader workers."""
        self._position = Position(self._position.epoch + 1 + self._begun)
        self._begun = False

    def state_dict(self, batch: Any = None) -> dict[str, Any]:
        """The state to save, to continue after the last batch consumed here; connects if needed.

        With DataLoader workers the main process consumes what others read: pass the last batch
        (anything with `epoch` and `step`).
        """
        resolved, num_steps = self._plan()
        position = self._position if batch is None else Position(batch.epoch, batch.step)
        return dump_state(resolved, position.normalized(num_steps))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next iteration, after the last batch that `state` counts as consumed.

        Raises StateMismatch, here or at the first connect: the state is of another plan or store.
        """
        saved, position = parse_state(state)
        if self._num_steps is not None and self._resolved is not None:
            check_resolved(saved, self._resolved)
        self._resolved, self._position, self._begun = saved, position, False

    def close(self) -> None:
        """Detach from the daemon, which ends an iteration; the next one connects again."""
        self._iteration += 1
        self._drop()

    def __getstate__(self) -> dict[str, Any]:
        """Parameters, plan and position: a connection belongs to its process."""
        return self.__dict__ | {"_connection": None, "_running": None, "_memory": None}

    @property
    def memory(self) -> Memory:
        """The memory that a new reader lays batches out in."""
        return BufferPool() if self._memory is None else self._memory

    def _plan(self) -> tuple[Resolved, int]:
        """The resolved request and the number of steps of an epoch; connects, the first time."""
        if self._num_steps is None:
            self._connect()
        assert self._resolved is not None
        assert self._num_steps is not None
        return self._resolved, self._num_steps

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, backoff: Backoff | None = None) -> Connection:
        """The connection of this process; an inherited or lost one is replaced.

        Waits for a daemon if this dataset, or the state it was given, was connected before;
        otherwise only if the user gave `reconnect_s`.
        """
        held = self._connection
        if held is not None and held.session.pid == os.getpid() and not held.session.lost:
            return held
        self._drop()
        backoff = backoff or Backoff(self._first_s if self._resolved is None else self.reconnect_s)
        while True:
            try:
                return self._open()
            except (NoDaemon, SessionLost, ShuttingDown) as error:
                if not backoff.wait():
                    if backoff.seconds:
                        raise NoDaemon(f"{error} (waited {backoff.seconds:g} s for it)") from error
                    raise

    def _open(self) -> Connection:
        if self._daemon is not None:
            self._daemon.ensure()
        asked = structs.replace(self._asked(), classes=self._counts)
        session = open_session(self.endpoint, asked, self._ids, self._resolved)
        if self._memory is not None:
            session.before_waiting = self._memory.settle
        try:
            reader = self._make_reader(session)
        except BaseException:
            session.close()
            raise
        attached = session.attached
        self._resolved, self._num_steps = attached.resolved, self._count_steps(attached)
        close = weakref.finalize(self, _close, session, reader)
        self._connection = Connection(session, reader, close)
        return self._connection

    def _consumed(self, steps: Iterator[ReadStep]) -> Iterator[B_co]:
        for step in steps:
            yield from self.hand_out(step, step.batch)

    def _steps(self, positions: Iterator[Position], iteration: int) -> Iterator[ReadStep]:
        served = 0  # steps before this one are skipped
        for position in positions:
            if self._iteration != iteration:
                raise RuntimeError("a newer iterator of this dataset has taken over")
            if position.step < served:
                continue
            try:
                batch = self._read(position, iteration)
            except StepsLeftOut as left:
                served = left.to
                yield ReadStep(None, Position(position.epoch, served - 1), iteration)
                continue
            yield ReadStep(batch, position, iteration)
        yield ReadStep(None, None, iteration)

    def _read(self, position: Position, iteration: int) -> Any:
        """Read the batch of a step; if the daemon goes away, from the next one that serves it."""

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            if self._iteration != iteration:
                raise Halted

        backoff = Backoff(self.reconnect_s, sleep=sleep)
        while True:
            try:
                connection = self._connect(backoff)
                session = connection.session
                if session is not self._running:
                    _log.warning(
                        "%s: goes on at step %d of epoch %d",
                        self.endpoint, position.step, position.epoch,
                    )  # fmt: skip
                    self._start(session, position)
                try:
                    return self._read_step(connection, position.step)
                finally:
                    session.check_intact()  # zeros may have been read, or caused another error
            except SessionLost as error:
                if not backoff.wait():
                    raise
                _log.warning(
                    "%s; waits up to %g s (reconnect_s) for one that serves the same store",
                    error, backoff.seconds,
                )  # fmt: skip


def _close(session: Session, reader: Reader) -> None:
    if session.pid == os.getpid():
        reader.close()
        session.close()


def gather_threads() -> int:
    """2 threads, which halve the time to gather a large batch; 1 in a DataLoader worker.

    Also on two processors, both of which the daemon's workers could use: batches of which all is in
    memory come 4 % faster with two threads, as most of a gather is waiting for memory.
    """
    return 1 if get_worker_info() is not None else min(2, len(os.sched_getaffinity(0)))
