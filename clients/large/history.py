"""Historical embeddings: what a layer gave for a node when it last was computed (JOESTAR, GAS).

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
    """What tables are of."""

    store: str  # fingerprint
    model: str
    tables: int  # one for each layer but the last
    num_nodes: int
    width: int
    dtype: str  # of `DTYPES`


class HistoryTables:
    """Rows by (layer, store id), initially zero, in a file that all ranks of a host map.

    The file is working memory: what goes on after a stop is in checkpoints.  One run has it at a
    time.
    """

    def __init__(self, path: str, spec: TableSpec, ranks: Ranks) -> None:
        """Raises ValueError, on all ranks: ranks of several hosts, a file of something else."""
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
        """Make the file, or make it zero again; returns why that cannot be."""
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
        """Let another run have the file."""
        if self._unlock is not None:
            self._unlock()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; the rows are those of the file, not a copy."""
        return {"spec": self.spec._asdict(), "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Go on with tables that were saved.  Raises ValueError: they are of something else."""
        if state["spec"] != self.spec._asdict():
            raise ValueError(
                f"history: the checkpoint has tables of {state['spec']}, expected "
                f"{self.spec._asdict()}; go on with the same options, or without the checkpoint"
            )
        if ranks.rank == 0:
            self.rows.copy_(state["rows"])
        ranks.barrier()


class HistoricalEmbeddings:
    """Brings rows of boundary nodes to the layers of a model, and keeps those of inner nodes.

    All ranks call `begin` and `end` for each large batch.  Each has partitions of its own, so each
    row has one writer.
    """

    def __init__(self, tables: HistoryTables, ranks: Ranks) -> None:
        self.tables, self._ranks = tables, ranks
        self._large: PartitionDraws | None = None
        self._inner = torch.empty(0)
        self._rows: list[Tensor] = []

    @property
    def complete(self) -> bool:
        """Whether the tables have all that was computed: between two large batches."""
        return self._large is None

    def begin(self, large: PartitionDraws) -> None:
        """Pull what the steps of a large batch read."""
        nodes, device = large.whole.num_sampled_nodes, large.inner.device
        self._large = large
        # by the `PLACE` of a node, so row 0 is nobody's; a column, to stand beside rows
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
        """What a layer gives, with the rows of boundary nodes from its table; own ones are kept.

        h       (nodes, width) after the activation, before dropout
        table   number of the layer
        places  int64, of a batch's nodes, as `PLACE` has them
        """
        own, places = self._rows[table], places[: h.size(0)]
        h = torch.where(self._inner[places], h, own[places].to(h.dtype))
        own.index_copy_(0, places, h.detach().to(own.dtype))
        return h

    def ends_with(self, step: int) -> bool:
        """Whether a step is the last one of the large batch."""
        return self._large is not None and step == self._large.last

    def end(self) -> None:
        """All steps of the large batch are trained: push what they computed."""
        large = self._large
        assert large is not None
        self._ranks.barrier()  # all have pulled
        for own, rows in zip(self._rows, self.tables.rows, strict=True):
            (places,) = torch.nonzero(large.written[: own.size(0) - 1], as_tuple=True)
            ids = large.store_id[places].cpu()
            rows[ids] = own[places + 1].to("cpu", rows.dtype)
        self._large, self._rows = None, []
        self._ranks.barrier()  # all have pushed
