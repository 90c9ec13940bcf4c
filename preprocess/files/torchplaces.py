"""Where the tensors of a torch file lie in it: they are read from there, without torch."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from preprocess.errors import BadInput
from preprocess.files.strided import BFLOAT16, Array, Held, Placed
from preprocess.files.torchapart import answer, ask_apart
from preprocess.files.torchfile import as_numpy, is_tensor, load_torch, place_of


def open_tensor(path: Path) -> Array:
    """The one tensor, or array, of a file, which a process of its own loads.  Raises BadInput."""
    found: Array = msgspec.msgpack.decode(ask_apart(path, __spec__.name, _load_one), type=Array)
    return found


def describe(path: Path, values: Any) -> Array | None:
    """A tensor by its place in the file; an array, or what torch did not map, by its items.

    None where its items are no numbers of numpy's.
    """
    shape = tuple(int(n) for n in values.shape)
    try:
        dtype = as_numpy(values.reshape(-1)[:0]).dtype
    except (TypeError, RuntimeError):
        return None
    if dtype.kind not in "biufc":
        return None
    offset = place_of(path, values) if 0 not in shape else None
    if offset is not None:
        name = BFLOAT16 if str(values.dtype) == "torch.bfloat16" else dtype.str
        return Placed(name, shape, tuple(int(n) for n in values.stride()), offset)
    return Held(dtype.str, shape, np.ascontiguousarray(as_numpy(values)).tobytes())


def _load_one(path: Path) -> Array:
    values = load_torch(path)
    if not is_tensor(values):
        what = type(values).__name__
        raise BadInput.at(path, f"a {what}", "one tensor", "save the tensor alone")
    found = describe(path, values)
    if found is None:
        raise BadInput.at(path, f"items of {values.dtype}", "numbers", "convert them")
    return found


if __name__ == "__main__":
    sys.exit(answer(Path(sys.argv[1]), _load_one))
