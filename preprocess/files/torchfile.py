"""Files that `torch.save` wrote: tensors, plain values, numpy arrays and the graphs of PyG.

A child process loads the file and reports the offsets of its tensors, which are then read from the
file.  So torch's libraries, which take 150 MB or more, are not loaded into this process.
"""

import importlib
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.strided import BFLOAT16, Array, GivenArray, Placed, StridedRows

# which of these a damaged pickle raises depends on where it is damaged
_UNREADABLE = (
    UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, LookupError,
    AttributeError, AssertionError, MemoryError, struct.error,
)  # fmt: skip
_UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError, RuntimeError)
_MAX_SHOWN = 100  # characters of torch's message
_REFUSED = 3  # exit status of the child if stdout holds an error message
_ARRAY, _RECORD, _OTHER, _TUPLE = 1, 2, 3, 4  # codes of msgpack extensions
_DATA = "torch_geometric.data"
_RECORDS = (  # classes whose objects may be in a file
    f"{_DATA}.data.Data", f"{_DATA}.data.DataTensorAttr", f"{_DATA}.data.DataEdgeAttr",
    f"{_DATA}.hetero_data.HeteroData", f"{_DATA}.feature_store.TensorAttr",
    f"{_DATA}.graph_store.EdgeAttr", f"{_DATA}.graph_store.EdgeLayout",
    f"{_DATA}.storage.BaseStorage", f"{_DATA}.storage.GlobalStorage",
    f"{_DATA}.storage.NodeStorage", f"{_DATA}.storage.EdgeStorage", f"{_DATA}.storage.AttrType",
    "torch_sparse.tensor.SparseTensor", "torch_sparse.storage.SparseStorage",
)  # fmt: skip


class TorchObject:
    """Holds the attributes of an object in a file, in place of an instance of its class.

    The class itself is never imported, and none of its code runs.
    """

    def __init__(self, *_: Any) -> None:
        self.attributes: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise TypeError(f"attributes in a {type(state).__name__}")
        self.attributes = state


class Other(msgspec.Struct, frozen=True):
    """A description of a value of an unsupported kind."""

    text: str


def read_torch(path: Path) -> Any:
    """The content of a file: plain values, lists, dicts, `Array`, `TorchObject` and `Other`.

    A tuple at the top level stays a tuple; others become lists.  A sparse CSR matrix becomes a
    `TorchObject` like those of torch_sparse.  If torch is imported already, or the child process
    fails, this process loads the file.  Raises BadInput: it holds anything else.
    """
    try:
        return msgspec.msgpack.decode(_loaded_apart(path), ext_hook=_unpacked)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise _no_values(path, error) from error


def open_tensor(path: Path, where: str, values: Any, expected: str) -> StridedRows:
    """Open a value of `read_torch` as rows.  Raises BadInput: it is no tensor and no array."""
    if not isinstance(values, Placed | GivenArray):
        what = values.text if isinstance(values, Other) else f"a {kind_of(values)}"
        raise BadInput.at(where, what, expected, "save it again")
    return StridedRows(path, values, where)


def kind_of(value: Any) -> str:
    """The kind of a value, for messages."""
    if isinstance(value, Placed | GivenArray):
        return "Tensor"
    return value.text if isinstance(value, Other) else type(value).__name__


def _loaded_apart(path: Path) -> bytes:
    """The values of a file as msgpack, from a child process unless torch is imported already."""
    if "torch" in sys.modules:
        return _packed(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __spec__.name, str(path.absolute())]
    done = subprocess.run(  # noqa: S603 a module of ours, by this interpreter
        command, env=environment, capture_output=True, check=False
    )
    if done.returncode == _REFUSED:
        raise BadInput(done.stdout.decode(errors="surrogateescape"))
    return done.stdout if done.returncode == 0 else _packed(path)


def main() -> int:
    """Write the values of a file, or an error message, to stdout; returns the exit status."""
    try:
        raw, status = _packed(Path(sys.argv[1])), 0
    except BadInput as error:
        raw, status = str(error).encode(errors="surrogateescape"), _REFUSED
    sys.stdout.buffer.write(raw)
    return status


def _packed(path: Path) -> bytes:
    values = _load(path)

    def extension(value: Any) -> Any:
        """Encode a value that msgpack does not support."""
        if isinstance(value, np.generic):
            return value.item()
        layout = str(getattr(value, "layout", type(value).__name__))
        raw: Any
        if isinstance(value, np.ndarray) or layout == "torch.strided":
            array = _describe(path, value)
            code, raw = (_ARRAY, array) if array else (_OTHER, f"items of {value.dtype}")
        elif layout == "torch.sparse_csr":
            parts = {
                "_rowptr": value.crow_indices(), "_col": value.col_indices(),
                "_value": value.values(), "_sparse_sizes": tuple(value.shape),
            }  # fmt: skip
            code, raw = _RECORD, {"storage": msgspec.msgpack.Ext(_RECORD, encode(parts))}
        elif isinstance(value, TorchObject):  # PyG's storages refer back to their graph
            code, raw = _RECORD, {k: v for k, v in value.attributes.items() if k != "_parent"}
        else:
            code, raw = _OTHER, layout
        return msgspec.msgpack.Ext(code, encode(raw))

    encode = msgspec.msgpack.Encoder(enc_hook=extension).encode
    try:
        if isinstance(values, tuple):
            values = msgspec.msgpack.Ext(_TUPLE, encode(list(values)))
        return encode(values)
    except _UNPACKABLE as error:
        raise _no_values(path, error) from error


def _unpacked(code: int, raw: memoryview) -> Any:
    if code == _ARRAY:
        return msgspec.msgpack.decode(raw, type=Array)
    value = msgspec.msgpack.decode(raw, ext_hook=_unpacked)
    if code == _RECORD:
        record = TorchObject()
        record.attributes = value
        return record
    return Other(value) if code == _OTHER else tuple(value)


def _no_values(path: Path, error: Exception) -> BadInput:
    expected = "numbers, texts and arrays, and dicts and lists of them"
    return BadInput.at(path, " ".join(str(error).split()), expected, "save these alone")


def _load(path: Path) -> Any:
    """Load a file with torch; tensors are memory-mapped if the file's format allows it."""
    if not path.is_file():
        raise BadInput.at(path, "no file: it is missing", "a file of torch.save", "add it")
    try:  # imported lazily: torch is optional, and takes a second to load
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise BadInput.at(
            path, "no torch to read it with", "an installed torch",
            "pip install 'blockstore[torch]'",
        ) from error  # fmt: skip
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"  # the format of torch since 1.6
    try:
        with _allowed(torch):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except _UNREADABLE as error:
        said = " ".join(str(error).split())
        found = said.rpartition("WeightsUnpickler error: ")[2][:_MAX_SHOWN] or type(error).__name__
        raise BadInput.at(
            path, found, "a whole file of tensors", "save it again with torch.save, tensors alone"
        ) from error


def _describe(path: Path, values: Any) -> Array | None:
    """Describe a mapped tensor by its offset in the file, any other array by its items.

    None if its items are not of a numeric dtype of numpy.
    """
    shape = tuple(int(n) for n in values.shape)
    try:
        dtype = _as_numpy(values.reshape(-1)[:0]).dtype
    except (TypeError, RuntimeError):
        return None
    if dtype.kind not in "biufc":
        return None
    offset = _place_of(path, values) if 0 not in shape else None
    if offset is not None:
        name = BFLOAT16 if str(values.dtype) == "torch.bfloat16" else dtype.str
        return Placed(name, shape, tuple(int(n) for n in values.stride()), offset)
    return GivenArray(dtype.str, shape, np.ascontiguousarray(_as_numpy(values)).tobytes())


def _as_numpy(values: Any) -> NDArray[Any]:
    """A tensor or an array as a numpy array, without a copy; bfloat16 is copied to float32."""
    if isinstance(values, np.ndarray):
        return values
    values = values.detach().resolve_conj().resolve_neg()
    if str(values.dtype) == "torch.bfloat16":
        values = values.float()
    array: NDArray[Any] = values.numpy()
    return array


def _place_of(path: Path, tensor: Any) -> int | None:
    """Offset in the file of the first item of a mapped tensor; None if it is not mapped.

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
    """Whether a file has this machine's byte order, which is assumed if it does not say."""
    with ZipFile(path) as file:
        names = (name for name in file.namelist() if name.endswith("/byteorder"))
        return all(file.read(name) == sys.byteorder.encode() for name in names)


@contextmanager
def _allowed(torch: Any) -> Iterator[None]:
    """Let torch load only numpy arrays and records, whatever else is registered, without warnings.

    Classes are registered under the names found in files, also those of older numpy and of PyG.
    """
    rebuild = importlib.import_module("numpy._core.multiarray")._reconstruct
    kinds = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    old = (rebuild, "numpy.core.multiarray._reconstruct")  # its name before numpy 2
    records: list[Any] = [(TorchObject, name) for name in _RECORDS]
    records.append((lambda *_: {}, "collections.defaultdict"))
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [bytes, rebuild, old, np.ndarray, np.dtype, *kinds, *records]  # bytes: of empty arrays
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sparse tensors being new
            yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


if __name__ == "__main__":
    sys.exit(main())
