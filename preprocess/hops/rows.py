"""Which rows of hops are kept, in which order: nodes, their places in the store, their labels."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import NodeType, RowArray
from blockstore.kernels.random import make_key, permute_range
from blockstore.store import Store, read_rows, scan_rows
from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.hops.plan import ALL, ResolvedHops
from preprocess.pipeline.stage import PipelineRun
from preprocess.stages.labels import have_labels
from preprocess.stages.rows import Emit
from preprocess.stages.slots import SlotCopies

NODES, PLACES = "nodes", "places"  # temporary files
_PURPOSE = 0x486F_7073  # of the key: no other draw has it
_STEP = 1 << 16  # rows
_SLOT_BYTES = 40  # of a row while its label is copied

Change = Callable[[NDArray[np.float32], int], NDArray[Any]]  # (rows, first row)


def order_key(seed: int, type_name: str, split: str) -> int:
    """Of the order of rows of a split."""
    name = hashlib.blake2b(f"{type_name}/{split}".encode(), digest_size=8).digest()
    return make_key(seed, _PURPOSE, int.from_bytes(name, "little"), 0, 0)


def choose_rows(store: Store, resolved: ResolvedHops, folder: Path) -> dict[str, list[int]]:
    """Write nodes and places of all rows; returns of each split: rows, nodes left out.

    Raises BadInput: no node of a split has a label; CorruptBlock.
    """
    nodes, found = resolved.nodes, {}
    ids = read_rows(store, nodes.store_id)
    ids -= ids.dtype.type(nodes.first)  # places in the type, by original id
    if ids.size and int(ids.max()) >= nodes.num_nodes:
        raise CorruptBlock(f"{store.path / nodes.store_id.path}: ids of another type; ingest again")
    flags = np.empty(0, np.bool_) if ALL in resolved.sizes else labelled(store, nodes)
    with (
        ArrayFile(folder / NODES, np.int64) as kept_nodes,
        ArrayFile(folder / PLACES, ids.dtype) as kept_places,
    ):
        for split in resolved.sizes:
            key = order_key(resolved.seed, nodes.name, split)
            originals: NDArray[Any] | None = None
            size, left = nodes.num_nodes, 0
            if split != ALL:
                originals, left = _labelled_ids(store, nodes, split, ids, flags)
                size = originals.size
            for first in range(0, size, _STEP):
                order = np.empty(min(_STEP, size - first), np.int64)
                permute_range(first, first + order.size, size, np.uint64(key), order)
                chosen = order if originals is None else originals[order]
                kept_nodes.append(chosen)
                kept_places.append(ids[chosen])
            found[split] = [size, left]
    return found


def labelled(store: Store, nodes: NodeType) -> NDArray[np.bool_]:
    """Whether each node has a label, or one of its row of labels, in the order of the store."""
    assert nodes.label is not None
    flags = np.empty(nodes.num_nodes, np.bool_)
    for first, rows in scan_rows(store, nodes.label):
        flags[first : first + rows.shape[0]] = have_labels(rows)
    return flags


def _labelled_ids(
    store: Store, nodes: NodeType, split: str, places: NDArray[Any], flags: NDArray[np.bool_]
) -> tuple[NDArray[Any], int]:
    """Original ids of the split that have a label, in its order, and how many have none."""
    array = nodes.splits[split]
    out, size = np.empty(array.num_rows, np.int64), 0
    for _, ids in scan_rows(store, array):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < nodes.num_nodes:
            raise CorruptBlock(
                f"{store.path / array.path}: ids {ids.min()} to {ids.max()}, expected 0 to "
                f"{nodes.num_nodes - 1}; ingest again"
            )
        good = ids[flags[places[ids]]]
        out[size : size + good.size] = good
        size += good.size
    if size == 0:
        raise BadInput.at(
            f"{store.path}: split {split!r} of {nodes.name}",
            f"no label among its {array.num_rows:,} nodes", "some that have one",
            "choose other splits by --split, or --rows all",
        )  # fmt: skip
    return out[:size], array.num_rows - size


def copy_labels(
    run: PipelineRun,
    store: Store,
    nodes: NodeType,
    label: RowArray,
    first: int,
    copy_bytes: int,
    emit: Emit,
) -> None:
    """Labels of the rows from `first` on, as many as `label` has, some slots at a time."""
    assert nodes.label is not None
    share = copy_bytes // 4
    step = max(1, share // _SLOT_BYTES)
    with ArrayFile(run.path(PLACES), store.manifest.id_dtype) as places:
        for low in range(0, label.num_rows, step):
            size = min(step, label.num_rows - low)
            kept = places.read(first + low, size).astype(np.uint64) + np.uint64(nodes.first)
            slots = SlotCopies(store, kept, share, run.folder, run.progress)
            some = msgspec.structs.replace(label, num_rows=size)
            slots.rows(nodes.label, nodes.first, some, emit)
