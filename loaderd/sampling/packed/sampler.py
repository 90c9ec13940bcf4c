"""Structures of packed batches: one record each, read as it is, several at a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES, RowArray
from blockstore.io.reading import Reading, wait_all
from loaderd.plans.base import Unit
from loaderd.sampling.hyperbatch.areas import AreaFull, Sampled, StructureArea
from loaderd.sampling.packed.files import PackFiles, place_of
from loaderd.sampling.packed.format import BatchPlace, PackIndex, read_record


class PackedSampler:
    """Reads the records of several batches together, as they may have to wait for reads of rows."""

    def __init__(self, index: PackIndex, files: PackFiles, data: NDArray[np.uint8]) -> None:
        """`data`: the arena, uint8, into which records are read."""
        self._index, self._files, self._data = index, files, data
        # of the batches in each area, by their numbers
        self._places: dict[StructureArea, dict[int, NDArray[np.uint32]]] = {}

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """Read as many of the first units as the area holds.

        Raises CorruptBlock, OSError, BatchFailed.
        """
        del cancelled
        pack, coming, readings = self._index.pack, list[_Coming](), list[Reading]()
        arrays = list[RowArray]()
        try:
            for unit in units:
                place = self._index.find(unit)
                epoch = pack.epochs[place.epoch]
                try:
                    record = area.take(np.uint8, _size(place.record))
                    places = area.take(np.uint8, _size(place.places))
                except AreaFull:
                    break
                for array, pages, memory in (
                    (epoch.structure, place.record, record), (epoch.places, place.places, places),
                ):  # fmt: skip
                    readings.append(self._begin(array, pages, memory))
                    arrays.append(array)
                coming.append(_Coming(unit, place, record, places))
        finally:
            try:
                wait_all(readings)
            finally:
                for array in arrays:
                    self._files.ended(array)
        found = [self._sampled(one, first + i, area) for i, one in enumerate(coming)]
        self._places[area] = {
            first + i: one.places.view(np.uint32)[: one.place.nodes] for i, one in enumerate(coming)
        }
        return found

    def _sampled(self, one: "_Coming", batch: int, area: StructureArea) -> Sampled:
        pack = self._index.pack
        structure, arrays = read_record(one.record, pack.dtypes)
        if structure.num_nodes != one.place.nodes:
            raise CorruptBlock(
                f"{pack.epochs[one.place.epoch].structure.path}: batch {one.unit.step} has "
                f"{structure.num_nodes} nodes, expected {one.place.nodes}; pack again"
            )
        return Sampled(batch, one.unit, structure, arrays, area)

    def places(self, sampled: Sampled) -> NDArray[np.uint32]:
        """Places of the nodes of a batch whose area has not been given back."""
        return self._places[sampled.area][sampled.batch]

    def _begin(self, array: RowArray, pages: tuple[int, int], memory: NDArray[np.uint8]) -> Reading:
        """Begin to read pages [first, stop) of an array into a piece of the arena."""
        runs = self._files.pages(array, *pages)
        ends = np.cumsum(runs[:, 2]) * PAGE_BYTES
        places = place_of(memory, self._data) + ends - runs[:, 2] * PAGE_BYTES
        return self._files.begin(array, runs, places)


class _Coming(NamedTuple):
    """A batch that is being read."""

    unit: Unit
    place: BatchPlace
    record: NDArray[np.uint8]
    places: NDArray[np.uint8]


def _size(pages: tuple[int, int]) -> int:
    return (pages[1] - pages[0]) * PAGE_BYTES
