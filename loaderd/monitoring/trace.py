"""A record of what hyperbatches needed, for an offline look at other policies (`tools.replay`).

A file of records, each int64 (kind, run, number, count) and then `count` ids, int64:

ROWS   number: of the group        the nodes of one batch of the group, by store id
BLOCKS number: of the relation     the graph blocks that one pass needed, in ascending order
STAGE  number: into STAGES         when the stage began and ended, ns of a steady clock; serving a
                                   macro-batch: from its first use until the last has ended
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency

ROWS, BLOCKS, STAGE = 0, 1, 2
STAGES = ("sample", "bring in", "hand out", "read macro-batch", "serve macro-batch")
READ_MACRO, SERVE_MACRO = 3, 4


class Trace:
    """Writes records; any thread may."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._lock = concurrency.Lock()

    def write(self, kind: int, run: int, number: int, ids: NDArray[Any]) -> None:
        head = np.array([kind, run, number, ids.size], np.int64)
        with self._lock:
            if not self._file.closed:
                self._file.write(head.tobytes())
                self._file.write(ids.astype(np.int64).tobytes())

    def close(self) -> None:
        with self._lock:
            self._file.close()
