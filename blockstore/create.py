"""Zarr metadata of a store being written, byte for byte as zarr-python 3.1 writes it.

It is part of what a store's fingerprint covers, so it must not change with the version of a library
that is installed.  Importing zarr takes half a second, and creating an array by it 5 ms.
"""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreExists
from blockstore.format import ROOT, BlockGeometry, RowArray, parents
from blockstore.io.files import naming
from blockstore.store import crc_bytes, numpy_dtype

_CRC = {"name": "crc32c"}


class ZarrTree:
    """The groups and arrays of a store, as metadata; blocks are written by `blockstore.writer`.

    Methods return the files of metadata of an array and of the groups that it lies in, by path.
    Raise StoreExists: the array is there already.
    """

    def __init__(self, path: Path) -> None:
        """In a folder that is empty, or holds such a tree."""
        self._path = path
        self._lock = threading.Lock()  # two arrays may ask for one group at a time
        self._group("")

    def rows(self, array: RowArray, geometry: BlockGeometry) -> dict[str, bytes]:
        """A row array in blocks of whole rows."""
        inner = (geometry.rows_per_block, *array.row_shape)
        outer = (geometry.rows_per_block * geometry.blocks_per_shard, *array.row_shape)
        attributes = {"dtype": "bfloat16"} if array.dtype == "bfloat16" else {}
        dtype, shape = numpy_dtype(array.dtype), (array.num_rows, *array.row_shape)
        return self._array(array.path, shape, dtype, outer, _shards(dtype, inner), attributes)

    def graph(self, path: str, geometry: BlockGeometry) -> dict[str, bytes]:
        """Graph blocks: rows of bytes."""
        size, dtype = geometry.slot_bytes, np.dtype(np.uint8)
        outer, codec = (geometry.blocks_per_shard, size), _shards(dtype, (1, size))
        return self._array(path, (geometry.num_blocks, size), dtype, outer, codec, {})

    def side(self, path: str, values: NDArray[Any]) -> dict[str, bytes]:
        """A small array of one chunk with its crc32c."""
        chunk, codecs = (max(1, values.size),), [_bytes(values.dtype), _CRC]
        files = self._array(path, values.shape, values.dtype, chunk, codecs, {})
        if values.size:
            raw = values.tobytes()
            _write(self._path / path / "c" / "0", raw + crc_bytes(raw))
        return files

    def _array(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunk: tuple[int, ...],
        codecs: list[dict[str, Any]],
        attributes: dict[str, Any],
    ) -> dict[str, bytes]:
        above = {f"{group}/{ROOT}": self._group(group) for group in parents(path)}
        place = self._path / path / ROOT
        if place.exists():
            raise StoreExists(f"{place}: exists already, expected to write this array once")
        metadata = {
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": dtype.type(0).item(),
            "codecs": codecs,
            "attributes": attributes,
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }
        raw = json.dumps(metadata, indent=2).encode()
        _write(place, raw)
        return above | {f"{path}/{ROOT}": raw}

    def _group(self, path: str) -> bytes:
        """The metadata of a group, which is made if it is not there; others may have changed it."""
        place = self._path / path / ROOT
        with self._lock:
            if not place.exists():
                group = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
                _write(place, json.dumps(group, indent=2).encode())
            return place.read_bytes()


def _bytes(dtype: np.dtype[Any]) -> dict[str, Any]:
    if dtype.itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _shards(dtype: np.dtype[Any], block: tuple[int, ...]) -> list[dict[str, Any]]:
    configuration = {
        "chunk_shape": block,
        "codecs": [_bytes(dtype)],
        "index_codecs": [_bytes(np.dtype("uint64")), _CRC],
        "index_location": "end",
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


def _write(path: Path, raw: bytes) -> None:
    """A file that is whole as soon as it is there.  Raises OutOfSpace."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(path, len(raw)):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(raw)
        partial.replace(path)
