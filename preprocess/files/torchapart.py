"""Torch files, read by a process of its own: torch's libraries do not stay in this one.

They take 150 MB and more, which the stages of an ingest would have to leave free of --mem.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from preprocess.errors import BadInput
from preprocess.files.torchfile import as_numpy, is_tensor, load_torch

_ARRAY = 1  # code of an array among msgpack's extensions
_REFUSED = 3  # exit status: stdout has the message
_UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError, RuntimeError)


def load_apart(path: Path) -> Any:
    """What a file holds: plain values, lists and dicts of them; tensors and arrays as arrays.

    Where torch is loaded already, this process reads it.  Raises BadInput, as `load_torch` does,
    and for a value that is nothing of the kind.
    """
    return _unpacked(ask_apart(path, __spec__.name, _load))


def ask_apart(path: Path, module: str, read: Callable[[Path], Any]) -> bytes:
    """What `read` makes of a file, as msgpack, by a process that runs `module`: it `answer`s.

    Where torch is loaded already, or no process can be had, this one reads it.  Raises BadInput.
    """
    if "torch" in sys.modules:
        return _packed(path, read)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", module, str(path.absolute())]
    done = subprocess.run(  # noqa: S603 a module of ours, by this interpreter
        command, env=environment, capture_output=True, check=False
    )
    if done.returncode == _REFUSED:
        raise BadInput(done.stdout.decode(errors="surrogateescape"))
    return done.stdout if done.returncode == 0 else _packed(path, read)


def answer(path: Path, read: Callable[[Path], Any]) -> int:
    """Write what is made of a file, or what is wrong with it, to stdout; the exit status."""
    try:
        raw, status = _packed(path, read), 0
    except BadInput as error:
        raw, status = str(error).encode(errors="surrogateescape"), _REFUSED
    sys.stdout.buffer.write(raw)
    return status


def _load(path: Path) -> Any:
    return load_torch(path)


def _packed(path: Path, read: Callable[[Path], Any]) -> bytes:
    """What is made of a file as msgpack.  Raises BadInput."""
    values = read(path)
    try:
        return msgspec.msgpack.encode(values, enc_hook=_plain)
    except _UNPACKABLE as error:
        said = " ".join(str(error).split())
        raise BadInput.at(
            path, said, "numbers, texts and arrays, and dicts and lists of them", "save these alone"
        ) from error


def _plain(value: Any) -> Any:
    """What msgpack has no form for."""
    if isinstance(value, np.generic):
        return value.item()
    if not is_tensor(value):
        raise TypeError(f"a {type(value).__name__}")
    array = as_numpy(value)
    if array.dtype.hasobject:
        raise TypeError("an array of objects")
    parts = (array.dtype.str, array.shape, array.tobytes())
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(parts))


def _unpacked(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw, ext_hook=_array)


def _array(_: int, raw: memoryview) -> Any:
    dtype, shape, items = msgspec.msgpack.decode(raw)
    return np.frombuffer(items, dtype).reshape(shape).copy()


if __name__ == "__main__":
    sys.exit(answer(Path(sys.argv[1]), _load))
