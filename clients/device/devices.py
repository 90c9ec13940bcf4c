"""Devices that batches are moved to: a GPU, or host memory in the place of one."""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.io.buffers import byte_view
from blockstore.io.files import open_to_read, read_exact
from blockstore.io.gds import DeviceReader
from blockstore.kernels.rows import NO_ROW, gather_rows
from blockstore.store import FileRange
from clients.device.driver import CannotRegister, RegisteredMemory, registered
from clients.records import copy_to_gpu

_log = logging.getLogger(__name__)
kernels: Any
cuda: Any = torch.cuda  # its classes are not typed
try:
    from clients.device import kernels
except ImportError:  # no Triton here
    kernels = None


BY_HOST = "host, checksums verified"


class Mark:
    """A point in the order of a device's work.  On the host, work is done as it is submitted."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached this point."""

    def passed(self) -> bool:
        """Whether the device has reached this point; does not wait."""
        return True

    def since(self, earlier: Any) -> float:
        """Seconds since an earlier mark; the device must have reached both."""
        return float(self._at - earlier._at)


class Device:
    """Copies and gathers in a stream of its own, concurrently with the trainer's work.

    This class is host memory in the place of a device: the same batches, by the same steps.
    Only the thread that reads ahead uses it, except for `adopt`, which the trainer calls.

    files_by   what reads arrays in files; BY_HOST: they are read to `host` memory, then copied
    """

    def __init__(self, free_bytes: int = 256 << 20, files_by: str = BY_HOST) -> None:
        self.device, self.name, self.files_by = torch.device("cpu"), "cpu", files_by
        self._free_bytes = free_bytes
        self._arena: NDArray[np.uint8] | None = None

    def host(self, num_bytes: int) -> Tensor:
        """uint8 host memory from which copies are fast."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, source: Tensor) -> Tensor:
        """Begin to copy host memory, which must stay until the device has reached the next mark."""
        return source.clone()

    def order(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch's operations join this stream."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """A mark after all work submitted so far."""
        return Mark()

    def lend(self, arena: NDArray[np.uint8], gather: bool = True) -> str:
        """Register an arena for `gather` and fast copies, in place of the last one.

        Returns "", or why this failed; `gather` False: for copies only.
        """
        del gather
        self._arena = arena
        return ""

    def gather(
        self, addresses: Tensor, out: Tensor, slots: Tensor | None, cache: Tensor | None
    ) -> None:
        """As `clients.device.kernels.gather_on_device`, from the registered arena."""
        assert self._arena is not None
        wanted = addresses.numpy().view(np.uint64)
        hits = None
        if slots is not None and cache is not None:
            hits = torch.nonzero(slots >= 0).squeeze(1)
            wanted = np.where(slots.numpy() >= 0, NO_ROW, wanted)
        flat = out.reshape(-1).numpy()
        gather_rows(self._arena, wanted, 0, wanted.size, out.shape[1], flat)
        if hits is not None and slots is not None and cache is not None:
            out[hits] = cache[slots[hits]]

    def fetch(self, ranges: Sequence[FileRange], out: Tensor) -> None:
        """Read ranges of files, one after the other, to uint8 (bytes,) of the device, and wait.

        Raises CorruptBlock, OSError.
        """
        at, raw = 0, out.numpy()
        for piece in ranges:
            fd = open_to_read(piece.path, direct=False)
            try:
                part = byte_view(raw[at : at + piece.num_bytes])
                read_exact(fd, [part], piece.offset, str(piece.path))
            finally:
                os.close(fd)
            at += piece.num_bytes

    def adopt(self, tensors: Sequence[Tensor], mark: Mark) -> None:
        """Make the trainer's work from now on wait for `mark`, as it uses `tensors`."""

    def free_bytes(self) -> int:
        """Free bytes of the device's memory."""
        return self._free_bytes

    def close(self) -> None:
        """Wait for submitted work, and unregister the arena."""
        self._arena = None


class CudaMark(Mark):
    """A CUDA event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Wait by sleeping, not spinning."""
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())

    def since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaDevice(Device):
    """A GPU, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.device)
        self._stream = cuda.Stream(self.device)
        self._lent: RegisteredMemory | None = None
        self._files: DeviceReader | None = None
        try:
            self._files = DeviceReader()
        except RuntimeError as error:
            _log.info("%s: files are read by the host: %s", self.name, error)
        self.files_by = BY_HOST if self._files is None else self._files.how
        self._lent_arena: Tensor | None = None

    def host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor) -> Tensor:
        with self.order():
            return copy_to_gpu(source, self.device)

    def order(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def lend(self, arena: NDArray[np.uint8], gather: bool = True) -> str:
        if gather and kernels is None:
            return "Triton is not installed"
        if self._lent is not None and self._lent.memory.ctypes.data == arena.ctypes.data:
            return ""
        self._give_back()
        try:
            self._lent = registered(arena, self.device)
        except CannotRegister as error:
            return str(error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the arena is read-only
            self._lent_arena = torch.from_numpy(arena)
        return ""

    def gather(
        self, addresses: Tensor, out: Tensor, slots: Tensor | None, cache: Tensor | None
    ) -> None:
        assert self._lent_arena is not None
        with self.order():
            kernels.gather_on_device(self._lent_arena, addresses, out, slots, cache)

    def fetch(self, ranges: Sequence[FileRange], out: Tensor) -> None:
        assert self._files is not None
        with torch.cuda.device(self.device):
            self._files.read(ranges, out)

    def adopt(self, tensors: Sequence[Tensor], mark: Mark) -> None:
        """As in `Device`: the trainer's stream waits, the host does not."""
        assert isinstance(mark, CudaMark)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark.event)
        for tensor in tensors:  # torch reuses its memory only after this stream is done with it
            tensor.record_stream(current)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def close(self) -> None:
        self._give_back()
        if self._files is not None:
            self._files.close()

    def _give_back(self) -> None:
        self._stream.synchronize()
        self._lent_arena = self._lent = None


def open_device(device: torch.device) -> Device:
    """A `Device` for a torch device.  Raises ValueError: there is no such device here."""
    if device.type == "cpu":
        return Device()
    if device.type != "cuda":
        raise ValueError(f"device {str(device)!r}: expected 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch finds no CUDA device here; use 'cpu'")
    return CudaDevice(device)
