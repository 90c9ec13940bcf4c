"""The file of `loaderd presample`: how often nodes are sampled, counted over some epochs.

A line of JSON, padded to 64 bytes, then uint32 (hops + 1, nodes), by store id: how often each node
is expanded at each hop, then in how many batches it is.
"""

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.io.files import flush, naming

_ALIGN, _HEAD_BYTES = 64, 1 << 20
_FORMAT = 1


class Expansions(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled, and what is counted."""

    fingerprint: str  # of the store
    num_nodes: int
    fanouts: tuple[int, ...]  # seeds outward; -1 is all
    batch_size: int
    frontier: str
    seeds: str  # as `Resolved.seeds`
    seed: int
    epochs: int  # that are counted
    steps: int  # of all these epochs
    format: int = _FORMAT
    digest: str = ""  # of the counts

    def layers(self, hop: int) -> int:
        """Layers of a model that use the edges of a hop."""
        return len(self.fanouts) - hop if self.frontier == "new" else 1


def write_expansions(path: Path, found: Expansions, counts: NDArray[np.uint32]) -> None:
    """Write a file, in place of an earlier one: whole, or not at all.

    counts   uint32 (hops + 1, nodes)

    Raises OutOfSpace.
    """
    found = msgspec.structs.replace(found, digest=_digest(counts))
    head = msgspec.json.encode(found)
    head = head.ljust((len(head) // _ALIGN + 1) * _ALIGN - 1) + b"\n"
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with naming(fresh, len(head) + counts.nbytes), fresh.open("wb") as file:
            file.write(head)
            file.write(counts.data)
        flush(fresh)
        fresh.rename(path)
        flush(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def read_expansions(path: Path) -> tuple[Expansions, NDArray[np.uint32]]:
    """Read a file; its counts are mapped, uint32 (hops + 1, nodes), not to be changed.

    Raises CorruptBlock, OSError.
    """
    with path.open("rb") as file:
        head = file.readline(_HEAD_BYTES)
    try:
        found = msgspec.json.decode(head, type=Expansions)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBlock(
            f"{path}: {error}, expected a file of `loaderd presample`; make it again"
        ) from error
    shape = len(found.fanouts) + 1, found.num_nodes
    size = len(head) + 4 * shape[0] * shape[1]
    if found.format != _FORMAT or path.stat().st_size != size or not shape[1]:
        raise CorruptBlock(
            f"{path}: format {found.format}, {path.stat().st_size} bytes, expected format "
            f"{_FORMAT}, {size} bytes; make it again with `loaderd presample`"
        )
    counts: NDArray[np.uint32] = np.memmap(path, np.uint32, "r", len(head), shape)
    if _digest(counts) != found.digest:
        raise CorruptBlock(
            f"{path}: digest {_digest(counts)}, expected {found.digest!r}; the file was changed: "
            "make it again with `loaderd presample`"
        )
    return found, counts


def _digest(counts: NDArray[np.uint32]) -> str:
    return hashlib.blake2b(counts.data, digest_size=16).hexdigest()
