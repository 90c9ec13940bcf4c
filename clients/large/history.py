"""Historical embeddings: a layer's last computed output for each node (JOESTAR, GAS).

Source: Fey, Lenssen, Weichert and Leskovec, GNNAutoScale: Scalable and Expressive Graph Neural
Networks via Historical Embeddings, ICML 2021.
"""

import fcntl
import json
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clients.large.batch import PartitionDraws
from clients.ranks import Ranks

DTYPES = ("float32", "float16")
_HEADER = 4096  # bytes: JSON, then spaces


class TableSpec(NamedTuple):
    """What determines the tables in a file."""

    store: str  # fingerprint
    model: str
    tables: int  # one for each layer except the last
    num_nodes: int
    width: int
    dtype: str  # of `DTYPES`


class HistoryTables:
    """Rows by (layer, store id), initially zero, in a file that all ranks of a host map.

    The file is working memory: the state to resume from is in checkpoints.  Only one run may use
    it at a time.
    """

    def __init__(self, path: str, spec: TableSpec, ranks: Ranks) -> None:
        """Raises ValueError, on all ranks: ranks on several hosts, a file with other contents."""
        self.spec, self._path = spec, path
        self._unlock: Callable[[], object] | None = None  # of rank 0
        ranks.refuse_different(
            f"history {path}, mapped by ranks of several hosts", socket.gethostname()
        )
        refused = ranks.of_first(self._create() if ranks.rank == 0 else "")
        if refused:
            self.close()
            raise ValueError(refused)
        shape = (spec.tables, spec.num_nodes, spec.width)
        self.rows = torch.from_numpy(np.memmap(path, spec.dtype, "r+", _HEADER, shape))

    def _create(self) -> str:
        """Create the file, or zero it; returns an error message, or ""."""
        where, header = f"history {self._path}", json.dumps(self.spec._asdict()).encode()
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            self._unlock = weakref.finalize(self, os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.pread(file, _HEADER, 0).rstrip()
            if found not in (b"", header):
                return (
                    f"{where}: found {found[:300].decode(errors='replace')!r}, expected tables of "
                    f"{header.decode()!r}; give another path"
                )
            os.ftruncate(file, 0)
            os.pwrite(file, header.ljust(_HEADER), 0)
            numbers = self.spec.tables * self.spec.num_nodes * self.spec.width
            os.posix_fallocate(file, 0, _HEADER + numbers * np.dtype(self.spec.dtype).itemsize)
        except BlockingIOError:
            return f"{where}: found that another run has it, expected to have it alone; wait for it"
        except OSError as error:
            return f"{where}: {error.strerror}, expected a file that can be written; give another"
        return ""

    def close(self) -> None:
        """Unlock the file for another run."""
        if self._unlock is not None:
            self._unlock()

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`; its rows are the mapped file, not a copy."""
        return {"spec": self.spec._asdict(), "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Restore saved tables.  Raises ValueError: their `TableSpec` differs."""
        if state["spec"] != self.spec._asdict():
            raise ValueError(
                f"history: the checkpoint has tables of {state['spec']}, expected "
                f"{self.spec._asdict()}; go on with the same options, or without the checkpoint"
            )
        if ranks.rank == 0:
            self.rows.copy_(state["rows"])
        ranks.barrier()


class HistoricalEmbeddings:
    """Supplies rows of boundary nodes to a model's layers, and records those of inner nodes.

    All ranks call `begin` and `end` for each large batch.  Each has partitions of its own, so
    each row has one writer.
    """

    def __init__(self, tables: HistoryTables, ranks: Ranks) -> None:
        self.tables, self._ranks = tables, ranks
        self._large: PartitionDraws | None = None
        self._inner = torch.empty(0)
        self._rows: list[Tensor] = []

    @property
    def complete(self) -> bool:
        """Whether the tables are up to date: between two large batches."""
        return self._large is None

    def begin(self, large: PartitionDraws) -> None:
        """Pull the rows that the steps of a large batch read."""
        nodes, device = large.whole.num_sampled_nodes, large.inner.device
        self._large = large
        # indexed by `PLACE`, so row 0 is unused; a column, to broadcast over rows
        self._inner = torch.cat([large.inner.new_zeros(1), large.inner])[:, None]
        self._rows = []
        for table, (places, rows) in enumerate(zip(large.pull, self.tables.rows, strict=True)):
            # layer l = table + 1 gives the nodes up to hop L - l
            room = 1 + sum(nodes[: len(nodes) - 1 - table])
            own = torch.zeros(room, self.tables.spec.width, device=device)
            ids = large.store_id[places].cpu()
            own[places + 1] = rows[ids].to(device, own.dtype)
            self._rows.append(own)

    def __call__(self, h: Tensor, table: int, places: Tensor) -> Tensor:
        """A layer's output with boundary rows from its table; records the rows of inner nodes.

        h       (nodes, width) after the activation, before dropout
        table   number of the layer
        places  int64, the `PLACE` of a batch's nodes
        """
        own, places = self._rows[table], places[: h.size(0)]
        h = torch.where(self._inner[places], h, own[places].to(h.dtype))
        own.index_copy_(0, places, h.detach().to(own.dtype))
        return h

    def ends_with(self, step: int) -> bool:
        """Whether a step is the last one of the large batch."""
        return self._large is not None and step == self._large.last

    def end(self) -> None:
        """After all steps of the large batch: push the rows that they computed."""
        large = self._large
        assert large is not None
        self._ranks.barrier()  # until all ranks have pulled
        for own, rows in zip(self._rows, self.tables.rows, strict=True):
            (places,) = torch.nonzero(large.written[: own.size(0) - 1], as_tuple=True)
            ids = large.store_id[places].cpu()
            rows[ids] = own[places + 1].to("cpu", rows.dtype)
        self._large, self._rows = None, []
        self._ranks.barrier()  # until all ranks have pushed
