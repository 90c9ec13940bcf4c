"""Rows of packed epochs: hot rows stay, those of a few groups at a time are read in order."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray, row_geometry
from blockstore.io.reading import Reading, wait_all
from blockstore.kernels.rows import PlacedRows, address_places
from loaderd.plans.base import Unit
from loaderd.sampling.hyperbatch.entries import Needs
from loaderd.sampling.hyperbatch.regions import TypeRows
from loaderd.sampling.packed.files import PackFiles
from loaderd.sampling.packed.format import Pack, PackIndex

_Key = tuple[int, int]  # epoch, group


class PackGeometry:
    """How many slots the rows of a pack take."""

    def __init__(self, pack: Pack, types: Sequence[TypeRows]) -> None:
        self._pack, self.types = pack, types
        self.type_of = {i: n for n, t in enumerate(types) for i in t.served}  # of a served array
        self.per_block = [
            row_geometry(array, pack.block_bytes).rows_per_block for array in pack.hot_rows
        ]

    def blocks(self, rows: Sequence[int]) -> list[int]:
        """Blocks of each served array, given the rows of each type."""
        return [-(-rows[self.type_of[i]] // per) for i, per in enumerate(self.per_block)]

    @property
    def hot_slots(self) -> int:
        return sum(self.blocks(self._pack.hot))

    @property
    def max_blocks(self) -> list[int]:
        """Blocks of each served array in the group that has most of them."""
        found = [self.blocks(g.rows) for e in self._pack.epochs for g in e.groups]
        return [max(counts) for counts in zip(*found, strict=True)] if self.per_block else []


class _Part(NamedTuple):
    """Rows of one array, on their way."""

    array: RowArray
    reading: Reading


@dataclass(eq=False)
class _Area:
    """Slots for the rows of one group."""

    slots: list[NDArray[np.int64]]  # of each served array
    key: _Key | None = None
    last: int = -1  # the last batch of the run that uses it
    coming: list[_Part] = field(default_factory=list)


class PackedRows:
    """Brings rows in for a session of packed epochs, in place of a row cache.

    The gather thread of the session brings groups in, workers look rows up.
    """

    def __init__(
        self,
        index: PackIndex,
        files: PackFiles,
        geometry: PackGeometry,
        slot_bytes: int,
        hot: Sequence[int],
        areas: Sequence[Sequence[int]],
    ) -> None:
        """Bring nothing yet; `hot`, `areas`: slots, as `geometry` says."""
        self._index, self._pack, self._files = index, index.pack, files
        self._geometry, self._slot_bytes = geometry, slot_bytes
        self._hot = _Area(_shared_out(hot, geometry.blocks(self._pack.hot)))
        maximum = geometry.max_blocks
        self._areas = [_Area(_shared_out(slots, maximum)) for slots in areas]
        self._firsts = [self._first_blocks(e) for e in range(len(self._pack.epochs))]
        self.rows_wanted = self.rows_read = self.pages_read = self.runs_read = 0
        self.stay_rows, self.stay_read = sum(self._pack.hot), 0

    def _first_blocks(self, epoch: int) -> list[list[int]]:
        """The first block of each group in each served array."""
        found = [[0] * len(self._geometry.per_block)]
        for group in self._pack.epochs[epoch].groups:
            counts = self._geometry.blocks(group.rows)
            found.append([first + n for first, n in zip(found[-1], counts, strict=True)])
        return found

    # -- by the gather thread ---------------------------------------------------------------------

    def begin_run(self) -> None:
        """Batches are numbered from 0 again; rows stay."""
        for area in self._areas:
            area.last = -1

    def age(self) -> None:
        """A group begins; here nothing is evicted by age."""

    def count_fitting(self, batches: Sequence[Needs]) -> int:
        """Batches are brought in one by one; the group of one may be there already."""
        return min(1, len(batches))

    def bring(
        self, group: Sequence[Needs], later: Sequence[Needs], oldest: Callable[[int], int]
    ) -> None:
        """Bring in the rows of a batch's group, and begin to read the next one if there is room.

        Raises CorruptBlock, OSError, and what `oldest` raises.
        """
        del later
        if self._hot.key is None:
            self._begin(self._hot, (0, -1))
        for needs in group:
            assert needs.unit is not None
            place = self._index.find(needs.unit)
            key = place.epoch, place.group
            area = self._find(key)
            if area is None:
                area = self._released(oldest)
                self._begin(area, key)
            self._finish(area)
            area.last = needs.batch
            self.rows_wanted += place.nodes
            self._read_ahead(area, key, oldest(-1))
        self._finish(self._hot)
        self.stay_read = self.stay_rows

    def _find(self, key: _Key) -> _Area | None:
        return next((area for area in self._areas if area.key == key), None)

    def _released(self, oldest: Callable[[int], int]) -> _Area:
        """The least recently used area, as soon as nobody needs it."""
        area = min(self._areas, key=lambda a: (a.last, a.key is not None))
        known = oldest(-1)
        while known <= area.last:
            known = oldest(known)
        return area

    def _read_ahead(self, current: _Area, key: _Key, known: int) -> None:
        """Begin to read the group after this one, if an area is free; it is wanted next."""
        epoch, group = key[0], key[1] + 1
        if group >= len(self._pack.epochs[epoch].groups) or self._find((epoch, group)) is not None:
            return
        free = [a for a in self._areas if a is not current and a.last < known and not a.coming]
        if free:
            area = min(free, key=lambda a: (a.last, a.key is not None))
            self._begin(area, (epoch, group))
            area.last = -1

    def _begin(self, area: _Area, key: _Key) -> None:
        """Begin to read a group's rows into an area that nobody needs; group -1: those that stay.

        Raises CorruptBlock, OSError.
        """
        self._drop(area)
        epoch, group = key
        if group < 0:
            arrays, rows = self._pack.hot_rows, self._pack.hot
            firsts = [0] * len(arrays)
        else:
            arrays = self._pack.epochs[epoch].rows
            rows = self._pack.epochs[epoch].groups[group].rows
            firsts = self._firsts[epoch][group]
        for i, array in enumerate(arrays):
            count = rows[self._geometry.type_of[i]]
            runs = self._files.blocks(array, firsts[i], count)
            places = area.slots[i][: len(runs)] * self._slot_bytes
            area.coming.append(_Part(array, self._files.begin(array, runs, places)))
            self.rows_read += count
            self.pages_read += int(runs[:, 2].sum())
            self.runs_read += len(runs)
        area.key = key

    def _finish(self, area: _Area) -> None:
        """Wait for an area's rows.  Raises CorruptBlock, OSError: then the area holds nothing."""
        coming, area.coming = area.coming, []
        try:
            wait_all(part.reading for part in coming)
        except BaseException:
            area.key = None
            raise
        finally:
            for part in coming:
                self._files.ended(part.array)

    def _drop(self, area: _Area) -> None:
        """Drop what an area holds or is to hold."""
        with contextlib.suppress(Exception):  # whoever wants it reads it again, and is told
            self._finish(area)
        area.key = None

    def close(self) -> None:
        """Drop all rows, after all that is being read has come."""
        for area in (self._hot, *self._areas):
            self._drop(area)

    # -- looking up -------------------------------------------------------------------------------

    def address(
        self, served: int, unit: Unit, places: NDArray[np.uint32], out: NDArray[np.uint64]
    ) -> None:
        """Arena byte offsets of the rows of one served array, for a batch brought in."""
        place = self._index.find(unit)
        area = self._find((place.epoch, place.group))
        assert area is not None
        group = self._pack.epochs[place.epoch].groups[place.group]
        number, hot = self._geometry.type_of[served], self._pack.hot
        rows = PlacedRows(
            _bounds(hot, number, 0), _bounds(group.rows, number, sum(hot)),
            self._hot.slots[served], area.slots[served], self._geometry.per_block[served],
            self._pack.hot_rows[served].row_bytes, self._slot_bytes,
        )  # fmt: skip
        address_places(places, rows, out)


def _bounds(rows: Sequence[int], number: int, base: int) -> tuple[int, int]:
    """Places of a type's rows: types follow each other."""
    starts = list(accumulate(rows, initial=base))
    return starts[number], starts[number + 1]


def _shared_out(slots: Sequence[int], counts: Sequence[int]) -> list[NDArray[np.int64]]:
    """Slots for each array."""
    ends = list(accumulate(counts, initial=0))
    return [np.array(slots[low:high], np.int64) for low, high in pairwise(ends)]
