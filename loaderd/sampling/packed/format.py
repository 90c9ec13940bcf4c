"""Format of packed epochs on disk: the only code that knows docs/derivations/packed-epochs.md.

A pack is a folder of row arrays, as those of a store are, and `pack.json`, which binds them.
"""

import hashlib
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import NotAStore
from blockstore.format import PAGE_BYTES, RowArray
from blockstore.root import read_digested, write_digested
from loaderd.api.errors import BatchFailed
from loaderd.api.protocol import Resolved
from loaderd.memory.blob import Written, joined
from loaderd.plans.base import Unit, drawn_epoch
from loaderd.sampling.structure import Structure, StructureArrays

PACK, PACK_VERSION = "pack.json", 1
NOWHERE = np.uint32(2**32 - 1)  # place of a node whose type has no rows
_ALIGN = 64  # bytes, of an array in a record
_HEAD = 6  # numbers of a record before those of its hops
_MENDS = "remove the folder, and pack again"


class PackedGroup(msgspec.Struct, frozen=True):
    """Consecutive batches, and the rows that they share."""

    batches: int
    rows: tuple[int, ...]  # of each node type that has rows


class PackedEpoch(msgspec.Struct, frozen=True):
    """Where the batches and rows of one epoch lie in the files of a pack."""

    structure: RowArray  # uint8 (pages, 4096): a record for each batch, beginning on a page
    places: RowArray  # uint8 (pages, 4096): uint32 of each node, by batch, from a page on
    rows: tuple[RowArray, ...]  # of each served array: group by group, each beginning with a block
    pages: tuple[int, ...]  # of the record of each batch
    nodes: tuple[int, ...]  # of each batch
    groups: tuple[PackedGroup, ...]


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """All that a session must know of a pack."""

    format: int
    resolved: Resolved  # its `cycle` is 0
    world_size: int
    block_bytes: int
    dtypes: dict[str, str]  # of `StructureArrays`, by their names
    hot: tuple[int, ...]  # rows of each node type that has rows, which all groups share
    hot_rows: tuple[RowArray, ...]  # of each served array
    epochs: tuple[PackedEpoch, ...]
    files: dict[str, str] = {}  # digests of metadata and checksums, by path in the pack

    def serves(self, resolved: Resolved, epoch: int) -> bool:
        """Whether an epoch of a session has the draws of a packed one."""
        return drawn_epoch(resolved, epoch) < len(self.epochs)

    def arrays(self) -> list[RowArray]:
        found = list(self.hot_rows)
        for epoch in self.epochs:
            found += [epoch.structure, epoch.places, *epoch.rows]
        return found


def packs_folder(store: Path) -> Path:
    """The folder of a store's packs, beside the store."""
    store = store.resolve()
    return store.with_name(f"{store.name}.packs")


_NOT_PACKED = (
    "edge_weights",
    "edge_times",
    "rows",
)  # sessions that ask for these are not served from a pack


def pack_path(store: Path, resolved: Resolved, world_size: int) -> Path:
    """Path of the pack of these parameters, whether or not it exists."""
    bare = msgspec.to_builtins(msgspec.structs.replace(resolved, cycle=0))
    for name in _NOT_PACKED:
        del bare[name]
    raw = msgspec.json.encode((bare, world_size), order="sorted")
    return packs_folder(store) / hashlib.blake2b(raw, digest_size=16).hexdigest()


def write_pack(folder: Path, pack: Pack) -> None:
    """Put `pack.json` into the folder of its arrays."""
    write_digested(folder / PACK, "pack", pack)


def read_pack(folder: Path) -> Pack:
    """Read the `pack.json` of a pack.  Raises NotAStore, UnsupportedVersion, CorruptBlock."""
    path = folder / PACK
    if not path.exists():
        raise NotAStore(f"{folder}: no {PACK}, expected packed epochs")
    return read_digested(path, "pack", Pack, PACK_VERSION, _MENDS)


def page_array(path: str, pages: int, block_bytes: int) -> RowArray:
    """An array whose rows are pages, without gaps."""
    return RowArray(path, "uint8", pages, (PAGE_BYTES,), rows_per_block=block_bytes // PAGE_BYTES)


def num_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES)


def place_pages(nodes: int) -> int:
    """Pages of the places of a batch."""
    return num_pages(4 * nodes)


# -- where a batch is -----------------------------------------------------------------------------


class BatchPlace(NamedTuple):
    """Where a batch of a pack is."""

    epoch: int
    group: int
    record: tuple[int, int]  # pages of its structure: [first, stop)
    places: tuple[int, int]  # pages of its places
    nodes: int


class PackIndex:
    """Finds the batches of a session in its pack."""

    def __init__(self, pack: Pack, resolved: Resolved) -> None:
        """`resolved`: of the session."""
        self.pack, self._resolved = pack, resolved
        self._records: list[list[int]] = []
        self._places: list[list[int]] = []
        self._groups: list[NDArray[np.int64]] = []
        for epoch in pack.epochs:
            self._records.append(_starts(epoch.pages))
            self._places.append(_starts(map(place_pages, epoch.nodes)))
            counts = [group.batches for group in epoch.groups]
            self._groups.append(np.repeat(np.arange(len(counts)), counts))

    def find(self, unit: Unit) -> BatchPlace:
        """Find the batch of a unit of the session's plan.  Raises BatchFailed: it is not there."""
        epoch, step = drawn_epoch(self._resolved, unit.epoch), unit.step
        if epoch >= len(self.pack.epochs):
            raise BatchFailed(f"found epoch {epoch}, expected 0 to {len(self.pack.epochs) - 1}")
        records, places = self._records[epoch], self._places[epoch]
        return BatchPlace(
            epoch, int(self._groups[epoch][step]), (records[step], records[step + 1]),
            (places[step], places[step + 1]), self.pack.epochs[epoch].nodes[step],
        )  # fmt: skip


def _starts(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


# -- records --------------------------------------------------------------------------------------


def array_dtypes(id_dtype: str, edge_id_dtype: str) -> dict[str, str]:
    """Dtypes of `StructureArrays`, by name."""
    found = dict.fromkeys(StructureArrays._fields, "uint32")
    return found | {
        "nodes": id_dtype, "edge_ids": edge_id_dtype, "places": "int64",
        "times": "int64",
    }  # fmt: skip


class Record(NamedTuple):
    """The structure of a batch as it is written."""

    head: NDArray[np.int64]  # its own length, then the structure, then the items of each array
    arrays: list[Written]
    dtypes: list[np.dtype[Any]]  # of the arrays

    @property
    def num_bytes(self) -> int:
        sizes = zip(self.arrays, self.dtypes, strict=True)
        total = sum(_aligned(array.size * dtype.itemsize) for array, dtype in sizes)
        return _aligned(self.head.nbytes) + total


def make_record(structure: Structure, arrays: StructureArrays, dtypes: dict[str, str]) -> Record:
    """`dtypes`: as `array_dtypes` gives them."""
    numbers = [*structure.nodes_per_hop, *structure.frontiers]
    numbers += [count for hop in structure.edges_per_hop for count in hop]
    written = [joined(arrays.nodes), *arrays[1:]]
    own = [structure.num_nodes, structure.num_edges, structure.num_ends]
    hops, relations = len(structure.frontiers), len(structure.edges_per_hop[0])
    head = [0, hops, relations, *own, *numbers, *(array.size for array in written)]
    head[0] = len(head)
    found = [np.dtype(dtypes[name]) for name in StructureArrays._fields]
    return Record(np.array(head, np.int64), written, found)


def write_record(record: Record, out: NDArray[np.uint8]) -> None:
    """Write a record to `out`, of its `num_bytes` or more; the rest becomes zeros."""
    out[:] = 0
    out[: record.head.nbytes] = record.head.view(np.uint8)
    at = _aligned(record.head.nbytes)
    for array, dtype in zip(record.arrays, record.dtypes, strict=True):
        size = array.size * dtype.itemsize
        if size:
            array.write(0, out[at : at + size].view(dtype))
        at += _aligned(size)


def read_record(
    memory: NDArray[np.uint8], dtypes: dict[str, str]
) -> tuple[Structure, StructureArrays]:
    """The structure of a batch, its arrays as views of the record."""
    words = memory[: memory.size // 8 * 8].view(np.int64)
    length, hops, relations = words[:3].tolist()
    num_nodes, num_edges, num_ends, *numbers = words[_HEAD - 3 : length].tolist()
    nodes_per_hop, rest = numbers[: hops + 1], numbers[hops + 1 :]
    frontiers, rest = rest[:hops], rest[hops:]
    edges, sizes = rest[: hops * relations], rest[hops * relations :]
    per_hop = tuple(tuple(edges[h * relations : (h + 1) * relations]) for h in range(hops))
    structure = Structure(
        tuple(nodes_per_hop), per_hop, num_nodes, num_edges, tuple(frontiers),
        sizes[StructureArrays._fields.index("places")], num_ends,
    )  # fmt: skip
    found, at = list[NDArray[Any]](), _aligned(8 * length)
    for name, size in zip(StructureArrays._fields, sizes, strict=True):
        dtype = np.dtype(dtypes[name])
        found.append(memory[at : at + size * dtype.itemsize].view(dtype))
        at += _aligned(size * dtype.itemsize)
    nodes, *others = found
    return structure, StructureArrays((nodes,), *(joined([array]) for array in others))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
