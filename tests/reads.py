"""Reads of the block reader that tests watch, or have fail."""

from collections.abc import Callable
from typing import Any

import pytest

from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES
from blockstore.io import reader
from blockstore.kernels.reads import PAGE, SHARD

Meet = Callable[[int, int], None]  # a descriptor and an offset in it that are read


def one_by_one(meet: Meet, read_pieces: Any) -> Callable[..., int]:
    """`read_pieces`, which reads piece after piece and first says so: one fails if that raises."""

    def read(queue: Any, fds: Any, pieces: Any, *arguments: Any) -> int:
        failed = []
        for i in range(len(pieces)):
            try:
                meet(int(fds[pieces[i, SHARD]]), int(pieces[i, PAGE]) * PAGE_BYTES)
            except (OSError, CorruptBlock):
                failed.append(True)
            else:
                read_pieces(queue, fds, pieces[i : i + 1], *arguments)
                failed.append(bool(queue.failed[0]))
        queue.failed[: len(failed)] = failed
        return len(failed)

    return read


def watch_reads(patch: pytest.MonkeyPatch, meet: Meet) -> None:
    """Have `meet` called before every read, first ones and second ones; what it raises fails it."""
    verified = reader.read_verified

    def read_again(fd: int, data: Any, offset: int, *arguments: Any) -> None:
        meet(fd, offset)
        verified(fd, data, offset, *arguments)

    patch.setattr(reader, "read_pieces", one_by_one(meet, reader.read_pieces))
    patch.setattr(reader, "read_verified", read_again)
