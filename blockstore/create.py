"""Zarr metadata of a store being written: the one door to zarr-python."""

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from blockstore.format import MANIFEST_KEY, BlockGeometry, RowArray
from blockstore.store import numpy_dtype


class ZarrTree:
    """The groups and arrays of a store, as metadata; blocks are written by `blockstore.writer`."""

    def __init__(self, path: Path) -> None:
        """In a folder that is empty, or holds such a tree."""
        self._root = zarr.open_group(LocalStore(path), mode="a", zarr_format=3)

    def rows(self, array: RowArray, geometry: BlockGeometry) -> None:
        """A row array in blocks of whole rows."""
        inner = (geometry.rows_per_block, *array.row_shape)
        outer = (geometry.rows_per_block * geometry.blocks_per_shard, *array.row_shape)
        attributes = {"dtype": "bfloat16"} if array.dtype == "bfloat16" else {}
        self._array(
            array.path, (array.num_rows, *array.row_shape), numpy_dtype(array.dtype), inner, outer,
            attributes,
        )  # fmt: skip

    def graph(self, path: str, geometry: BlockGeometry) -> None:
        """Graph blocks: rows of bytes."""
        size = geometry.slot_bytes
        self._array(
            path, (geometry.num_blocks, size), np.dtype(np.uint8), (1, size),
            (geometry.blocks_per_shard, size), {},
        )  # fmt: skip

    def side(self, path: str, values: NDArray[Any]) -> None:
        """A small array of one chunk with its crc32c, written through zarr."""
        array = self._root.create_array(
            path,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(max(1, values.shape[0]),),
            compressors=[Crc32cCodec()],
            fill_value=0,
            config={"write_empty_chunks": True},  # zeros are content too
        )
        if values.size:
            array[:] = values

    def _array(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        inner: tuple[int, ...],
        outer: tuple[int, ...],
        attributes: dict[str, Any],
    ) -> None:
        self._root.create_array(
            path, shape=shape, dtype=dtype, chunks=inner, shards=outer, compressors=None,
            fill_value=0, attributes=attributes,
        )  # fmt: skip

    def attributes(self, manifest: dict[str, Any]) -> None:
        """The manifest, in the attributes of the root group."""
        self._root.attrs[MANIFEST_KEY] = manifest
