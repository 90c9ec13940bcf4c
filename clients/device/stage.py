"""Where a dataset's reader lays batches out, and how they come from there to a device.

A batch is packed in one of two slabs and copied at once.  Its wide rows need not pass the slab:
where the device can read the arena, the batch brings their addresses, and the device gathers them,
those of a cache out of its own memory.  Whatever way is taken, the bytes are the same.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from blockstore.store import FileRange
from clients.connection.buffers import Memory, ReadFiles
from clients.device.calibration import CACHED, DIRECT, MODES, STAGING, Calibration, Choice
from clients.device.devices import BY_HOST, Device, Mark
from clients.device.hotrows import Frequencies, HotRows
from clients.device.slab import Slab
from clients.records import TensorRecord
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import Refused

NUM_SLABS = 2  # one is filled while the other is copied
DIRECT_BYTES = 64  # of a row: narrower ones are gathered on the host
ALONE_BYTES = 1 << 20  # a tensor that lies elsewhere and is larger is copied from there
PRESAMPLED = 12  # batches whose nodes are counted
LEARNED, LEARNING = 0.98, 48  # share of hot rows, and batches, after which no more are taken
CACHE_SHARE = 0.125  # of the device's free memory
_log = logging.getLogger(__name__)

R = TypeVar("R", bound=TensorRecord)


class Ready(NamedTuple):
    """A batch on its way to the device."""

    batch: Any
    memory: list[Tensor]  # all that it lies in
    mark: Mark  # past which it is there


class _DevicePlace(NamedTuple):
    """Where a tensor will be on the device."""

    number: int  # of a part of the slab, or of rows that are gathered
    offset: int  # bytes
    gathered: bool = False
    alone: Tensor | None = None  # it was copied by itself


class _GatheredRows(NamedTuple):
    """Rows that the device gathers."""

    spec: RowArraySpec
    addresses: NDArray[np.int64]  # (rows,), in the slab


class _Filed(NamedTuple):
    """Bytes that the device's reader brings."""

    ranges: list[FileRange]
    num_bytes: int


class DeviceStaging(Memory):
    """Takes what a reader reads; belongs to the thread that reads."""

    def __init__(
        self,
        device: Device,
        mode: str = "auto",
        direct: bool = True,
        borrows: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        """`direct`: whether this dataset's rows can be gathered one by one; `borrows`: its
        batches may lie in the arena."""
        if mode != "auto" and mode not in MODES:
            expected = ", ".join(map(repr, ("auto", *MODES)))
            raise Refused(f"mode {mode!r}: expected one of {expected}")
        if mode in (DIRECT, CACHED) and not direct:
            raise Refused(f"mode {mode!r}: the host brings the rows of this dataset; use 'staging'")
        self.device = device
        wanted = (STAGING,) if not direct else MODES if mode == "auto" else (mode,)
        reason = "asked for" if mode != "auto" else "" if direct else "the host brings such rows"
        self._calibration = Calibration(wanted, reason)
        self._cache_bytes, self._borrows = cache_bytes, borrows
        self._slabs: list[tuple[Slab, Mark | None]] = [
            (Slab(device.host), None) for _ in range(NUM_SLABS)
        ]
        self._slab = self._slabs[0][0]
        self._coming: list[_GatheredRows | _Filed] = []  # one a shadow
        self.files_by = ""  # who has read what lies in files
        self._releases: list[tuple[Mark | None, Callable[[], None]]] = []
        self._whole = self._borrowed = False
        self._begun_s, self._num_rows = 0.0, 0
        self._frequencies: dict[str, Frequencies] = {}
        self._hot: dict[str, HotRows] = {}
        self._logged = False

    # -- what a reader asks ------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array of the batch."""
        return self._slab.empty(shape, dtype)

    def received(self, arena: NDArray[np.uint8], rows: list[tuple[RowArraySpec, int]]) -> None:
        """A batch is there; `rows`: how many of each array; none where they come in groups."""
        self._begun_s = time.perf_counter()
        if self._borrows and arena.size:
            why = self.device.lend(arena, gather=False)
            if why:
                _log.warning("chunks are copied out of memory that is not pinned: %s", why)
                self._borrows = False
        if not arena.size:
            self._decline("rows come by the network")
        wide = [(spec, num) for spec, num in rows if _is_wide(spec)]
        self._num_rows = sum(num for _, num in wide)
        if wide and self._calibration.mode != STAGING and (why := self.device.lend(arena)):
            self._decline(why)
        self._whole = bool(wide) and self._calibration.mode != STAGING

    def rows(self, spec: RowArraySpec, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Room for rows; where the device will gather them, not memory but an address."""
        if not (self._whole and _is_wide(spec)):
            return self.empty(shape, dtype)
        array = self._slab.shadow(shape, dtype)
        addresses = self._slab.empty((shape[0],), np.int64)
        self._coming.append(_GatheredRows(spec, addresses))
        return array

    def gathers(self, out: NDArray[np.uint8], first: int, addresses: NDArray[np.uint64]) -> bool:
        """Whether it is the device that gathers row `first`, `first + 1`, ... of `out`."""
        place = self._slab.find_shadow(out.ctypes.data) if out.size else None
        if place is None:
            return False
        rows = self._coming[place.part]
        assert isinstance(rows, _GatheredRows)
        rows.addresses[first : first + addresses.size] = addresses.view(np.int64)
        return True

    def filed(
        self, ranges: list[FileRange], read: ReadFiles, shape: tuple[int, ...], dtype: DTypeLike
    ) -> NDArray[Any]:
        """An array of files: the device's own reader brings it where there is one."""
        self.files_by = self.device.files_by
        if self.files_by == BY_HOST:
            return super().filed(ranges, read, shape, dtype)
        array = self._slab.shadow(shape, dtype)
        self._coming.append(_Filed(ranges, array.nbytes))
        return array

    def after(self, release: Callable[[], None]) -> None:
        """Call `release` once the arena is not read for this batch any more."""
        if self._coming:
            self._releases.append((None, release))
        else:
            release()

    # -- what the thread that reads asks -----------------------------------------------------------

    def begin(self, window: int) -> None:
        """Before a batch is read: there is a slab for it, and the daemon can bring it.

        window   batches that the daemon lends at a time
        """
        # the slab that was filled longest ago is next: its copy has had the time of a whole batch,
        # and must be over before it is written to again
        self._slabs.append(self._slabs.pop(0))
        self._slab, mark = self._slabs[0]
        if mark is not None:
            mark.wait()
        self._slab.clear()
        self._coming = []
        self._settle(0 if window < 2 or self._borrowed else 1)
        self._borrowed = False

    def move(self, batch: R) -> Ready:
        """Have a batch that was read brought to the device."""
        places: list[_DevicePlace] = []

        def placed(tensor: Tensor) -> Tensor:
            places.append(self._place(tensor))
            return tensor

        batch.map(placed)
        begun = self.device.mark()
        parts = [self.device.copy(part) for part in self._slab.filled()]
        gathered = [
            self._gather(c, parts, batch) if isinstance(c, _GatheredRows) else self._fetch(c)
            for c in self._coming
        ]
        memory = [*parts, *gathered]
        order = iter(places)

        def moved(tensor: Tensor) -> Tensor:
            place = next(order)
            if place.alone is not None:
                memory.append(place.alone)
                return place.alone
            flat = gathered[place.number].view(-1) if place.gathered else parts[place.number]
            raw = flat[place.offset : place.offset + tensor.nbytes]
            return raw.view(tensor.dtype).view(tensor.shape)

        result = batch.map(moved)
        mark = self.device.mark()
        self._slabs[0] = self._slab, mark
        self._releases = [(mark if m is None else m, release) for m, release in self._releases]
        self._note(begun, mark)
        return Ready(result, memory, mark)

    def choice(self) -> Choice | None:
        """What was chosen; None: still measuring."""
        choice = self._calibration.choice
        if choice is None or choice.mode != CACHED:
            return choice
        return choice._replace(
            cached_rows=sum(hot.num_rows for hot in self._hot.values()),
            cached_bytes=sum(hot.num_bytes for hot in self._hot.values()),
        )

    def close(self) -> None:
        """Wait for the device, and give back what is lent."""
        self._settle(0)
        self.device.close()

    # -- inside ------------------------------------------------------------------------------------

    def _settle(self, leave: int) -> None:
        """Release what the device has read, all but the `leave` newest."""
        done = self._releases[: max(0, len(self._releases) - leave)]
        del self._releases[: len(done)]
        for mark, release in done:
            if mark is not None:
                mark.wait()
            release()
        if self._borrowed:
            for _, mark in self._slabs:
                if mark is not None:
                    mark.wait()

    def _decline(self, why: str) -> None:
        """No rows are gathered by the device."""
        if self._calibration.choice is None or self._calibration.choice.mode != STAGING:
            _log.warning("rows are staged, not gathered by %s: %s", self.device.name, why)
            for mode in (CACHED, DIRECT):
                self._calibration.give_up(mode, why)

    def _place(self, tensor: Tensor) -> _DevicePlace:
        """Where the device will have what the host has, or has the address of, in this tensor."""
        if tensor.device == self.device.device and tensor.device.type != "cpu":
            return _DevicePlace(0, 0, alone=tensor)
        if tensor.numel() and tensor.is_contiguous():
            shadow = self._slab.find_shadow(tensor.data_ptr())
            if shadow is not None:
                return _DevicePlace(shadow.part, shadow.offset, gathered=True)
            found = self._slab.find(tensor.data_ptr())
            if found is not None:
                return _DevicePlace(found.part, found.offset)
        if tensor.nbytes >= ALONE_BYTES:
            self._borrowed = True
            return _DevicePlace(0, 0, alone=self.device.copy(tensor))
        put = self._slab.put(tensor)
        return _DevicePlace(put.part, put.offset)

    def _fetch(self, filed: _Filed) -> Tensor:
        with self.device.order():
            out = torch.empty(filed.num_bytes, dtype=torch.uint8, device=self.device.device)
        self.device.mark().wait()  # its reader knows no order: what used this memory is done
        self.device.fetch(filed.ranges, out)
        return out

    def _gather(self, rows: _GatheredRows, parts: list[Tensor], batch: TensorRecord) -> Tensor:
        place = self._slab.find(rows.addresses.ctypes.data)
        width = rows.spec.row_bytes
        with self.device.order():
            out = torch.empty(
                (rows.addresses.size, width), dtype=torch.uint8, device=self.device.device
            )
            if place is None or not rows.addresses.size:
                return out
            raw = parts[place.part][place.offset : place.offset + rows.addresses.nbytes]
            addresses = raw.view(torch.int64)
            n_id = self._on_device(_nodes_of(batch, rows.spec), parts)
            hot = self._hot_rows(rows.spec, n_id)
            hits = None if hot is None else hot.look_up(n_id)
            slots, cache = (None, None) if hits is None else hits
            self.device.gather(addresses, out, slots, cache)
            if hot is not None and not hot.settled:
                share = hot.learn(n_id, out)
                if share >= LEARNED or hot.num_batches >= LEARNING:
                    hot.settle()
        return out

    def _on_device(self, tensor: Tensor, parts: list[Tensor]) -> Tensor:
        place = self._slab.find(tensor.data_ptr())
        if place is None:
            return self.device.copy(tensor)
        raw = parts[place.part][place.offset : place.offset + tensor.nbytes]
        return raw.view(tensor.dtype)

    def _hot_rows(self, spec: RowArraySpec, n_id: Tensor) -> HotRows | None:
        """The cache of an array, where it is used; made when enough nodes were counted."""
        choice = self._calibration.choice
        if choice is not None and choice.mode != CACHED:
            return None
        hot = self._hot.get(spec.name)
        if hot is None:
            seen = self._frequencies.setdefault(spec.name, Frequencies(self.device.device))
            seen.add(n_id)
            if seen.num_batches < PRESAMPLED:
                return None
            share = self._room() // max(1, len(self._coming))
            hot = self._hot[spec.name] = HotRows(
                seen.hottest(share // spec.row_bytes), spec.row_bytes
            )
            del self._frequencies[spec.name]
        return hot if self._calibration.mode == CACHED else None

    def _room(self) -> int:
        if self._cache_bytes is not None:
            return self._cache_bytes
        return int(self.device.free_bytes() * CACHE_SHARE)

    def _note(self, begun: Mark, mark: Mark) -> None:
        """Measure a batch, while there is a choice to make."""
        calibration = self._calibration
        caches_ready = len(self._hot) == len(self._coming) and all(
            hot.settled for hot in self._hot.values()
        )
        if calibration.choice is None and (calibration.mode != CACHED or caches_ready):
            host_s = time.perf_counter() - self._begun_s
            mark.wait()
            calibration.note(host_s, mark.since(begun), self._num_rows)
        if calibration.choice is not None and not self._logged:
            self._logged = True
            if calibration.choice.mode != CACHED:
                self._frequencies, self._hot = {}, {}
            _log.info("%s: rows come by %s", self.device.name, self.choice())


def _is_wide(spec: RowArraySpec) -> bool:
    """Whether a device gathers such rows: of nodes, no labels, which the host converts."""
    own = not spec.relation and spec.name.rsplit(".", 1)[-1] != "y"
    return own and spec.row_bytes >= DIRECT_BYTES


def _nodes_of(batch: Any, spec: RowArraySpec) -> Tensor:
    """Original ids, int64, of the nodes whose rows these are."""
    n_id: Tensor | dict[str, Tensor] = batch.n_id
    return n_id[spec.node_type] if isinstance(n_id, dict) else n_id
