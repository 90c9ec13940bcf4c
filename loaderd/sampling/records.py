"""Records of edges as arrays: all of them, or one section."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.records import EdgeRecord
from loaderd.memory.blob import Written

_DTYPES = {
    "ids": ("uint32", "uint64"), "weights": ("float32",), "times": ("", "int64"),
    "items": ("uint32", "uint64"),
}  # fmt: skip


def record_dtype(record: EdgeRecord) -> np.dtype[Any]:
    """Dtype of flat records: that of their only section, else uint32, word by word."""
    held = [name for name in EdgeRecord._fields if getattr(record, name)]
    return _section_dtype(record, held[0]) if len(held) == 1 else np.dtype(np.uint32)


def _section_dtype(record: EdgeRecord, name: str) -> np.dtype[Any]:
    words: int = getattr(record, name)
    return np.dtype(_DTYPES[name][words - 1])


def flat(records: NDArray[np.uint32], record: EdgeRecord) -> NDArray[Any]:
    """Records (edges, words) as an array of `record_dtype`; a view."""
    return records.reshape(-1).view(record_dtype(record))


def section(records: NDArray[np.uint32], record: EdgeRecord, name: str) -> NDArray[Any]:
    """One section of records (edges, words); a view."""
    at = sum(record[: EdgeRecord._fields.index(name)])
    dtype = _section_dtype(record, name)
    found: NDArray[Any] = records[:, at : at + getattr(record, name)].view(dtype)[:, 0]
    return found


def written_section(whole: Written, record: EdgeRecord, name: str) -> Written:
    """One section of the records that `whole` writes as `flat` gives them."""
    size, dtype = record.size, _section_dtype(record, name)
    if getattr(record, name) == size:
        return whole

    def write(first: int, out: NDArray[Any]) -> None:
        words = np.empty(out.size * size, np.uint32)
        whole.write(first * size, words)
        out[:] = section(words.reshape(-1, size), record, name)

    return Written(dtype, whole.size // size, write)
