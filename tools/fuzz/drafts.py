"""A small store in memory, to be changed and signed again: every checksum fits what was changed.

`sign` is the one place that knows which checksums and digests a store has.
"""

import contextlib
import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.format import (
    FINGERPRINT_KEY,
    MANIFEST_KEY,
    PAGE_BYTES,
    ROOT,
    BlockGeometry,
    Manifest,
    bound_files,
    columns_of,
    crc_path,
    graph_geometry,
    row_geometry,
    shard_path,
    side_arrays,
)
from blockstore.root import digest
from blockstore.store import crc_bytes, numpy_dtype, open_store, shard_index


@dataclass(slots=True)
class Blocks:
    """The blocks of one array, all in one shard."""

    data: bytearray
    geometry: BlockGeometry
    shard: str  # path of the file in the store
    dtype: np.dtype[Any]  # of its rows; of graph blocks uint8
    relation: int = -1  # of graph blocks
    index: bytes = b""  # of the shard; empty: as the geometry says
    cut_bytes: int = 0  # that the file lacks at its end, after everything else was signed

    def values(self) -> NDArray[Any]:
        """All of it as numbers of its dtype, to be changed in place."""
        size = len(self.data) // self.dtype.itemsize
        return np.frombuffer(self.data, self.dtype, size)


@dataclass(slots=True)
class StoreDraft:
    """What the files of a store are made of."""

    document: dict[str, Any]  # of the root's zarr.json
    blocks: dict[str, Blocks]  # by path of the array
    sides: dict[str, NDArray[Any]]  # by path; page checksums are not among them
    others: dict[str, bytes]  # files that are none of these, by path
    links: dict[str, str] = field(default_factory=dict)  # path -> where it leads instead
    deleted: set[str] = field(default_factory=set)

    @property
    def manifest(self) -> Any:
        return self.document["attributes"][MANIFEST_KEY]

    @manifest.setter
    def manifest(self, value: Any) -> None:
        self.document["attributes"][MANIFEST_KEY] = value

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a store whose arrays have one shard each."""
        store = open_store(path)
        manifest = store.manifest
        blocks: dict[str, Blocks] = {}
        for array in manifest.row_arrays():
            geometry = row_geometry(array, manifest.block_bytes)
            name = shard_path(array.path, 0, 1 + len(array.row_shape))
            blocks[array.path] = _blocks(path, name, geometry, numpy_dtype(array.dtype))
        for number, relation in enumerate(manifest.relations):
            for columns in columns_of(relation):
                geometry = graph_geometry(columns.num_blocks, manifest.block_bytes)
                name = shard_path(columns.path, 0, 2)
                blocks[columns.path] = _blocks(path, name, geometry, np.dtype(np.uint8), number)
        crcs = {crc_path(name) for name in blocks}
        sides = {
            name: store.side(name, np.dtype(dtype), size).copy()
            for name, dtype, size in side_arrays(manifest)
            if name not in crcs
        }
        made = {b.shard for b in blocks.values()} | {f"{name}/c/0" for name in crcs | set(sides)}
        others = {
            name: file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file() and (name := str(file.relative_to(path))) not in made | {ROOT}
        }
        return cls(msgspec.json.decode((path / ROOT).read_bytes()), blocks, sides, others)

    def copy(self) -> Self:
        """Another one with the same content."""
        return cast(Self, pickle.loads(pickle.dumps(self)))  # faster than `copy.deepcopy`

    def sign(self) -> dict[str, bytes]:
        """Every file of the store by path: all checksums, digests and the fingerprint fit."""
        files, sides = dict(self.others), dict(self.sides)
        for path, blocks in self.blocks.items():
            pages = len(blocks.data) // PAGE_BYTES
            crcs = [
                google_crc32c.value(bytes(blocks.data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]))
                for i in range(pages)
            ]
            sides[crc_path(path)] = np.array(crcs, np.uint32)
            if blocks.data:
                index = shard_index(blocks.geometry, blocks.geometry.num_blocks)
                if blocks.index:
                    index = _with_crc(blocks.index)
                whole = bytes(blocks.data) + index
                files[blocks.shard] = whole[: len(whole) - blocks.cut_bytes]
        for path, values in sides.items():
            if values.size:
                files[f"{path}/c/0"] = _with_crc(values.tobytes())
        with contextlib.suppress(StoreError, msgspec.ValidationError, ArithmeticError, LookupError):
            bound = bound_files(msgspec.convert(self.manifest, Manifest))
            self.manifest["files"] = {name: digest(files.get(name, b"")) for name in bound}
        text = json.dumps(self.manifest)  # as it stands in the document
        self.document["attributes"][FINGERPRINT_KEY] = digest(text.encode())
        files[ROOT] = json.dumps(self.document).encode()
        return {path: raw for path, raw in files.items() if path not in self.deleted}


def _blocks(
    root: Path, shard: str, geometry: BlockGeometry, dtype: np.dtype[Any], relation: int = -1
) -> Blocks:
    size = geometry.num_blocks * geometry.slot_bytes
    raw = (root / shard).read_bytes()[:size] if size else b""
    return Blocks(bytearray(raw), geometry, shard, dtype, relation)


def _with_crc(raw: bytes) -> bytes:
    return raw + crc_bytes(raw)
