"""What nodes give to others and to themselves, between the two passes of a layer."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.format import RowArray
from blockstore.writer import RowsWriter
from clients.inference.model import Relation
from clients.inference.plan import LayerPlan, Slice
from clients.inference.rows import STEP_ROWS, RowCursor, RowFolder, row_array
from clients.inference.senders import Places
from clients.models import OrderedLayer

Keep = Callable[[Tensor, int], None]  # takes rows of the layer before, and the number of the first


def shared_width(relation: Relation, layer: OrderedLayer) -> int:
    """Numbers of a target that the same node gives as a source, where both are of one type."""
    return layer.shared_width if relation[0] == relation[2] else 0


def target_width(relation: Relation, layer: OrderedLayer) -> int:
    """Numbers of a target, for each part, that pass through a file."""
    return layer.target_width - shared_width(relation, layer)


class Passing:
    """Of one layer: in memory what its plan says, the rest in files of a folder."""

    def __init__(
        self,
        folder: RowFolder,
        plan: LayerPlan,
        dtype: torch.dtype,
        block_bytes: int,
        kept: Relation | None,
        senders: Mapping[Relation, Places],
    ) -> None:
        """`kept`: the relation whose first slice stays in memory until it is joined."""
        self._senders = senders  # relations of which only these sources give anything
        self.folder, self._plan, self._block_bytes, self._kept = folder, plan, block_bytes, kept
        self._dtype, self._torch_dtype = torch.empty(0, dtype=dtype).numpy().dtype, dtype
        self._resident: dict[Relation, Tensor] = {}  # all slices, or the first
        self._sources: dict[Relation, Mapping[Slice, RowArray]] = {}
        self._targets: dict[Relation, Mapping[Slice, RowArray]] = {}

    def take_sources(
        self, held: ExitStack, relation: Relation, layer: OrderedLayer, num_nodes: int
    ) -> list[Keep]:
        """What to call with the rows of all sources of a relation, in order."""
        slices = self._plan.slices
        in_memory = self._plan.resident or relation == self._kept
        width = slices[0].stop if in_memory else 0  # parts of the first slice
        spilled = slices[1:] if in_memory else slices
        name = f"sources{len(self._sources)}"
        places = self._senders.get(relation)
        rows = num_nodes if places is None else int(places[-1])
        arrays = self._sources[relation] = self._arrays(name, rows, layer.source_width, spilled)
        shape = (rows, width, layer.source_width)
        whole = torch.empty(shape, dtype=self._torch_dtype)
        if in_memory:
            self._resident[relation] = whole
        write = self._writing(held, arrays)

        def keep(h: Tensor, first: int) -> None:
            given = layer.sources(h)
            if places is not None:
                step = places[first : first + h.size(0) + 1]
                given, first = given[torch.from_numpy(np.flatnonzero(np.diff(step)))], int(step[0])
            whole[first : first + given.size(0)] = given[:, :width]
            write(given)

        return [keep]

    def take_targets(
        self, held: ExitStack, relation: Relation, layer: OrderedLayer, num_nodes: int
    ) -> list[Keep]:
        """The same with the rows of all targets; none if sources give all that these do."""
        shared, width = shared_width(relation, layer), target_width(relation, layer)
        name = f"targets{len(self._targets)}"
        slices = self._plan.slices if width else ()
        arrays = self._targets[relation] = self._arrays(name, num_nodes, width, slices)
        write = self._writing(held, arrays)

        def keep(h: Tensor, first: int) -> None:
            del first  # they come in order
            write(layer.targets(h)[..., shared:])

        return [keep] if width else []

    def sources(self, relation: Relation, layer: OrderedLayer, some: Slice) -> Tensor:
        """(nodes, parts of a slice, source_width) in memory; of a slice that was kept, once."""
        if self._plan.resident:
            return self._resident[relation]
        if relation in self._resident:
            return self._resident.pop(relation)
        array = self._sources[relation][some]
        out = torch.empty(array.num_rows, array.row_items, dtype=self._torch_dtype)
        rows = out.numpy()
        with RowCursor(self.folder.store, [array], self._dtype) as cursor:
            for first in range(0, array.num_rows, STEP_ROWS):
                piece = rows[first : first + STEP_ROWS]
                piece[:] = cursor.take(piece.shape[0])
        return out.view(array.num_rows, -1, layer.source_width)

    def places(self, relation: Relation, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of these nodes among those that `sources` gives."""
        places = self._senders.get(relation)
        return ids if places is None else places[ids].astype(np.int64)

    def targets(self, relation: Relation, some: Slice) -> RowCursor:
        """What passes through a file, in order; rows of no columns if nothing does."""
        array = self._targets[relation].get(some)
        arrays = () if array is None else (array,)
        return RowCursor(self.folder.store, arrays, self._dtype)

    def sums(self, out: RowArray, number: int) -> RowArray:
        """An array for the rows of `out` when so many relations have been added up."""
        return row_array(
            f"sums{number}/{out.path}", self._dtype, out.num_rows, out.row_items, self._block_bytes
        )

    def _arrays(
        self, name: str, num_nodes: int, width: int, slices: tuple[Slice, ...]
    ) -> dict[Slice, RowArray]:
        return {
            some: row_array(
                f"{name}/columns{some.first}", self._dtype, num_nodes,
                (some.stop - some.first) * width, self._block_bytes,
            )
            for some in slices
        }  # fmt: skip

    def _writing(
        self, held: ExitStack, arrays: Mapping[Slice, RowArray]
    ) -> Callable[[Tensor], None]:
        """What to call with (rows, all parts, width), in order."""
        writers: list[tuple[Slice, RowsWriter]] = [
            (some, held.enter_context(self.folder.write(array))) for some, array in arrays.items()
        ]

        def write(given: Tensor) -> None:
            for some, writer in writers:
                writer.append(given[:, some.first : some.stop].contiguous().numpy())

        return write
