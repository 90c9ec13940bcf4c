"""A daemon in a thread that serves made-up batches, laid out as the protocol just allows."""

import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import BadMessage
from loaderd.api.protocol import (
    PROTOCOL_VERSION,
    SAMPLER_VERSION,
    Attach,
    Attached,
    BatchReady,
    Blob,
    BlobArray,
    Detach,
    ErrorReply,
    Ids,
    IdsWanted,
    Message,
    Release,
    Resolved,
    RowGroup,
    Start,
    Welcome,
    decode_client,
    encode,
)

POISON = 0xEE  # what released slots are filled with
WAIT_S = 20
QUIET_MS = 50  # without a message, before a stop
NO_ROW = 2**64 - 2
SPECS = (
    RowArraySpec("x", "float32", (6,), 24),
    RowArraySpec("y", "int16", (), 2),
    RowArraySpec("half", "bfloat16", (3,), 6),
)


@dataclass(frozen=True)
class FakeBatch:
    """What a batch is made of, before it is laid out."""

    n_id: NDArray[np.uint32]
    input_id: NDArray[np.uint32]
    nodes_per_hop: tuple[int, ...]
    counts: tuple[NDArray[np.uint32], ...]
    src: NDArray[np.uint32]
    rows: dict[str, NDArray[Any]]


def make_batch(epoch: int, step: int, num_seeds: int, num_nodes: int = 1000) -> FakeBatch:
    """A random two-hop batch; equal arguments give equal batches."""
    rng = np.random.default_rng((epoch, step, num_seeds))
    per_hop = (num_seeds, *(int(n) for n in rng.integers(1, 40, 2)))
    counts = tuple(rng.integers(0, 5, n).astype(np.uint32) for n in per_hop[:2])
    num_edges = int(sum(c.sum() for c in counts))
    n_id = rng.permutation(num_nodes)[: sum(per_hop)].astype(np.uint32)
    return FakeBatch(
        n_id=n_id,
        input_id=np.arange(step * num_seeds, (step + 1) * num_seeds, dtype=np.uint32),
        nodes_per_hop=per_hop,
        counts=counts,
        src=rng.integers(0, n_id.size, num_edges).astype(np.uint32),
        rows={name: rows[n_id] for name, rows in node_rows(num_nodes).items()},
    )


def node_rows(num_nodes: int = 1000) -> dict[str, NDArray[Any]]:
    """The row arrays of the made-up store, by original id."""
    ids = np.arange(num_nodes)
    return {
        "x": (ids[:, None] * 10 + np.arange(6)).astype(np.float32),
        "y": (ids % 7 - 1).astype(np.int16),
        "half": ((ids[:, None] + np.arange(3)).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        ),
    }


@dataclass
class Plan:
    """How the daemon behaves."""

    num_steps: int = 5
    num_seeds: int = 8
    window: int = 2
    lent: int = 0  # batches that it lends at a time, if others share them; 0: the window
    groups: int = 1
    num_relations: int = 1
    edge_ids: bool = False
    refusal: str = ""  # of every attach
    fail_at: int = -1  # step that cannot be built
    die_at: int = -1  # step instead of which the daemon goes away
    stale: bool = False  # push one batch of the run before, after each start
    fingerprint: str = "f00d"


@dataclass
class _Run:
    identity: bytes
    start: Start
    next_step: int
    waiting: dict[int, list[RowGroup]] = field(default_factory=dict)  # groups not yet pushed
    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


class FakeDaemon:
    """Use `fake_daemon`; `log` holds every message received."""

    slot_bytes = 4096
    num_slots = 512

    def __init__(self, path: Path, plan: Plan) -> None:
        self.endpoint = f"ipc://{path}"
        self.plan = plan
        self.log: list[Message] = []
        self.ids: list[NDArray[np.int64]] = []
        self.hang_ups = 0
        self._fd = os.memfd_create("fake")
        stamp = self.num_slots * self.slot_bytes
        os.ftruncate(self._fd, stamp + 8)
        self._map = mmap.mmap(self._fd, 0)
        self.arena = np.frombuffer(self._map, np.uint8, stamp)
        self.stamp = np.frombuffer(self._map, np.uint64, 1, stamp)
        self.stamp[0] = 1
        self._free = list(np.random.default_rng(0).permutation(self.num_slots))
        self._runs: dict[int, _Run] = {}
        self._connections: dict[int, socket.socket] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 1000)  # what was pushed still goes
        self._router.bind(self.endpoint)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(f"{path}.door")
        self._door.listen()
        self._came = threading.Condition()
        self._control, self._stop = socket.socketpair()
        self._sessions = 0
        self._asking: dict[int, Attach] = {}  # whose ids are on their way
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take in what is on its way, then go; again: nothing."""
        self._stop.close()
        self._thread.join()

    def wait_gone(self) -> None:
        """Until it has ended by itself."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def wait_for(self, kind: type[Message], count: int) -> None:
        """Until so many messages of one kind have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.received(kind)) >= count, WAIT_S)

    def received(self, kind: type[Message]) -> list[Any]:
        """Messages of one kind, in order of arrival."""
        return [message for message in self.log if isinstance(message, kind)]

    def _serve(self) -> None:
        try:
            self._poll()
        finally:
            self._close()

    def _poll(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._door, self._control):
            poller.register(source, zmq.POLLIN | zmq.POLLERR)
        stopping = False
        while events := poller.poll(QUIET_MS if stopping else None):
            for source, _ in events:
                if source is self._router:
                    if not self._handle(self._router.recv_multipart()):
                        return
                elif source == self._door.fileno():
                    connection, _ = self._door.accept()
                    self._welcome(connection)
                    poller.register(connection, zmq.POLLIN | zmq.POLLERR)
                elif source == self._control.fileno():
                    stopping = True  # when what is on its way has come
                    poller.unregister(self._control)
                else:
                    connection = self._connections.pop(int(source))  # type: ignore[call-overload]
                    poller.unregister(connection)
                    connection.close()
                    self.hang_ups += 1

    def _close(self) -> None:
        self._router.close()
        self._context.term()
        for source in (self._door, self._control, *self._connections.values()):
            source.close()
        self._stop.close()
        os.close(self._fd)

    def _welcome(self, connection: socket.socket) -> None:
        self._connections[connection.fileno()] = connection
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            token=77,
            stores={"fake": self.plan.fingerprint},
            num_slots=self.num_slots,
            slot_bytes=self.slot_bytes,
            stamp=self.num_slots * self.slot_bytes,
        )
        socket.send_fds(connection, [encode(welcome)], [self._fd])

    def _handle(self, frames: list[bytes]) -> bool:
        identity, frame = frames
        try:
            message = decode_client(frame)
        except BadMessage as error:  # as the daemon does: it cannot tell what it answers
            self._send(identity, ErrorReply(error="BadMessage", message=str(error)))
            return True
        with self._came:
            self.log.append(message)
            self._came.notify_all()
        match message:
            case Attach():
                if message.ids:
                    self._asking[message.request] = message
                    wanted = IdsWanted(request=message.request, first=0, count=message.ids)
                    self._send(identity, wanted)
                else:
                    self._send(identity, self._attached(message))
            case Ids():
                self.ids.append(np.frombuffer(message.numbers, np.int64))
                self._send(identity, self._attached(self._asking.pop(message.request)))
            case Start():
                old = self._runs.get(message.session)
                self._runs[message.session] = _Run(identity, message, message.step)
                if old is not None:
                    if self.plan.stale:
                        self._push(old, message.step)
                    self._free += [slot for slots in old.slots.values() for slot in slots]
                return self._fill(self._runs[message.session])
            case Release():
                return self._release(self._runs[message.session], message)
            case Detach():
                self._runs.pop(message.session, None)
        return True

    def _attached(self, request: Attach) -> Message:
        plan = self.plan
        if plan.refusal or request.token != 77:
            message = plan.refusal or "unknown token"
            return ErrorReply(error="Refused", message=message, request=request.request)
        self._sessions += 1
        resolved = Resolved(
            family="neighbor",
            fingerprint=plan.fingerprint,
            sampler=SAMPLER_VERSION,
            seeds=f"split:{request.split}",
            seed_type="node",
            num_seeds=plan.num_steps * plan.num_seeds,
            fanouts=tuple((fanout,) for fanout in request.num_neighbors),
            frontier="new",
            replace=False,
            weighted=False,
            batch_size=request.batch_size,
            shuffle=request.shuffle,
            seed=request.seed,
            edge_ids=request.return_e_id,
        )
        return Attached(
            request=request.request,
            session=self._sessions,
            resolved=resolved,
            plan="minibatch",
            num_steps=plan.num_steps,
            window=plan.window,
            rows=SPECS,
            types=("node",),
            relations=tuple(("node", f"to{r}", "node") for r in range(plan.num_relations)),
        )

    def _send(self, identity: bytes, message: Message) -> None:
        self._router.send_multipart([identity, encode(message)])

    def _fill(self, run: _Run) -> bool:
        """Push as much as the window allows; False where the daemon is to go away."""
        in_flight = {step for step, _ in run.slots}
        maximum = self.plan.lent or self.plan.window
        while run.next_step < self.plan.num_steps and len(in_flight) < maximum:
            step = run.next_step
            if step == self.plan.die_at:
                return False
            if step == self.plan.fail_at:
                self._send(run.identity, self._failure(run.start, step))
                return True
            self._push(run, step)
            in_flight.add(step)
            run.next_step += run.start.stride
        return True

    def _failure(self, start: Start, step: int) -> ErrorReply:
        text = "graph/blocks/c/0+8192: crc32c is 1, expected 2"
        return ErrorReply(
            error="BatchFailed", message=text, session=start.session, run=start.run, step=step
        )

    def _release(self, run: _Run, message: Release) -> bool:
        if message.run != run.start.run:
            return True
        for slot in run.slots.pop((message.step, message.group), ()):
            self.arena[slot * self.slot_bytes :][: self.slot_bytes] = POISON
            self._free.append(slot)
        if waiting := run.waiting.get(message.step):
            group = waiting.pop(0)
            self._send(run.identity, group)
            return True
        return self._fill(run)

    def _push(self, run: _Run, step: int) -> None:
        batch = make_batch(run.start.epoch, step, self.plan.num_seeds)
        taken: list[int] = []
        arrays: dict[str, NDArray[Any]] = {"n_id": batch.n_id, "input_id": batch.input_id}
        arrays |= {f"counts:{hop}:0": counts for hop, counts in enumerate(batch.counts)}
        arrays["src"] = batch.src
        if self.plan.edge_ids:
            arrays["e_id"] = np.arange(batch.src.size, dtype=np.uint64) + 2**40
        structure = self._blob(arrays, taken)
        groups = self._groups(run, step, batch, taken)
        ready = BatchReady(
            session=run.start.session,
            run=run.start.run,
            epoch=run.start.epoch,
            step=step,
            num_seeds=self.plan.num_seeds,
            nodes_per_hop=batch.nodes_per_hop,
            edges_per_hop=tuple((int(counts.sum()),) for counts in batch.counts),
            structure=structure,
            rows=groups[0],
        )
        run.waiting[step] = groups[1:]
        self._send(run.identity, ready)

    def _groups(self, run: _Run, step: int, batch: FakeBatch, taken: list[int]) -> list[RowGroup]:
        """The batch's rows in groups, dealt out like cards."""
        num = self.plan.groups
        groups = []
        for group in range(num):
            places = np.arange(group, batch.n_id.size, num, dtype=np.uint32)
            arrays: dict[str, NDArray[Any]] = {} if num == 1 else {"positions": places}
            for name, rows in batch.rows.items():
                arrays[f"address:{name}"] = self._place(rows[places], taken)
            blob = self._blob(arrays, taken)
            run.slots[step, group] = tuple(taken)
            taken.clear()
            header = msgspec.structs.asdict(run.start)
            groups.append(
                RowGroup(
                    session=header["session"],
                    run=header["run"],
                    step=step,
                    group=group,
                    last=group == num - 1,
                    num_rows=places.size,
                    blob=blob,
                )
            )
        return groups

    def _take(self, taken: list[int]) -> int:
        slot = int(self._free.pop(0))
        taken.append(slot)
        return slot

    def _place(self, rows: NDArray[Any], taken: list[int]) -> NDArray[np.uint64]:
        """Write rows from the back of fresh slots; rows of zeros are left out as NO_ROW."""
        flat = np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], -1)
        row_bytes = flat.shape[1]
        per_slot = self.slot_bytes // row_bytes
        addresses = np.full(flat.shape[0], NO_ROW, np.uint64)
        for first in range(0, flat.shape[0], per_slot):
            end = (self._take(taken) + 1) * self.slot_bytes
            for row in range(first, min(first + per_slot, flat.shape[0])):
                if flat[row].any():
                    end -= row_bytes
                    self.arena[end : end + row_bytes] = flat[row]
                    addresses[row] = end
        return addresses

    def _blob(self, arrays: dict[str, NDArray[Any]], taken: list[int]) -> Blob:
        """Lay arrays over slots, at offsets that are multiples of 64."""
        described, offset = [], 0
        for name, array in arrays.items():
            described.append(BlobArray(name, str(array.dtype), offset, array.size))
            offset += -(-array.nbytes // 64) * 64
        content = np.zeros(-(-offset // self.slot_bytes) * self.slot_bytes, np.uint8)
        for place, array in zip(described, arrays.values(), strict=True):
            content[place.offset : place.offset + array.nbytes] = array.view(np.uint8)
        slots = tuple(self._take(taken) for _ in range(content.size // self.slot_bytes))
        for i, slot in enumerate(slots):
            part = content[i * self.slot_bytes : (i + 1) * self.slot_bytes]
            self.arena[slot * self.slot_bytes :][: self.slot_bytes] = part
        return Blob(slots, tuple(described))


@contextmanager
def fake_daemon(folder: Path, **plan: Any) -> Iterator[FakeDaemon]:
    """A running FakeDaemon whose socket lies in `folder`."""
    daemon = FakeDaemon(folder / "fake", Plan(**plan))
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
