"""Files that `torch.save` wrote: tensors, plain values and numpy arrays, no other objects."""

import importlib
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput

# what a damaged pickle raises depends on where it is damaged
_UNREADABLE = (
    UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, LookupError,
    AttributeError, AssertionError, MemoryError, struct.error,
)  # fmt: skip
_MOST_SHOWN = 100  # characters of what torch says


class Record:
    """What stands for an object of a class that may be in a file: its attributes, none of its code.

    The class itself is not imported, and stands for no more than this one.
    """

    def __init__(self, *_: Any) -> None:
        self.attributes: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise TypeError(f"attributes in a {type(state).__name__}")
        self.attributes = state


def load_torch(path: Path, records: Sequence[str] = ()) -> Any:
    """What a file holds; tensors are mapped into memory where the file's format allows it.

    records   full names of classes: their objects become a `Record`; of others there must be none

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
        with _allowed(torch, [*_numpy_parts(), *_record_parts(records)]):
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
    values = values.detach().resolve_conj().resolve_neg()
    if str(values.dtype) == "torch.bfloat16":
        values = values.float()
    array: NDArray[Any] = values.numpy()
    return array


def is_tensor(values: Any) -> bool:
    """Whether a value is a dense tensor or an array."""
    if isinstance(values, np.ndarray):
        return True
    is_torch = type(values).__module__.split(".")[0] == "torch" and hasattr(values, "numpy")
    return is_torch and str(values.layout) == "torch.strided"


def place_of(path: Path, tensor: Any) -> int | None:
    """Offset in the file of the first item of a mapped tensor; None where it is not mapped.

    Items lie in the file as they do in memory, at the tensor's strides.
    """
    if isinstance(tensor, np.ndarray) or tensor.is_neg():
        return None
    address, inode = tensor.data_ptr(), path.stat().st_ino
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, number = line.split(maxsplit=5)[:5]
        first, stop = (int(end, 16) for end in span.split("-"))
        if first <= address < stop:
            is_file = int(number) == inode and _is_native(path)
            return int(offset, 16) + address - first if is_file else None
    return None


def _is_native(path: Path) -> bool:
    """Whether a file has the byte order of this machine; a file that does not say has."""
    with ZipFile(path) as file:
        names = (name for name in file.namelist() if name.endswith("/byteorder"))
        return all(file.read(name) == sys.byteorder.encode() for name in names)


@contextmanager
def _allowed(torch: Any, parts: list[Any]) -> Iterator[None]:
    """These alone are allowed in files, whatever other libraries have allowed; nothing is said."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(parts)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sparse tensors are new
            yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def _record_parts(records: Sequence[str]) -> list[Any]:
    """What objects of these classes are made of, under the names that files have for it."""
    made: list[Any] = [(Record, name) for name in records]
    return [*made, (_empty_dict, "collections.defaultdict")] if made else []


def _empty_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _numpy_parts() -> list[Any]:
    """What numpy arrays in such a file are made of."""
    rebuild = importlib.import_module("numpy._core.multiarray")._reconstruct
    kinds = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    old = (rebuild, "numpy.core.multiarray._reconstruct")  # its name before numpy 2
    return [bytes, rebuild, old, np.ndarray, np.dtype, *kinds]  # bytes: of empty ones
