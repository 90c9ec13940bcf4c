"""Hop-wise batches as torch tensors: rows of features and of what operators made of them."""

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
    redeal    every so many epochs, sixteenths of chunks change places before chunks are cut; 0,
              the default: never
    labels    False: `y` is None; the split need not have any
    views     `x` of a batch that is one range of rows (chunk a multiple of `batch_size`) or was
              gathered from disk lies where the daemon read it: no copy.  Such tensors hold until
              the next batch is asked for, and a write to one ends the process; `clone` what is to
              stay.  Not in DataLoader workers
    resident  a device that takes all rows of the split, once; the very same batches are drawn there
              then.  Not in DataLoader workers, and not with `views`
    files     the folder of the store: this process reads the very same chunks out of its files
              then, and the daemon brings nothing; under `prefetch`, by kvikio to the GPU if there
              is kvikio.  Not with `views`, `resident` or method "rr"
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

    The store holds a row a node of the split, in one random order.  Method "cr" (SGD-CR) takes
    chunks of consecutive rows in a new order each epoch, method "rr" (SGD-RR) single rows.  Every
    row comes once an epoch, the last batch may be smaller.  Epochs, workers and state are those of
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
        """`operators`: those wanted, in this order; none: all that the split has.  `hops`: hops 0
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
        self.advice: HopAdvice | None = None  # by which it was made, if it was
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
        """A dataset whose method and place are those advised: found out once, by a short trial.

        What was advised is `advice`, and part of `state_dict`: a dataset that loads such a state
        takes its method, whatever was advised here.  With several ranks one of them takes the
        advice, and all get it as `advice`.

        device           that models train on; None: the current GPU, if there is one
        training_bytes   of its memory, that is kept free
        advice           that was taken before: `dataset.advice`, or of a state; nothing is tried
        options          of `HopDataset`; `chunk`, `redeal` and `files` belong to method "cr",
                         `files` and `views` to rows that do not lie on the device

        Raises Refused, ValueError: it is no advice.
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
        """Whether the last batch, of method "rr", was of arrays that the daemon holds whole."""
        reader = self._connect().reader
        return isinstance(reader, HopReader) and reader.form == "index"

    def state_dict(self, batch: Any = None) -> dict[str, Any]:
        """As of `SteppedDataset`, and the advice, if there was one."""
        state = super().state_dict(batch)
        if self.advice is not None:
            state["advice"] = msgspec.to_builtins(self.advice)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of `SteppedDataset`; if both were advised, the advice of the state counts."""
        if self.advice is not None and state.get("advice") is not None:
            self.advice = parse_advice(state["advice"])
            self._take(self.advice.method)
        super().load_state_dict(state)

    def _take(self, method: Literal["cr", "rr"]) -> None:
        """Another method; rows stay where they are, which changes no batch."""
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
        """Batches that are drawn on the device, or read here, are not asked for."""
        connection = self._connection
        if connection is None or isinstance(connection.reader, HopReader):
            super()._start(session, at)
            return
        assert isinstance(connection.reader, ResidentRows | FileReader)
        connection.reader.epoch = at.epoch
        self._running = session

    def _resident_rows(self, plan: HopPlan) -> ResidentRows:
        """All rows, fetched when they are first wanted; a state may have changed the plan since."""
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
