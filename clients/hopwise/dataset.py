"""Datasets of propagated features as torch tensors: features, and those of each hop."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec
import torch
from torch.utils.data import get_worker_info

from clients.connection.place import Backoff
from clients.connection.position import Position
from clients.connection.session import Session
from clients.dataset import (
    Connection,
    DatasetOptions,
    SteppedDataset,
    gather_threads,
    make_request,
)
from clients.hopwise.advice import device_bytes, take_advice
from clients.hopwise.batch import LABEL, NODES, FileReader, HopBatch, HopReader, ResidentRows
from loaderd.api.errors import Refused
from loaderd.api.placement import TRAINING_BYTES, HopAdvice, parse_advice
from loaderd.plans.base import Part
from loaderd.plans.chunks import METHOD_OF, PLAN_OF, HopPlan


class HopOptions(DatasetOptions, total=False):
    """Options of `HopDataset`, in addition to `DatasetOptions`.

    chunk     rows of a chunk of method "cr"; 0, the default: `batch_size`
    redeal    every this many epochs, sixteenths of chunks change places before chunks are cut; 0,
              the default: never
    labels    False: `y` is None; the split need not have any
    views     do not copy `x` of a batch that is one range of rows (chunk a multiple of
              `batch_size`) or was gathered from disk.  Such tensors are views of the daemon's
              memory, valid until the next batch is requested, and a write to one ends the process;
              `clone` what is to stay.  Not in DataLoader workers
    resident  a device to which all rows of the split are copied once; the very same batches are
              drawn there.  Not in DataLoader workers, and not with `views`
    files     the folder of the store: this process reads the very same chunks from its files,
              without the daemon; under `prefetch`, kvikio reads them to the GPU, if it is
              installed.  Not with `views`, `resident` or method "rr"
    """

    chunk: int
    redeal: int
    labels: bool
    views: bool
    resident: torch.device | str | None
    files: Path | str | None


_OF_CHUNKS = ("chunk", "redeal")  # options of method "cr" alone


class HopDataset(SteppedDataset[HopBatch]):
    """Batches for models that are trained on propagated features; nothing is sampled.

    The store holds one row per node of the split, in one random order.  Method "cr" (SGD-CR) takes
    chunks of consecutive rows in a new order each epoch, method "rr" (SGD-RR) single rows.  Every
    row comes once an epoch; the last batch may be smaller.  Epochs, workers and state are those of
    `SteppedDataset`.
    """

    rows_by_device = False  # they come in ranges

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        operators: Sequence[str] | str = (),
        hops: int | None = None,
        batch_size: int = 8000,
        method: Literal["cr", "rr"] = "cr",
        **options: Unpack[HopOptions],
    ) -> None:
        """`operators`: to bring, in this order; (): all that the split has.  `hops`: bring hops 0
        to this one; None: all.  `batch_size` counts the rows of all ranks together."""
        self.views, self._resident = options.get("views", False), options.get("resident")
        files = options.get("files")
        if files is not None and (self.views or self._resident is not None or method == "rr"):
            raise Refused("files: expected method='cr', and no views or resident; leave these out")
        if method not in PLAN_OF:
            raise Refused(f"method {method!r}: expected {' or '.join(map(repr, PLAN_OF))}")
        if self.views and self._resident is not None:
            raise Refused("resident: expected no views=True; leave one of them out")
        own: dict[str, Any] = {
            "plan": PLAN_OF[method],
            "split": split,
            "batch_size": batch_size,
            "operators": (operators,) if isinstance(operators, str) else tuple(operators),
            "hops": -1 if hops is None else hops,
        }
        request = make_request(HopOptions, options, own)
        super().__init__(endpoint, request, None, options.get("reconnect_s"))
        self.advice: HopAdvice | None = None  # that chose method and place, if any
        self._chunks = {name: getattr(request, name) for name in _OF_CHUNKS}
        self._files = None if files is None else Path(files)
        self._rows: ResidentRows | None = None

    @classmethod
    def advised(
        cls,
        endpoint: str,
        split: str = "train",
        *,
        device: torch.device | str | None = None,
        training_bytes: int = TRAINING_BYTES,
        advice: HopAdvice | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "HopDataset":
        """A dataset with the method and the place of rows that a short trial finds best.

        The result is `advice`, and part of `state_dict`: a dataset that loads such a state adopts
        the method in it, whatever was advised here.  With several ranks, run the trial on one of
        them and pass its `advice` to all.

        device           that models train on; None: the current GPU, if there is one
        training_bytes   of its memory to keep free
        advice           of an earlier dataset (`dataset.advice`) or state: no trial is run
        options          of `HopDataset`; `chunk`, `redeal` and `files` are used with method "cr"
                         only, `files` and `views` only if rows do not lie on the device

        Raises Refused, ValueError: `advice` is not valid.
        """
        if advice is None and options.get("world_size", 1) > 1:
            raise Refused(
                f"world_size {options['world_size']}: ranks could be advised differently; take the "
                "advice on one rank, and hand its dataset.advice to all as advice="
            )

        def make(method: Literal["cr", "rr"]) -> HopDataset:
            data = cls(endpoint, split, method="cr", resident=None, **options)
            data._take(method)
            return data

        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if advice is None:
            taken = take_advice(make, device_bytes(device), training_bytes)
        else:
            taken = parse_advice(advice)
        data = make(taken.method)
        data.advice = taken
        if taken.place == "device":
            data._resident, data.views = device, False
        return data

    @property
    def arrays(self) -> list[tuple[str, int]]:
        """(operator, hop) of each tensor of `x`; connects.  Hop 0 comes once, before all others."""
        names = [s.name for s in self.attached().rows if s.name not in (LABEL, NODES)]
        pairs = [name.rsplit(":", 1) for name in names]
        return [(operator, int(hop)) for operator, hop in pairs]

    @property
    def held(self) -> bool:
        """Whether the last batch (method "rr") came from arrays that the daemon has in memory."""
        reader = self._connect().reader
        return isinstance(reader, HopReader) and reader.form == "index"

    def state_dict(self, batch: Any = None) -> dict[str, Any]:
        """As in `SteppedDataset`, with the advice, if there is one."""
        state = super().state_dict(batch)
        if self.advice is not None:
            state["advice"] = msgspec.to_builtins(self.advice)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in `SteppedDataset`; if both were advised, the advice of the state counts."""
        if self.advice is not None and state.get("advice") is not None:
            self.advice = parse_advice(state["advice"])
            self._take(self.advice.method)
        super().load_state_dict(state)

    def _take(self, method: Literal["cr", "rr"]) -> None:
        """Switch to another method; rows stay where they are, as this changes no batch."""
        if method != METHOD_OF[self._request.plan]:
            own = self._chunks if method == "cr" else dict.fromkeys(_OF_CHUNKS, 0)
            self.close()
            self._ask_for(plan=PLAN_OF[method], **own)
            self._resolved = self._num_steps = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_rows": None}

    def _connect(self, backoff: Backoff | None = None) -> Connection:
        if self.views and get_worker_info() is not None:
            raise Refused(
                "views=True in a DataLoader worker: its batches are handed on after the next one "
                "is asked for; iterate the dataset itself, or leave views out"
            )
        if self._resident is not None and get_worker_info() is not None:
            raise Refused(
                "resident in a DataLoader worker: rows are on the device once; iterate the dataset "
                "itself, or leave resident out"
            )
        return super()._connect(backoff)

    def _make_reader(self, session: Session) -> HopReader | ResidentRows | FileReader:
        request = self._request
        plan = HopPlan(session.attached.resolved, Part(request.rank, request.world_size))
        if self._resident is not None:
            return self._resident_rows(plan)
        if self._files is not None and plan.hops.method == "cr":
            return FileReader(self._files, plan, session.attached, self.memory)
        if self.views:
            session.hold()
        return HopReader(session, self.memory, gather_threads(), self.views)

    def _start(self, session: Session, at: Position) -> None:
        """Do not ask the daemon for batches that are drawn on the device, or read here."""
        connection = self._connection
        if connection is None or isinstance(connection.reader, HopReader):
            super()._start(session, at)
            return
        assert isinstance(connection.reader, ResidentRows | FileReader)
        connection.reader.epoch = at.epoch
        self._running = session

    def _resident_rows(self, plan: HopPlan) -> ResidentRows:
        """All rows, loaded on first use; the plan is updated, as a state may have changed it."""
        if self._rows is None:
            r = self._request
            data = HopDataset(
                self.endpoint, r.split, r.operators, None if r.hops < 0 else r.hops, r.batch_size,
                shuffle=False, labels=r.labels, reconnect_s=self.reconnect_s,
            )  # fmt: skip
            assert self._resident is not None
            self._rows = ResidentRows(data, plan, self._resident)
            data.close()
        self._rows.plan = plan
        return self._rows
