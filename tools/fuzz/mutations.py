"""Change stores in ways that checksums do not reveal: by the meaning of files, and blindly.

A small store is read into memory as a draft, changed, and signed again, so that every checksum is
valid.  `StoreDraft.sign` is the one place that knows which checksums and digests a store has.
"""

import contextlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self, cast

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
    blocked_arrays,
    bound_files,
    crc_path,
    edges_start_bytes,
    shard_path,
    side_arrays,
)
from blockstore.kernels.crc import page_crcs
from blockstore.root import digest
from blockstore.store import crc_bytes, numpy_dtype, open_store, shard_index
from tools.fuzz.values import FLOATS, change_shape, change_value, leaves, number

_NUM_NODES = 6  # index of this word in a graph block's header


@dataclass(slots=True)
class Blocks:
    """The blocks of one array, all in one shard."""

    data: bytearray
    geometry: BlockGeometry
    shard: str  # path of the file in the store
    dtype: np.dtype[Any] | None  # of its rows; None: graph blocks

    def values(self) -> NDArray[Any]:
        """All rows as numbers of the dtype, to be changed in place."""
        size = len(self.data) // self.dtype.itemsize if self.dtype else 0
        return np.frombuffer(self.data, self.dtype, size)


@dataclass(slots=True)
class StoreDraft:
    """The contents of a store's files, without checksums."""

    document: dict[str, Any]  # the root's zarr.json
    blocks: dict[str, Blocks]  # by path of the array
    sides: dict[str, NDArray[Any]]  # by path; without page checksums
    others: dict[str, bytes]  # all other files, by path
    links: dict[str, str] = field(default_factory=dict)  # path -> target of a symlink there
    deleted: set[str] = field(default_factory=set)

    @property
    def manifest(self) -> Any:
        return self.document["attributes"][MANIFEST_KEY]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a store whose arrays have one shard each."""
        store = open_store(path)
        manifest = store.manifest
        dtypes = {array.path: numpy_dtype(array.dtype) for array in manifest.row_arrays()}
        blocks: dict[str, Blocks] = {}
        for name, geometry, ndim in blocked_arrays(manifest):
            shard, size = shard_path(name, 0, ndim), geometry.num_blocks * geometry.slot_bytes
            raw = (path / shard).read_bytes()[:size] if size else b""
            blocks[name] = Blocks(bytearray(raw), geometry, shard, dtypes.get(name))
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
        """A copy that can be damaged without changing this one."""
        return cast(Self, pickle.loads(pickle.dumps(self)))  # faster than `copy.deepcopy`

    def sign(self) -> dict[str, bytes]:
        """Every file of the store by path, with valid checksums, digests and fingerprint."""
        files, sides = dict(self.others), dict(self.sides)
        for path, blocks in self.blocks.items():
            crcs = sides[crc_path(path)] = np.empty(len(blocks.data) // PAGE_BYTES, np.uint32)
            page_crcs(np.frombuffer(blocks.data, np.uint8), crcs.size, crcs)
            if blocks.data:
                index = shard_index(blocks.geometry, blocks.geometry.num_blocks)
                files[blocks.shard] = bytes(blocks.data) + index
        for path, values in sides.items():
            if values.size:
                files[f"{path}/c/0"] = (raw := values.tobytes()) + crc_bytes(raw)
        with contextlib.suppress(StoreError, msgspec.ValidationError, ArithmeticError, LookupError):
            bound = bound_files(msgspec.convert(self.manifest, Manifest))
            self.manifest["files"] = {name: digest(files.get(name, b"")) for name in bound}
        text = json.dumps(self.manifest)  # as it stands in the document
        self.document["attributes"][FINGERPRINT_KEY] = digest(text.encode())
        files[ROOT] = json.dumps(self.document).encode()
        return {path: raw for path, raw in files.items() if path not in self.deleted}


def mutate(draft: StoreDraft, random: Random) -> list[str]:
    """Change a store in place, once or a few times; returns a line for each change."""
    said = []
    for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
        kind = random.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0]
        said.append(f"{kind.__name__}: {kind(draft, random)}")
    return said


def manifest_value(draft: StoreDraft, random: Random) -> str:
    return change_value(draft.manifest, random)


def manifest_shape(draft: StoreDraft, random: Random) -> str:
    return change_shape(draft.manifest, random)


def _spoil(values: NDArray[Any], random: Random) -> str:
    """Change some of an array's numbers."""
    kind = values.dtype
    how = random.choice(("few", "few", "few", "swap", "fill", "shift", "reverse"))
    if how == "few":
        for _ in range(random.choice((1, 1, 2, 5))):
            at = random.randrange(values.size)
            if kind.kind == "f":
                with np.errstate(over="ignore"):
                    values[at] = random.choice(FLOATS)
            else:
                new = number(random, int(values[at])) & (1 << 64) - 1
                values[at] = np.array(new, np.uint64).astype(kind)
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


def array_values(draft: StoreDraft, random: Random) -> str:
    """Change offsets, tables that are read whole, or rows (rarely those of features)."""
    rows = {p: b.values() for p, b in draft.blocks.items() if b.dtype and b.data}
    if random.random() >= 0.1:
        rows = {path: values for path, values in rows.items() if "features" not in path}
    some = draft.sides | rows
    path = random.choice(sorted(p for p, values in some.items() if values.size))
    return f"{path}: {_spoil(some[path], random)}"


def _some_blocks(draft: StoreDraft, random: Random, graph: bool = False) -> tuple[str, Blocks]:
    """A random array that has blocks, with its path."""
    return random.choice(
        [(p, b) for p, b in draft.blocks.items() if b.data and not (graph and b.dtype)]
    )


def graph_block(draft: StoreDraft, random: Random) -> str:
    """Change a graph block's header, its column offsets, or its values of edges."""
    path, blocks = _some_blocks(draft, random, graph=True)
    size = blocks.geometry.slot_bytes
    start = random.randrange(blocks.geometry.num_blocks) * size
    words = np.frombuffer(blocks.data, np.uint32, size // 4, start)
    head, columns = BLOCK_HEADER.size // 4, int(words[_NUM_NODES])
    part = random.choices(("header", "offsets", "edges"), (12, 8, 10))[0]
    if part == "header":
        values: NDArray[Any] = words[:head]
    elif part == "offsets":
        values = words[head : head + columns + 1]
    else:  # sources, edge ids, weights or times
        values = words[min(edges_start_bytes(columns) // 4, words.size - 2) :]
        kind = random.choice(("uint32", "uint32", "uint64", "float32", "int64"))
        values = values[: values.size // 2 * 2].view(kind)
        values = values[: max(1, np.count_nonzero(values))]
    return f"{path}+{start}: {part}, {_spoil(values, random)}"


def blind_bytes(draft: StoreDraft, random: Random) -> str:
    """Overwrite a few bytes, or a page, with noise, zeros, or data of another array."""
    (path, blocks), (_, other) = _some_blocks(draft, random), _some_blocks(draft, random)
    size = random.choice((1, 4, 16, PAGE_BYTES))
    at, start = (random.randrange(len(b.data) // size) * size for b in (blocks, other))
    pieces = (random.randbytes(size), bytes(size), bytes(other.data[start : start + size]))
    blocks.data[at : at + size] = random.choice(pieces)
    return f"{path}+{at}: {size} bytes"


def fewer_blocks(draft: StoreDraft, random: Random) -> str:
    """Remove blocks at the end; mostly, but not always, adjust all counts of them."""
    path, blocks = _some_blocks(draft, random)
    geometry = blocks.geometry
    lost = random.randint(1, geometry.num_blocks)
    left = geometry.num_blocks - lost
    del blocks.data[left * geometry.slot_bytes :]
    blocks.geometry = geometry._replace(num_blocks=left, blocks_per_shard=max(1, left))
    told = random.random() < 0.7
    for inside, key in leaves(draft.manifest) if told else ():
        if key != "path" or inside[key] != path:
            continue
        if "num_blocks" not in inside:
            inside["num_rows"] = left * geometry.rows_per_block
            continue
        inside["num_blocks"] = left
        for name in ("first_node_path", "first_edge_path"):
            kept = draft.sides[inside[name]]
            end = kept[-1] if random.random() < 0.5 else kept[left]
            draft.sides[inside[name]] = np.append(kept[:left], end)
    return f"{path}: {lost} of {geometry.num_blocks}, told: {told}"


def other_file(draft: StoreDraft, random: Random) -> str:
    """Delete a file, or replace it by a link elsewhere, such as to an intact copy outside."""
    paths = sorted([b.shard for b in draft.blocks.values()] + [f"{p}/c/0" for p in draft.sides])
    path = random.choice(paths)
    if random.random() < 0.2:
        draft.deleted.add(path)
        return f"{path}: deleted"
    copy = f"../outside/{path}"
    to = random.choice(("/etc/passwd", "/dev/zero", "/proc/self/mem", copy, copy, *paths))
    draft.links[path] = to if to.startswith("/") else "../" * path.count("/") + to
    return f"{path} -> {draft.links[path]}"


Mutation = Callable[[StoreDraft, Random], str]
KINDS: tuple[tuple[Mutation, int], ...] = (
    (manifest_value, 24), (manifest_shape, 8), (array_values, 28), (graph_block, 30),
    (blind_bytes, 7), (fewer_blocks, 3), (other_file, 2),
)  # fmt: skip
