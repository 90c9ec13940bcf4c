"""Files that `torch.save` wrote: tensors, plain values and numpy arrays, no other objects."""

import importlib
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


class TensorRows:
    """Rows of a dense tensor or an array, in order; of a mapped tensor no more is read.

    Raises BadInput: it has no rows, or its items are no numbers of numpy's.
    """

    def __init__(self, values: Any, where: str) -> None:
        self._values, self.where = values, where
        self.shape = tuple(int(n) for n in values.shape)
        if not self.shape:
            raise BadInput.at(where, "one number", "rows", "leave it out")
        try:
            self.dtype = as_numpy(values[:0]).dtype
        except (TypeError, RuntimeError) as error:
            raise BadInput.at(where, f"items of {values.dtype}", "numbers", "convert it") from error

    @property
    def num_rows(self) -> int:
        """Rows of the array."""
        return self.shape[0]

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Rows [first, stop), `count` at a time; they are not to be written to."""
        for at in range(first, stop, count):
            yield as_numpy(self._values[at : min(at + count, stop)])


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
    values = values.detach()
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
