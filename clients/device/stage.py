"""Staging memory for a dataset's reader, and the transfer of batches from there to a device.

A batch lies in page-locked memory, which torch reuses, and is copied from there.  Its rows need
not lie there: if the device can read the arena, the batch brings only their addresses, and the
device gathers them, cached ones from its own memory.  The bytes are the same in all cases.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from blockstore.store import FileRange
from clients.connection.buffers import Memory, ReadFiles
from clients.device.calibration import CACHED, DIRECT, MODES, STAGING, Calibration, Choice
from clients.device.devices import BY_HOST, Device, Mark
from clients.device.hotrows import HotRows
from clients.records import TensorRecord
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import Refused

PRESAMPLED = 12  # batches whose nodes are counted
LEARNED, LEARNING = 0.98, 48  # share of hot rows or number of batches after which none are added
CACHE_SHARE = 0.125  # of the device's free memory
_log = logging.getLogger(__name__)

R = TypeVar("R", bound=TensorRecord)


class Ready(NamedTuple):
    """A batch on its way to the device."""

    batch: Any
    memory: list[Tensor]  # all tensors that it lies in
    mark: Mark  # once reached, the batch is there


class _GatheredRows(NamedTuple):
    """Rows that the device gathers."""

    array: NDArray[Any]  # a placeholder for them in the batch, neither read nor written
    spec: RowArraySpec
    addresses: NDArray[np.int64]  # (rows,)


class _Filed(NamedTuple):
    """An array that the device's own reader reads from files."""

    array: NDArray[Any]  # a placeholder, likewise
    ranges: list[FileRange]


class _Copied(NamedTuple):
    """A batch that the device may still read."""

    mark: Mark  # once reached, it does not
    memory: Sequence[Tensor]  # host memory that it reads
    releases: Sequence[Callable[[], None]]  # for what it reads in the arena


class DeviceStaging(Memory):
    """Memory for a reader that moves each batch to a device; used by the reading thread."""

    def __init__(
        self,
        device: Device,
        mode: str = "auto",
        direct: bool = True,
        borrows: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        """`direct`: whether this dataset's rows can be gathered one by one; `borrows`: whether
        its batches may be views of the arena."""
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
        self._copied: list[_Copied] = []
        self._memory: list[Tensor] = []  # of the batch being read
        self._coming: dict[int, _GatheredRows | _Filed] = {}  # by the address of its array
        self._releases: list[Callable[[], None]] = []
        self.files_by = ""  # what has read the arrays in files
        self._arena = np.empty(0, np.uint8)
        self._direct = self._borrowed = False
        self._begun_s, self._num_rows = 0.0, 0
        self._hot: dict[str, HotRows] = {}  # by the name of their array
        self._logged = False

    # -- called by the reader ----------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array of the batch."""
        kind = np.dtype(dtype)
        self._memory.append(self.device.host(math.prod(shape) * kind.itemsize))
        array: NDArray[Any] = self._memory[-1].numpy().view(kind)
        return array.reshape(shape)

    def received(self, arena: NDArray[np.uint8], rows: list[tuple[RowArraySpec, int]]) -> None:
        """A batch has come; `rows`: how many of each array; empty if they come in groups."""
        self._begun_s, self._arena = time.perf_counter(), arena
        if self._borrows and arena.size:
            why = self.device.lend(arena, gather=False)
            if why:
                _log.warning("chunks are copied out of memory that is not pinned: %s", why)
                self._borrows = False
        if not arena.size:
            self._decline("rows come by the network")
        self._num_rows = max((num for spec, num in rows if _can_gather(spec)), default=0)
        direct = self._num_rows > 0 and self._calibration.mode != STAGING
        if direct and (why := self.device.lend(arena)):
            self._decline(why)
        self._direct = direct and self._calibration.mode != STAGING

    def rows(self, spec: RowArraySpec, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Memory for rows; if the device will gather them, a placeholder."""
        if not (self._direct and _can_gather(spec)):
            return self.empty(shape, dtype)
        array = np.empty(shape, dtype)
        addresses = self.empty((shape[0],), np.int64)
        self._coming[array.ctypes.data] = _GatheredRows(array, spec, addresses)
        return array

    def gathers(self, out: NDArray[np.uint8], first: int, addresses: NDArray[np.uint64]) -> bool:
        """Whether the device will gather rows `first`, `first + 1`, ... of `out`."""
        rows = self._coming.get(out.ctypes.data)
        if not isinstance(rows, _GatheredRows):
            return False
        rows.addresses[first : first + addresses.size] = addresses.view(np.int64)
        return True

    def filed(
        self, ranges: list[FileRange], read: ReadFiles, shape: tuple[int, ...], dtype: DTypeLike
    ) -> NDArray[Any]:
        """An array that lies in files: read by the device's own reader, if it has one."""
        self.files_by = self.device.files_by
        if self.files_by == BY_HOST:
            return super().filed(ranges, read, shape, dtype)
        array = np.empty(shape, dtype)
        self._coming[array.ctypes.data] = _Filed(array, ranges)
        return array

    def after(self, release: Callable[[], None]) -> None:
        """Call `release` once the arena is no longer read for this batch."""
        if self._coming:
            self._releases.append(release)
        else:
            release()

    def settle(self) -> bool:
        """Release what the device has read in the arena; returns whether it still reads some."""
        while any(batch.releases for batch in self._copied):
            if not self._copied[0].mark.passed():
                return True
            self.finish(leave=len(self._copied) - 1)
        return False

    # -- called by the reading thread --------------------------------------------------------------

    def begin(self) -> None:
        """Before a batch is read: wait until at most one other is still being copied."""
        self.finish(leave=0 if self._borrowed else 1)
        self._memory, self._coming, self._releases = [], {}, []
        self._borrowed = False

    def move(self, batch: R) -> Ready:
        """Begin to move a batch that was read to the device."""
        begun = self.device.mark()
        copies: dict[int, Tensor] = {}  # by id of the batch's tensor
        memory: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy(tensor)
            return copies[id(tensor)]

        def moved(tensor: Tensor) -> Tensor:
            coming = self._coming.get(tensor.data_ptr()) if tensor.numel() else None
            if coming is None:
                memory.append(copied(tensor))
                return memory[-1]
            if isinstance(coming, _Filed):
                memory.append(self._fetch(coming))
            else:
                n_id = copied(_nodes_of(batch, coming.spec))
                memory.append(self._gather(coming, n_id))
            return memory[-1].view(-1)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        result = batch.map(moved)
        mark = self.device.mark()
        self._copied.append(_Copied(mark, self._memory, self._releases))
        self._note(begun, mark)
        return Ready(result, memory, mark)

    def finish(self, leave: int = 0) -> None:
        """Release all but the `leave` newest batches, after the device has read them."""
        done = self._copied[: max(0, len(self._copied) - leave)]
        del self._copied[: len(done)]
        for batch in done:
            batch.mark.wait()
            for release in batch.releases:
                release()

    def choice(self) -> Choice | None:
        """The mode that was chosen, and why; None: still measuring."""
        choice = self._calibration.choice
        if choice is None or choice.mode != CACHED:
            return choice
        return choice._replace(
            cached_rows=sum(hot.num_rows for hot in self._hot.values()),
            cached_bytes=sum(hot.num_bytes for hot in self._hot.values()),
        )

    def close(self) -> None:
        """Wait for the device, and unregister the arena."""
        self.finish()
        self.device.close()

    # -- inside ------------------------------------------------------------------------------------

    def _decline(self, why: str) -> None:
        """Switch to staging, as the device cannot gather rows."""
        if self._calibration.choice is None or self._calibration.choice.mode != STAGING:
            _log.warning("rows are staged, not gathered by %s: %s", self.device.name, why)
            self._calibration.decline(why)

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":  # rows that are on the device already
            return tensor
        first = tensor.data_ptr() - self._arena.ctypes.data
        self._borrowed |= 0 <= first < self._arena.nbytes
        return self.device.copy(tensor)

    def _fetch(self, filed: _Filed) -> Tensor:
        with self.device.order():
            out = torch.empty(filed.array.nbytes, dtype=torch.uint8, device=self.device.device)
        self.device.mark().wait()  # its reader knows no streams: earlier uses of this memory end
        self.device.fetch(filed.ranges, out)
        return out

    def _gather(self, rows: _GatheredRows, n_id: Tensor) -> Tensor:
        """Gather rows on the device; `n_id`: int64 (rows,) original ids, on the device."""
        shape = (rows.addresses.size, rows.spec.row_bytes)
        addresses = self.device.copy(torch.from_numpy(rows.addresses))
        with self.device.order():
            out = torch.empty(shape, dtype=torch.uint8, device=self.device.device)
            hot = self._hot_rows(rows.spec, n_id)
            slots, cache = (None, None) if hot is None else hot.look_up(n_id)
            self.device.gather(addresses, out, slots, cache)
            if hot is not None and not hot.settled:
                share = hot.learn(n_id, out)
                if share >= LEARNED or hot.num_batches >= LEARNING:
                    hot.settle()
        return out

    def _hot_rows(self, spec: RowArraySpec, n_id: Tensor) -> HotRows | None:
        """The cache of an array, if it is used; filled once enough nodes were counted."""
        choice = self._calibration.choice
        if choice is not None and choice.mode != CACHED:
            return None
        if spec.name not in self._hot:
            self._hot[spec.name] = HotRows(self.device.device, spec.row_bytes)
        hot = self._hot[spec.name]
        if hot.num_counted < PRESAMPLED:
            hot.count(n_id)
            if hot.num_counted < PRESAMPLED:
                return None
            room = self._cache_bytes
            if room is None:
                room = int(self.device.free_bytes() * CACHE_SHARE)
            # divide the room so that each array caches rows of equally many nodes
            gathered = [c.spec for c in self._coming.values() if isinstance(c, _GatheredRows)]
            hot.choose(room * spec.row_bytes // sum(s.row_bytes for s in gathered))
        return hot if self._calibration.mode == CACHED else None

    def _note(self, begun: Mark, mark: Mark) -> None:
        """Measure a batch until the mode is chosen."""
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
                self._hot = {}
            _log.info("%s: rows come by %s", self.device.name, self.choice())


def _can_gather(spec: RowArraySpec) -> bool:
    """Whether a device gathers such rows: of nodes, except labels that the host converts."""
    converted = spec.dtype.startswith(("int", "uint")) and spec.dtype != "int64"
    is_label = spec.name.rsplit(".", 1)[-1] == "y"
    return spec.row_bytes > 0 and not spec.relation and not (is_label and converted)


def _nodes_of(batch: Any, spec: RowArraySpec) -> Tensor:
    """Original ids, int64, of the nodes whose rows these are."""
    n_id: Tensor | dict[str, Tensor] = batch.n_id
    return n_id[spec.node_type] if isinstance(n_id, dict) else n_id
