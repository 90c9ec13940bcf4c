"""Zarr metadata of a store being written: the only module that uses zarr-python."""

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from blockstore.format import ROOT, BlockGeometry, RowArray, parents
from blockstore.io.files import naming
from blockstore.store import numpy_dtype

_METADATA_BYTES = 4096  # of an array, about
_OF_NODES = ("label", "original_id", "store_id")
_SIDES = (".crc", ".scale")  # ends of names of arrays that belong to another one


class ZarrTree:
    """The groups and arrays of a store, as metadata; blocks are written by `blockstore.writer`.

    Methods return the files of metadata of an array and of the groups that it lies in, by path.
    """

    def __init__(self, path: Path) -> None:
        """Open or begin a tree in a folder that is empty, or holds such a tree."""
        self._path = path
        with naming(path / ROOT, _METADATA_BYTES):
            self._root = zarr.open_group(LocalStore(path), mode="a", zarr_format=3)

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
        """A small array of one chunk with its crc32c, written through zarr."""
        with naming(self._path / path, values.nbytes + _METADATA_BYTES):
            array = self._root.create_array(
                path,
                shape=values.shape,
                dtype=values.dtype,
                chunks=(max(1, values.shape[0]),),
                compressors=[Crc32cCodec()],
                fill_value=0,
                dimension_names=dimension_names(path, values.ndim),
                config={"write_empty_chunks": True},  # zeros are content too
            )
            if values.size:
                array[:] = values
        return self._metadata(path)

    def _blocks(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        geometry: BlockGeometry,
        attributes: dict[str, Any],
    ) -> dict[str, bytes]:
        rows = geometry.rows_per_block
        with naming(self._path / path / ROOT, _METADATA_BYTES):
            self._root.create_array(
                path, shape=shape, dtype=dtype, chunks=(rows, *shape[1:]),
                shards=(rows * geometry.blocks_per_shard, *shape[1:]), compressors=None,
                fill_value=0, attributes=attributes,
                dimension_names=dimension_names(path, len(shape)),
            )  # fmt: skip
        return self._metadata(path)

    def _metadata(self, path: str) -> dict[str, bytes]:
        names = [f"{node}/{ROOT}" for node in (*parents(path), path)]
        return {name: (self._path / name).read_bytes() for name in names}


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
