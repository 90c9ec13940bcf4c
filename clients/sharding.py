"""Refuse iteration by a library that would shard or collate batches that are complete already."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from loaderd.api.errors import Refused

_LIBRARY = "accelerate.data_loader"
_FETCHER = "torch.utils.data._utils.fetch"
_COLLATE = "torch.utils.data._utils.collate"  # of torch's own collate_fn
_SHARING = {"IterableDatasetShard", "DataLoaderDispatcher"}  # each process gets some of the items


def refuse_second_sharding(world_size: int) -> None:
    """Raises Refused: an Accelerate wrapper iterates, which would distribute complete batches.

    world_size   number of ranks among which the dataset itself divides each batch

    Accelerate wraps any iterable dataset that it prepares for several processes: ranks would get
    every n-th of their own batches, or batches cut along the first axis of each tensor.
    """
    for held in _callers(_LIBRARY):
        kind = type(held.get("self")).__name__
        if kind in _SHARING:
            share = f"is one of {world_size} shares" if world_size > 1 else "is whole"
            raise Refused(
                f"accelerate's {kind} shares out batches, and each of these {share} already: "
                "expected a loader that is left alone; give it rank=accelerator.process_index "
                "and world_size=accelerator.num_processes, and take clients.pyg.NeighborLoader,"
                " or do not pass it to accelerator.prepare"
            )


def refuse_second_batching() -> None:
    """Raises Refused: a DataLoader iterates that would make batches of batches."""
    for held in _callers(_FETCHER):
        collate = getattr(held.get("collate_fn"), "__module__", "")
        if held.get("auto_collation") and collate == _COLLATE:
            raise Refused(
                "DataLoader: found a batch_size, and what the dataset gives are batches: "
                "expected DataLoader(dataset, batch_size=None, ...)"
            )


def _callers(module: str) -> Iterator[dict[str, Any]]:
    """Local variables of each caller on the stack that belongs to `module`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame.f_locals
        frame = frame.f_back
