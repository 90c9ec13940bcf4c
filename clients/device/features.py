"""Whole feature blocks of a store on a device: rows of a type, in the order of the store."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockstore.format import RowArray
from blockstore.io.gds import DeviceReader
from blockstore.store import BlockedFile, FileRange, open_store, scan_blocks
from clients.device.devices import BY_HOST
from loaderd.errors import Refused

AT_ONCE = 64 << 20  # bytes of blocks


class FeatureRows(NamedTuple):
    """Rows of consecutive nodes of a type."""

    first: int  # store id, within the type, of row 0
    rows: Tensor  # (rows, *row_shape) on the device
    read_by: str  # what brought them


def load_features(
    store: Path | str,
    name: str = "x",
    device: torch.device | str = "cuda",
    node_type: str = "",
    blocks: range | None = None,
    by_host: bool = False,
) -> FeatureRows:
    """Blocks of a row array of a local store, past any daemon, to `device`.

    name        of the array; "original_id" and "store_id" are the maps between the ids of users
                and the places of rows: row `i` belongs to original id `original_id[first + i]`
    node_type   "" where the store has one
    blocks      consecutive ones; None: all
    by_host     read through the host, every page verified, also where kvikio could

    On a GPU kvikio brings them where it is installed: then nothing is verified, and `read_by`
    says so.  Raises Refused: there is no such type, array or block; StoreError.
    """
    opened, device = open_store(Path(store)), torch.device(device)
    types = [t for t in opened.manifest.types if node_type in ("", t.name)]
    if len(types) != 1:
        there = ", ".join(t.name for t in opened.manifest.types)
        raise Refused(f"node_type {node_type!r}: expected one of {there}")
    arrays = {**types[0].features, "original_id": types[0].original_id}
    arrays |= {"store_id": types[0].store_id}
    if types[0].label is not None:
        arrays["y"] = types[0].label
    array = arrays.get(name)
    if array is None:
        raise Refused(f"{store}: array {name!r}, expected one of {', '.join(arrays)}")
    file = opened.rows(array)
    geometry = file.geometry
    wanted = range(geometry.num_blocks) if blocks is None else blocks
    if wanted.step != 1 or wanted.start < 0 or wanted.stop > geometry.num_blocks:
        raise Refused(f"blocks {wanted}: expected consecutive ones of 0 to {geometry.num_blocks}")
    first = wanted.start * geometry.rows_per_block
    count = max(0, min(array.num_rows, wanted.stop * geometry.rows_per_block) - first)
    out = torch.empty((count, array.row_bytes), dtype=torch.uint8, device=device)
    reader = None if by_host or device.type == "cpu" else _kvikio()
    step = max(1, AT_ONCE // geometry.slot_bytes)
    for low in range(wanted.start, wanted.stop, step):
        part = range(low, min(low + step, wanted.stop))
        raw = _by_host(file, part) if reader is None else _by_kvikio(reader, file, part, device)
        _unpack(raw, array, geometry.rows_per_block, out, part.start - wanted.start)
    how = BY_HOST if reader is None else reader.how
    if reader is not None:
        reader.close()
    kind = torch.bfloat16 if array.dtype == "bfloat16" else getattr(torch, array.dtype)
    return FeatureRows(first, out.view(kind).view(count, *array.row_shape), how)


def _kvikio() -> DeviceReader | None:
    try:
        return DeviceReader()
    except RuntimeError:  # not installed, or it finds no driver
        return None


def _by_host(file: BlockedFile, part: range) -> Tensor:
    """uint8 (blocks, slot_bytes); every page verified."""
    raw = np.empty((len(part), file.geometry.slot_bytes), np.uint8)
    for first, blocks in scan_blocks(file, start=part.start, stop=part.stop):
        raw[first - part.start : first - part.start + len(blocks)] = blocks
    return torch.from_numpy(raw)


def _by_kvikio(
    reader: DeviceReader, file: BlockedFile, part: range, device: torch.device
) -> Tensor:
    geometry = file.geometry
    raw = torch.empty((len(part), geometry.slot_bytes), dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()  # kvikio knows no order: the memory is free
    ranges, per_shard = [], geometry.blocks_per_shard
    for shard in range(part.start // per_shard, -(-part.stop // per_shard)):
        low, high = max(part.start, shard * per_shard), min(part.stop, (shard + 1) * per_shard)
        offset = (low - shard * per_shard) * geometry.slot_bytes
        ranges.append(FileRange(file.shards[shard], offset, (high - low) * geometry.slot_bytes))
    reader.read(ranges, raw.view(-1))
    return raw


def _unpack(raw: Tensor, array: RowArray, per_block: int, out: Tensor, block: int) -> None:
    """Rows without what is left of each slot behind them."""
    first = block * per_block
    count = min(out.size(0) - first, raw.size(0) * per_block)
    rows = raw[:, : per_block * array.row_bytes].reshape(-1, array.row_bytes)
    out[first : first + count] = rows[:count].to(out.device)
