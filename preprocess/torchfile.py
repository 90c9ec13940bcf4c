"""Files that `torch.save` wrote: tensors, plain values and numpy arrays, no other objects."""

import importlib
import struct
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput

# what a damaged pickle raises depends on where it is damaged
_UNREADABLE = (
    UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, LookupError,
    AttributeError, AssertionError, MemoryError, struct.error,
)  # fmt: skip
_MOST_SHOWN = 100  # characters of what torch says


def load_torch(path: Path) -> Any:
    """What a file holds; tensors are mapped into memory where the file's format allows it.

    Raises BadInput: torch is not installed, the file is missing or damaged, or holds other objects.
    """
    if not path.is_file():
        raise BadInput.at(path, "no file: it is missing", "a file of torch.save", "add it")
    try:  # here, not above: torch is optional, and takes a second to load
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise BadInput.at(
            path,
            "no torch to read it with",
            "an installed torch",
            "pip install 'blockstore[torch]'",
        ) from error
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"  # what torch writes since 1.6
    try:
        with torch.serialization.safe_globals(_numpy_parts()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except _UNREADABLE as error:
        said = " ".join(str(error).split())
        found = said.rpartition("WeightsUnpickler error: ")[2][:_MOST_SHOWN] or type(error).__name__
        raise BadInput.at(
            path, found, "a whole file of tensors", "save it again with torch.save, tensors alone"
        ) from error


def as_numpy(values: Any) -> NDArray[Any]:
    """A tensor or an array as an array, without a copy; bfloat16 becomes float32, with one."""
    if isinstance(values, np.ndarray):
        return values
    values = values.detach()
    if str(values.dtype) == "torch.bfloat16":
        values = values.float()
    array: NDArray[Any] = values.numpy()
    return array


def is_tensor(values: Any) -> bool:
    """Whether a value is a dense tensor or an array."""
    if isinstance(values, np.ndarray):
        return True
    return type(values).__module__.split(".")[0] == "torch" and hasattr(values, "numpy")


def _numpy_parts() -> list[Any]:
    """What numpy arrays in such a file are made of."""
    rebuild = importlib.import_module("numpy._core.multiarray")._reconstruct
    kinds = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    old = (rebuild, "numpy.core.multiarray._reconstruct")  # its name before numpy 2
    return [rebuild, old, np.ndarray, np.dtype, *kinds]
