"""Whether another library is about to share out batches that are shared out already."""

import sys
from types import FrameType

from loaderd.errors import Refused

_LIBRARY = "accelerate.data_loader"
_SHARING = {"IterableDatasetShard", "DataLoaderDispatcher"}  # each process gets some of the items


def refuse_second_sharding(world_size: int) -> None:
    """Raises Refused: what iterates is Accelerate's wrapper that deals out whole batches.

    world_size   over which the dataset shares each batch itself

    Accelerate wraps any iterable dataset that it prepares for several processes: ranks would get
    every n-th part of their own part, or batches that are cut along the first axis of each tensor.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _LIBRARY:
            kind = type(frame.f_locals.get("self")).__name__
            if kind in _SHARING:
                share = f"is one of {world_size} shares" if world_size > 1 else "is whole"
                raise Refused(
                    f"accelerate's {kind} shares out batches, and each of these {share} already: "
                    "expected a loader that is left alone; give it rank=accelerator.process_index "
                    "and world_size=accelerator.num_processes, and take clients.pyg.NeighborLoader,"
                    " or do not pass it to accelerator.prepare"
                )
        frame = frame.f_back
