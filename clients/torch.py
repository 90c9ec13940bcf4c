"""Batches as torch tensors: what a training script iterates."""

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from clients.batch import BatchArrays, BatchReader
from clients.buffers import BufferPool
from clients.position import Position, check_resolved, dump_state, parse_state
from clients.session import Session
from loaderd.errors import Refused
from loaderd.protocol import Attach, Attached, Resolved

__all__ = ["Batch", "NeighborDataset"]

InputNodes = Tensor | NDArray[Any] | Sequence[int] | str | None


@dataclass(slots=True)
class Batch:
    """A sampled subgraph in PyG's fields; nodes are local ids, the first `batch_size` the seeds."""

    x: Tensor | None  # (num_nodes, ...) features
    y: Tensor | None  # (num_nodes, ...) labels; int64 where they are integers
    edge_index: Tensor  # int64 (2, num_edges): row 0 source, row 1 target
    n_id: Tensor  # int64 (num_nodes,) original ids
    e_id: Tensor | None  # int64 (num_edges,) original edge ids, where asked for
    input_id: Tensor  # int64 (batch_size,) places among the input nodes
    batch_size: int
    num_sampled_nodes: list[int]  # the seeds, then those found by each hop
    num_sampled_edges: list[int]  # per hop
    epoch: int
    step: int
    features: dict[str, Tensor] = field(default_factory=dict)  # further per-node arrays

    @property
    def num_nodes(self) -> int:
        """Nodes of the subgraph."""
        return self.n_id.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch with its tensors on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory: `DataLoader(pin_memory=True)` calls this."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, function: Any) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: function(v) if isinstance(v, Tensor) else v for k, v in values.items()}
        moved["features"] = {k: function(v) for k, v in self.features.items()}
        return Batch(**moved)


class _Connection(NamedTuple):
    """What a dataset holds in the process that iterates it."""

    session: Session
    reader: BatchReader
    close: "weakref.finalize[Any, NeighborDataset]"


class NeighborDataset(IterableDataset[Batch]):
    """Neighbor-sampled minibatches from a daemon, in an order fixed by (seed, epoch).

    Connects when first iterated (or asked for its length), in the process that does so.  Give it to
    `DataLoader(dataset, batch_size=None, num_workers=k)`, or iterate it as it is: no workers are
    needed.  Worker w of k serves steps w, w + k, ..., so the order is the same for every k.

    Epochs: the first iteration is epoch 0, each further one the next, whether or not the one before
    was finished; `set_epoch` chooses.  DataLoader workers are copies that see no count of the
    main process: with workers, call `set_epoch` before each epoch.
    """

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        num_neighbors: Sequence[int] = (15, 10, 5),
        batch_size: int = 1000,
        seed: int = 0,
        plan: str = "auto",
        *,
        input_nodes: InputNodes = None,
        shuffle: bool = True,
        return_e_id: bool = False,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        hyperbatch: int = 0,
        frontier: str = "new",
        replace: bool = False,
        weighted: bool = False,
        macro_partitions: int = 0,
        reuse: int = 1,
        hubs: bool = True,
        halos: bool = True,
    ) -> None:
        """`input_nodes`: ids, a bool mask, or the name of a split ("all": every node), which is
        taken instead of `split`.  `batch_size` counts the seeds of all ranks together.  `plan`,
        `window` (batches under way) and `hyperbatch` (batches built together) change no batch.

        frontier   "new": a hop expands newly found nodes, as in PyG; "layer": all nodes found so
                   far, drawing anew, as in DGL
        weighted   neighbors are drawn by the weights of the edges; one of weight 0 never is

        Of plan "macrobatch", on a partitioned store: each epoch deals the partitions out,
        `macro_partitions` at a time (0: an eighth of them), and samples within what is in memory
        of the graph then: these partitions, the store's `hubs`, and the partitions' `halos`.
        `reuse`: passes over the seeds of each.  These do change batches.
        """
        super().__init__()
        self.endpoint = endpoint
        if isinstance(input_nodes, str):
            split, input_nodes = input_nodes, None
        self._ids = None if input_nodes is None else seed_ids(input_nodes)
        self._request = Attach(
            token=0,
            request=0,
            plan=plan,
            split=split if self._ids is None else "",
            num_neighbors=tuple(int(fanout) for fanout in num_neighbors),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            return_e_id=return_e_id,
            rank=rank,
            world_size=world_size,
            window=window,
            hyperbatch=hyperbatch,
            frontier=frontier,
            replace=replace,
            weighted=weighted,
            macro_partitions=macro_partitions,
            reuse=reuse,
            hubs=hubs,
            halos=halos,
        )
        self._position = Position()
        self._begun = False  # whether an iteration has started from `_position`
        self._saved: Resolved | None = None  # of a loaded state, to be compared
        self._connection: _Connection | None = None

    def __len__(self) -> int:
        """Batches of an epoch; connects."""
        return self._connect().session.attached.num_steps

    def __iter__(self) -> Iterator[Batch]:
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

    def _connect(self) -> _Connection:
        """The connection of this process: one that was inherited, or lost, is dropped."""
        held = self._connection
        if held is not None and held.session.pid == os.getpid() and not held.session.lost:
            return held
        self.close()
        session = Session(self.endpoint, self._request, self._ids)
        reader = BatchReader(session, BufferPool(), _gather_threads())
        close = weakref.finalize(self, _close, session, reader)
        try:
            self._check(session.attached)
        except ValueError:
            close()
            raise
        self._connection = _Connection(session, reader, close)
        return self._connection

    def _check(self, attached: Attached) -> None:
        if self._saved is not None:
            check_resolved(self._saved, attached.resolved)
        if attached.num_relations != 1:
            raise Refused(
                f"{self.endpoint}: the store has {attached.num_relations} relations, "
                "a NeighborDataset delivers stores of one"
            )

    def _batches(
        self, session: Session, reader: BatchReader, run: int, positions: Iterator[Position]
    ) -> Iterator[Batch]:
        for position in positions:
            if session.run != run:
                raise RuntimeError("a newer iterator of this dataset has taken over")
            batch = to_batch(reader.read(position.step), session.attached)
            self._position = position
            yield batch


def _close(session: Session, reader: BatchReader) -> None:
    if session.pid == os.getpid():
        reader.close()
        session.close()


def _gather_threads() -> int:
    """A second thread halves the gather of a large batch; among DataLoader workers it would not."""
    return 2 if get_worker_info() is None and len(os.sched_getaffinity(0)) >= 4 else 1


def seed_ids(nodes: Tensor | NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """Ids as an int64 array of their own, from ids or from a bool mask over all nodes."""
    array = nodes.detach().cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise Refused(f"input_nodes: {array.dtype} {array.shape}, expected 1-d ids or a bool mask")
    return np.flatnonzero(array) if array.dtype.kind == "b" else array.astype(np.int64)


def to_batch(arrays: BatchArrays, attached: Attached) -> Batch:
    """The tensors over `arrays`, which keep them alive."""
    rows = {
        spec.name: _tensor(arrays.rows[spec.name], spec.dtype, spec.name == "y")
        for spec in attached.rows
    }
    return Batch(
        x=rows.pop("x", None),
        y=rows.pop("y", None),
        edge_index=torch.from_numpy(arrays.edge_index),
        n_id=torch.from_numpy(arrays.n_id),
        e_id=None if arrays.e_id is None else torch.from_numpy(arrays.e_id),
        input_id=torch.from_numpy(arrays.input_id),
        batch_size=arrays.num_seeds,
        num_sampled_nodes=list(arrays.nodes_per_hop),
        num_sampled_edges=list(arrays.edges_per_hop),
        epoch=arrays.epoch,
        step=arrays.step,
        features=rows,
    )


def _tensor(array: NDArray[Any], dtype: str, is_label: bool) -> Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if is_label and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64, copy=False))
    return torch.from_numpy(array)
