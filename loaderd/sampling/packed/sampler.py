"""The structure of packed batches: one record each, read as it is."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES, RowArray
from loaderd.plans.base import Unit
from loaderd.sampling.hyperbatch.session import Sampled, StructureArea
from loaderd.sampling.packed.files import PackFiles, place_of
from loaderd.sampling.packed.format import PackIndex, read_record


class PackedSampler:
    """Reads batches one by one, each into an area of its own."""

    def __init__(self, index: PackIndex, files: PackFiles, data: NDArray[np.uint8]) -> None:
        """`data`: the arena."""
        self._index, self._files, self._data = index, files, data
        self._places: dict[StructureArea, NDArray[np.uint32]] = {}

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """The first of these batches.  Raises CorruptBlock, OSError, BatchFailed."""
        del cancelled
        unit, pack = units[0], self._index.pack
        place, epoch = self._index.find(unit), pack.epochs[self._index.find(unit).epoch]
        record = self._begin(epoch.structure, *place.record, area)
        places = self._begin(epoch.places, *place.places, area)
        if record is None or places is None:
            return []
        structure, arrays = read_record(record, pack.dtypes)
        if structure.num_nodes != place.nodes:
            raise CorruptBlock(
                f"{epoch.structure.path}: batch {unit.step} has {structure.num_nodes} nodes, "
                f"expected {place.nodes}; pack again"
            )
        self._places[area] = places.view(np.uint32)[: place.nodes]
        return [Sampled(first, unit, structure, arrays, area)]

    def places(self, sampled: Sampled) -> NDArray[np.uint32]:
        """Of each node of a batch whose area has not been given back."""
        return self._places[sampled.area]

    def _begin(
        self, array: RowArray, first: int, stop: int, area: StructureArea
    ) -> NDArray[np.uint8] | None:
        """Pages [first, stop), in the area; None: it has no room."""
        memory = area.take(np.uint8, (stop - first) * PAGE_BYTES)
        if memory is None:
            return None
        runs = self._files.pages(array, first, stop)
        ends = np.cumsum(runs[:, 2]) * PAGE_BYTES
        places = place_of(memory, self._data) + ends - runs[:, 2] * PAGE_BYTES
        reading = self._files.begin(array, runs, places)
        try:
            reading.wait()
        finally:
            self._files.ended(array)
        return memory
