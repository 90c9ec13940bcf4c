"""Stores changed in ways that their checksums do not tell: by what files mean, and blindly.

A small store is read into memory as a draft, changed, and signed again: every checksum fits what
was changed.  `StoreDraft.sign` is the one place that knows which checksums and digests a store has.
"""

import contextlib
import json
import pickle
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self, cast

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.format import (
    BLOCK_HEADER,
    FINGERPRINT_KEY,
    MANIFEST_KEY,
    PAGE_BYTES,
    ROOT,
    BlockGeometry,
    Manifest,
    bound_files,
    columns_of,
    crc_path,
    edges_start_bytes,
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


_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 4095, 4096, 4097, 8192, 65536, 2**20, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**40, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
_TEXTS = (
    "", ".", "..", "/", "../x", "../../../../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b",
    "nodes/../../x", "x" * 300, "x/" * 3000, "\ud7ff", "uint8", "int8", "int64", "uint32", "uint64",
    "float64", "bfloat16", "object", "all", "train", ".extend", "zarr.json", "nodes", "./nodes",
)  # fmt: skip
_FLOATS = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e300, 1e-320)
# of the header of a graph block: name, offset, struct format
_HEADER = (
    ("magic", 0, "<I"), ("version", 4, "<H"), ("flags", 6, "<H"), ("first_node", 8, "<Q"),
    ("last_degree", 16, "<Q"), ("num_nodes", 24, "<I"), ("num_edges", 28, "<I"),
    ("num_carried", 32, "<I"), ("source_bits", 36, "<I"), ("source_base", 40, "<Q"),
)  # fmt: skip


def mutate(draft: StoreDraft, random: Random) -> list[str]:
    """Change a store in place, once or a few times; what was done, a line each."""
    said = []
    for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
        kind = random.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0]
        said.append(f"{kind.__name__}: {kind(draft, random)}")
    return said


def _number(random: Random, old: int) -> int:
    near = (old - 1, old + 1, old * 2, old // 2, old ^ 1 << random.randrange(33), -old)
    return random.choice((*_NUMBERS, *near, *near, *near))


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in plain values."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in pairs:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += _leaves(inner)
    return found


def manifest_value(draft: StoreDraft, random: Random) -> str:
    """One value of the manifest is another."""
    leaves = [
        (inside, key)
        for inside, key in _leaves(draft.manifest)
        if not isinstance(inside[key], dict | list)
    ]
    inside, key = random.choice(leaves)
    old = inside[key]
    if random.random() < 0.15:  # of another kind
        inside[key] = random.choice((None, True, -5, 2**70, 1.5, "", [], {}))
    elif random.random() < 0.25:  # one that stands elsewhere
        same = [a[b] for a, b in leaves if type(a[b]) is type(old)]
        inside[key] = random.choice(same)
    elif isinstance(old, bool) or old is None:
        inside[key] = not old
    elif isinstance(old, int):
        inside[key] = _number(random, old)
    elif isinstance(old, float):
        inside[key] = random.choice((0.0, -1.0, 1e300, 1e-320))
    else:
        inside[key] = random.choice((*_TEXTS, f"../{old}", f"/{old}", f"{old}/..", old[:-1]))
    return f"{key} {old!r:.60} -> {inside[key]!r:.60}"


def manifest_shape(draft: StoreDraft, random: Random) -> str:
    """A part of the manifest is gone, twice there, or another part."""
    inside, key = random.choice(_leaves(draft.manifest))
    how = random.choice(("remove", "swap", "twice", "rename"))
    if how == "twice" and isinstance(inside, list):
        inside.append(inside[key])
    elif how == "swap":
        kind = type(inside[key])
        other, at = random.choice(
            [(a, b) for a, b in _leaves(draft.manifest) if isinstance(a[b], kind)]
        )
        inside[key] = deepcopy(other[at])  # not exchanged: a part may lie in the other
    elif how == "rename" and isinstance(inside, dict):
        inside[random.choice((*_TEXTS, *inside))] = inside.pop(key)
    else:
        del inside[key]
    return f"{how} {key!r:.60}"


def _spoil(values: NDArray[Any], random: Random) -> str:
    """Some of an array's numbers are others."""
    kind = values.dtype
    how = random.choice(("few", "few", "few", "swap", "fill", "shift", "reverse"))
    if how == "few":
        for _ in range(random.choice((1, 1, 2, 5))):
            at = random.randrange(values.size)
            if kind.kind == "f":
                with np.errstate(over="ignore"):
                    values[at] = random.choice(_FLOATS)
            else:
                old = int(values[at])
                values[at] = np.array(_number(random, old) & (1 << 64) - 1, np.uint64).astype(kind)
    elif how == "swap":
        a, b = random.randrange(values.size), random.randrange(values.size)
        values[a], values[b] = values[b], values[a]
    elif how == "fill":
        a = random.randrange(values.size)
        values[a : a + random.choice((1, 8, 1 << 20))] = values[random.randrange(values.size)]
    elif how == "shift":
        values[:] = np.roll(values, random.choice((-1, 1)))
    else:
        values[:] = values[::-1].copy()
    return f"{how} of {values.size} {kind}"


def side_values(draft: StoreDraft, random: Random) -> str:
    """Offsets and tables that are read whole."""
    path = random.choice(sorted(p for p, values in draft.sides.items() if values.size))
    return f"{path}: {_spoil(draft.sides[path], random)}"


def _graphs(draft: StoreDraft) -> list[tuple[str, Blocks]]:
    return [(p, b) for p, b in draft.blocks.items() if b.relation >= 0 and b.data]


def _one_block(draft: StoreDraft, random: Random) -> tuple[str, Blocks, int]:
    """(path, blocks, byte at which a graph block begins)."""
    path, blocks = random.choice(_graphs(draft))
    return path, blocks, random.randrange(blocks.geometry.num_blocks) * blocks.geometry.slot_bytes


def block_header(draft: StoreDraft, random: Random) -> str:
    """A field in the header of a graph block."""
    path, blocks, start = _one_block(draft, random)
    name, at, form = random.choice(_HEADER)
    old = struct.unpack_from(form, blocks.data, start + at)[0]
    new = _number(random, old) & (1 << 8 * struct.calcsize(form)) - 1
    struct.pack_into(form, blocks.data, start + at, new)
    return f"{path}+{start}: {name} {old} -> {new}"


def block_offsets(draft: StoreDraft, random: Random) -> str:
    """Offsets of columns in a graph block."""
    path, blocks, start = _one_block(draft, random)
    count = struct.unpack_from("<I", blocks.data, start + 24)[0] + 1
    room = (blocks.geometry.slot_bytes - BLOCK_HEADER.size) // 4
    offsets = np.frombuffer(blocks.data, np.uint32, min(count, room), start + BLOCK_HEADER.size)
    return f"{path}+{start}: {_spoil(offsets, random)}"


def block_edges(draft: StoreDraft, random: Random) -> str:
    """Sources, edge ids, weights or times in a graph block."""
    path, blocks, start = _one_block(draft, random)
    kind = random.choice(("uint32", "uint32", "uint64", "float32", "int64"))
    count = struct.unpack_from("<I", blocks.data, start + 24)[0]
    begin = min(edges_start_bytes(count), blocks.geometry.slot_bytes - 8)
    size = (blocks.geometry.slot_bytes - begin) // np.dtype(kind).itemsize
    values = np.frombuffer(blocks.data, kind, size, start + begin)
    used = np.flatnonzero(values)
    return f"{path}+{start}: {_spoil(values[: max(1, used.size)], random)}"


def row_values(draft: StoreDraft, random: Random) -> str:
    rows = [(p, b) for p, b in draft.blocks.items() if b.relation < 0 and b.data]
    ids = [(p, b) for p, b in rows if "features" not in p]
    path, blocks = random.choice(ids if random.random() < 0.8 else rows)
    return f"{path}: {_spoil(blocks.values(), random)}"


def blind_bytes(draft: StoreDraft, random: Random) -> str:
    path, blocks = random.choice([(p, b) for p, b in draft.blocks.items() if b.data])
    at = 0
    for _ in range(random.choice((1, 4, 16))):
        at = random.randrange(len(blocks.data))
        piece = random.randbytes(random.choice((1, 2, 4, 8)))[: len(blocks.data) - at]
        blocks.data[at : at + len(piece)] = piece
    return f"{path}+{at}"


def blind_page(draft: StoreDraft, random: Random) -> str:
    """A page of noise, of zeros, or of another array."""
    path, blocks = random.choice([(p, b) for p, b in draft.blocks.items() if b.data])
    _, other = random.choice([(p, b) for p, b in draft.blocks.items() if b.data])
    at = random.randrange(len(blocks.data) // 4096) * 4096
    start = random.randrange(len(other.data) // 4096) * 4096
    pages = (random.randbytes(4096), bytes(4096), bytes(other.data[start : start + 4096]))
    blocks.data[at : at + 4096] = random.choice(pages)
    return f"{path}+{at}"


def fewer_blocks(draft: StoreDraft, random: Random) -> str:
    """Blocks at the end are gone; everything that counts them may say so, or not."""
    path, blocks = random.choice([(p, b) for p, b in draft.blocks.items() if b.data])
    geometry = blocks.geometry
    lost = random.randint(1, geometry.num_blocks)
    left = geometry.num_blocks - lost
    del blocks.data[left * geometry.slot_bytes :]
    blocks.geometry = geometry._replace(num_blocks=left, blocks_per_shard=max(1, left))
    told = random.random() < 0.7
    for inside, _ in _leaves(draft.manifest) if told else ():
        if isinstance(inside, dict) and inside.get("path") == path:
            if "num_blocks" in inside:
                inside["num_blocks"] = left
                for name in ("first_node_path", "first_edge_path"):
                    kept = draft.sides[inside[name]]
                    size = left + 1
                    end = kept[-1] if random.random() < 0.5 else kept[left]
                    draft.sides[inside[name]] = np.append(kept[: size - 1], end)
            else:
                inside["num_rows"] = left * geometry.rows_per_block
            break
    return f"{path}: {lost} of {geometry.num_blocks}, told: {told}"


def shard_bytes(draft: StoreDraft, random: Random) -> str:
    """A shard's index says something else, or its end is missing."""
    path, blocks = random.choice([(p, b) for p, b in draft.blocks.items() if b.data])
    if random.random() < 0.5:
        blocks.cut_bytes = random.choice((1, 4, 8, 4096, 2**20))
        return f"{path}: {blocks.cut_bytes} bytes cut"
    index = np.arange(2 * blocks.geometry.num_blocks, dtype=np.uint64)
    blocks.index = (index * np.uint64(random.choice((1, 4096)))).tobytes()
    return f"{path}: index"


def other_file(draft: StoreDraft, random: Random) -> str:
    """A file is gone, or leads elsewhere."""
    paths = [b.shard for b in draft.blocks.values()] + [f"{p}/c/0" for p in draft.sides]
    path = random.choice(sorted(paths))
    if random.random() < 0.3:
        draft.deleted.add(path)
        return f"{path}: deleted"
    to = random.choice(("/etc/passwd", "/dev/zero", "/proc/self/mem", *sorted(paths)))
    draft.links[path] = to if to.startswith("/") else "../" * path.count("/") + to
    return f"{path} -> {draft.links[path]}"


def outside_copy(draft: StoreDraft, random: Random) -> str:
    """A file leads to one outside that is just as it was, `OUTSIDE` in the store's parent."""
    paths = [b.shard for b in draft.blocks.values()] + [f"{p}/c/0" for p in draft.sides]
    path = random.choice(sorted(paths))
    draft.links[path] = "../" * path.count("/") + "../outside/" + path
    return f"{path} -> {draft.links[path]}"


Mutation = Callable[[StoreDraft, Random], str]
KINDS: tuple[tuple[Mutation, int], ...] = (
    (manifest_value, 24), (manifest_shape, 8), (side_values, 16), (block_header, 12),
    (block_offsets, 8), (block_edges, 10), (row_values, 12), (blind_bytes, 4), (blind_page, 3),
    (fewer_blocks, 3), (shard_bytes, 1), (other_file, 1), (outside_copy, 1),
)  # fmt: skip
