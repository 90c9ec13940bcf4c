"""Register memory of other processes for reading by the GPU, which torch does not offer.

Calls the CUDA driver, not the runtime: a failed runtime call leaves an error behind that torch
would report at its next kernel.
"""

import ctypes
import threading
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
PORTABLE, DEVICE_MAP, READ_ONLY = 0x01, 0x02, 0x08  # CU_MEMHOSTREGISTER_*


class CannotRegister(RuntimeError):
    """The driver does not let the device read this memory."""


class RegisteredMemory:
    """Mapped memory that devices may read for the lifetime of this object."""

    def __init__(self, memory: NDArray[np.uint8], device: torch.device) -> None:
        """`memory` may be mapped read-only.  Raises CannotRegister."""
        self.memory = memory
        driver = _load()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            number, supported = ctypes.c_int(), ctypes.c_int()
            ordinal = torch.cuda.current_device()
            _check(driver, driver.cuDeviceGet(ctypes.byref(number), ordinal), "cuDeviceGet")
            _check(
                driver,
                driver.cuDeviceGetAttribute(
                    ctypes.byref(supported), READ_ONLY_SUPPORTED, number.value
                ),
                "cuDeviceGetAttribute",
            )
            flags = PORTABLE | DEVICE_MAP | (READ_ONLY if supported.value else 0)
            status = driver.cuMemHostRegister_v2(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), flags
            )
            said = "with" if supported.value else "without"
            _check(driver, status, f"cuMemHostRegister of {memory.nbytes} bytes {said} read-only")
        weakref.finalize(self, _unregister, driver, memory, device)


_lock = threading.Lock()
_registered: "weakref.WeakValueDictionary[tuple[int, int], RegisteredMemory]" = (
    weakref.WeakValueDictionary()
)


def registered(memory: NDArray[np.uint8], device: torch.device) -> RegisteredMemory:
    """The registration of `memory`, shared by all uses: the driver accepts it only once.

    Raises CannotRegister.
    """
    place = memory.ctypes.data, memory.nbytes
    with _lock:
        found = _registered.get(place)
        if found is None:
            found = _registered[place] = RegisteredMemory(memory, device)
        return found


def _unregister(driver: Any, memory: NDArray[np.uint8], device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        driver.cuMemHostUnregister(ctypes.c_void_p(memory.ctypes.data))


def _load() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotRegister(f"libcuda.so.1: {error}") from error


def _check(driver: Any, status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        said = name.value.decode() if name.value else "unknown error"
        raise CannotRegister(f"{what}: {said} ({status})")
