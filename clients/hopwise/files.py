"""Hop-wise batches out of a store's files, read by this process: the daemon brings nothing."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray
from blockstore.io.gds import HostReader
from blockstore.store import BlockedFile, FileRange, open_store
from clients.batch import numpy_dtype
from clients.connection.buffers import Memory
from clients.hopwise.batch import LABEL, NODES, HopBatch, hop_batch, row_tensor
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attached
from loaderd.plans.chunks import HopPlan


class _File:
    def __init__(self, array: RowArray, file: BlockedFile) -> None:
        self.array, self.file, self.reader = array, file, HostReader(file)

    def ranges(self, rows: NDArray[np.int64]) -> list[FileRange]:
        """Where ranges of rows lie, int64 (ranges, 2)."""
        width = self.array.row_bytes
        return [r for a, b in rows.tolist() for r in self.file.row_ranges(width, a, b)]


class FileReader:
    """Reads the batches of one session; of `epoch`, which is set before."""

    def __init__(self, folder: Path, plan: HopPlan, attached: Attached, memory: Memory) -> None:
        """Raises Refused: these are not the files that the daemon serves; StoreError."""
        store, resolved = open_store(folder), attached.resolved
        if store.manifest.fingerprint != resolved.fingerprint:
            raise Refused(
                f"{folder}: the store has fingerprint {store.manifest.fingerprint}, expected "
                f"{resolved.fingerprint}, that of the store which the daemon serves"
            )
        found = next(t for t in store.manifest.types if t.name == resolved.seed_type)
        hops = found.hops[resolved.seeds.removeprefix("split:")]
        self.epoch = 0
        self._plan, self._memory = plan, memory
        self._files: dict[str, _File] = {}
        for spec in attached.rows:
            operator, _, hop = spec.name.rpartition(":")
            array = {LABEL: hops.label, NODES: hops.nodes}.get(spec.name)
            array = hops.operators[operator][int(hop)] if array is None else array
            self._files[spec.name] = _File(array, store.rows(array))

    def read(self, step: int) -> HopBatch:
        """The batch of a step.  Raises CorruptBlock, OSError."""
        unit = self._plan.unit(self.epoch, step)
        rows = self._plan.ranges(unit)
        num = unit.num_seeds
        input_id = self._memory.empty((num,), np.int64)
        self._plan.rows(unit, input_id)
        arrays = {
            name: row_tensor(name, self._read(name, rows, num), file.array.dtype)
            for name, file in self._files.items()
        }
        return hop_batch(arrays, input_id, self.epoch, step)

    def close(self) -> None:
        for file in self._files.values():
            file.reader.close()

    def _read(self, name: str, rows: NDArray[np.int64], num: int) -> NDArray[Any]:
        file = self._files[name]
        array, ranges = file.array, file.ranges(rows)
        shape, dtype = (num, *array.row_shape), numpy_dtype(array)
        if name not in (LABEL, NODES):
            return self._memory.filed(ranges, file.reader.read, shape, dtype)
        out = self._memory.empty(shape, dtype)
        file.reader.read(ranges, out.reshape(-1).view(np.uint8))
        return out
