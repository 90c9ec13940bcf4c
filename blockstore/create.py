"""Zarr metadata of a store being written: the only module that uses zarr-python."""

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.buffer import Buffer
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from blockstore.format import ROOT, BlockGeometry, RowArray, parents
from blockstore.io.files import naming
from blockstore.store import numpy_dtype

_OF_NODES = ("label", "original_id", "store_id")
_SIDES = (".crc", ".scale")  # ends of names of arrays that belong to another one


class ZarrTree:
    """The groups and arrays of a store, as metadata; blocks are written by `blockstore.writer`.

    Methods return the files of metadata of an array and of the groups that it lies in, by path.

    zarr makes an array in memory, and its files are written from there: in a folder it looks for
    every group on the way to an array, one after the other: that takes 2.2 to 2.8 times as long.
    """

    def __init__(self, path: Path) -> None:
        """Open or begin a tree in a folder that is empty, or holds such a tree."""
        files: dict[str, Buffer] = {}
        zarr.create_group(MemoryStore(files), zarr_format=3)
        self._path, self._group = path, files[ROOT].to_bytes()
        self._begin_group("")

    def rows(self, array: RowArray, geometry: BlockGeometry) -> dict[str, bytes]:
        """A row array in blocks of whole rows."""
        shape = (array.num_rows, *array.row_shape)
        attributes = {"dtype": "bfloat16"} if array.dtype == "bfloat16" else {}
        return self._blocks(array.path, shape, numpy_dtype(array.dtype), geometry, attributes)

    def graph(self, path: str, geometry: BlockGeometry) -> dict[str, bytes]:
        """Graph blocks: rows of bytes."""
        shape = (geometry.num_blocks, geometry.slot_bytes)
        return self._blocks(path, shape, np.dtype(np.uint8), geometry, {})

    def side(self, path: str, values: NDArray[Any]) -> dict[str, bytes]:
        """A small array of one chunk with its crc32c."""
        files: dict[str, Buffer] = {}
        array = zarr.create_array(
            MemoryStore(files),
            shape=values.shape,
            dtype=values.dtype,
            chunks=(max(1, values.shape[0]),),
            compressors=[Crc32cCodec()],
            fill_value=0,
            zarr_format=3,
            dimension_names=dimension_names(path, values.ndim),
            config={"write_empty_chunks": True},  # zeros are content too
        )
        if values.size:
            array[:] = values
        return self._write(path, files)

    def _blocks(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        geometry: BlockGeometry,
        attributes: dict[str, Any],
    ) -> dict[str, bytes]:
        rows, files = geometry.rows_per_block, dict[str, Buffer]()
        zarr.create_array(
            MemoryStore(files), shape=shape, dtype=dtype, chunks=(rows, *shape[1:]),
            shards=(rows * geometry.blocks_per_shard, *shape[1:]), compressors=None,
            fill_value=0, attributes=attributes, zarr_format=3,
            dimension_names=dimension_names(path, len(shape)),
        )  # fmt: skip
        return self._write(path, files)

    def _write(self, path: str, files: dict[str, Buffer]) -> dict[str, bytes]:
        """Write an array's files; groups that are there stay as they are."""
        groups = {f"{group}/{ROOT}": self._begin_group(group) for group in parents(path)}
        for name, content in files.items():
            _put(self._path / path / name, content.as_numpy_array().data)
        return groups | {f"{path}/{ROOT}": files[ROOT].to_bytes()}

    def _begin_group(self, group: str) -> bytes:
        """Metadata of a group, which may be there."""
        place = self._path / group / ROOT
        if place.exists():
            return place.read_bytes()
        _put(place, memoryview(self._group))
        return self._group


def _put(place: Path, content: memoryview) -> None:
    with naming(place, content.nbytes):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def dimension_names(path: str, ndim: int) -> list[str]:
    """Names of an array's dimensions for xarray; below a type, one name stands for one size.

    "node" or "edge" if there is a row for each one of the type or relation; else, and for further
    dimensions, the array's place in the type or relation, and a number.
    """
    *owner, name = path.split("/")
    own = ".".join([*owner[2:], name])
    rows = f"{own}_0"
    if not name.endswith(_SIDES):
        match owner:
            case ["nodes" | "edges" as kind, _, "features"]:
                rows = kind.removesuffix("s")
            case ["nodes", _] if name in _OF_NODES:
                rows = "node"
    return [rows, *(f"{own}_{axis}" for axis in range(1, ndim))]
