"""What nodes give to others and to themselves, between the two passes of a layer."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from blockstore.format import RowArray
from blockstore.writer import RowsWriter
from clients.inference.model import Relation
from clients.inference.plan import LayerPlan, Slice
from clients.inference.rows import STEP_ROWS, RowCursor, RowFolder, row_array
from clients.models import OrderedLayer

Keep = Callable[[Tensor, int], None]  # takes rows of the layer before, and the number of the first


class Passing:
    """Of one layer: in memory what its plan says, the rest in files of a folder."""

    def __init__(
        self, folder: RowFolder, plan: LayerPlan, dtype: torch.dtype, block_bytes: int
    ) -> None:
        self.folder, self._plan, self._block_bytes = folder, plan, block_bytes
        self._dtype, self._torch_dtype = torch.empty(0, dtype=dtype).numpy().dtype, dtype
        self._resident: dict[Relation, Tensor] = {}
        self._sources: dict[Relation, list[RowArray]] = {}
        self._targets: dict[Relation, list[RowArray]] = {}

    def take_sources(
        self, held: ExitStack, relation: Relation, layer: OrderedLayer, num_nodes: int
    ) -> Keep:
        """What to call with the rows of all sources of a relation, in order."""
        if not self._plan.resident:
            arrays = self._arrays(f"sources{len(self._sources)}", num_nodes, layer.source_width)
            self._sources[relation] = arrays
            return self._writing(held, arrays, layer.sources)
        shape = (num_nodes, layer.parts, layer.source_width)
        whole = self._resident[relation] = torch.empty(shape, dtype=self._torch_dtype)

        def keep(h: Tensor, first: int) -> None:
            whole[first : first + h.size(0)] = layer.sources(h)

        return keep

    def take_targets(
        self, held: ExitStack, relation: Relation, layer: OrderedLayer, num_nodes: int
    ) -> Keep:
        """The same with the rows of all targets."""
        arrays = self._arrays(f"targets{len(self._targets)}", num_nodes, layer.target_width)
        self._targets[relation] = arrays
        return self._writing(held, arrays, layer.targets)

    def sources(self, relation: Relation, layer: OrderedLayer, number: int) -> Tensor:
        """(nodes, parts of a slice, source_width) in memory."""
        if self._plan.resident:
            return self._resident[relation]
        array = self._sources[relation][number]
        out = torch.empty(array.num_rows, array.row_items, dtype=self._torch_dtype)
        rows = out.numpy()
        with RowCursor(self.folder.store, [array], self._dtype) as cursor:
            for first in range(0, array.num_rows, STEP_ROWS):
                some = rows[first : first + STEP_ROWS]
                some[:] = cursor.take(some.shape[0])
        return out.view(array.num_rows, -1, layer.source_width)

    def targets(self, relation: Relation, number: int) -> RowCursor:
        return RowCursor(self.folder.store, [self._targets[relation][number]], self._dtype)

    def sums(self, out: RowArray, number: int) -> RowArray:
        """An array for the rows of `out` when so many relations have been added up."""
        return row_array(
            f"sums{number}/{out.path}", self._dtype, out.num_rows, out.row_items, self._block_bytes
        )

    def _arrays(self, name: str, num_nodes: int, width: int) -> list[RowArray]:
        """One for each slice."""
        return [
            row_array(
                f"{name}/columns{i}", self._dtype, num_nodes, (some.stop - some.first) * width,
                self._block_bytes,
            )
            for i, some in enumerate(self._plan.slices)
        ]  # fmt: skip

    def _writing(
        self, held: ExitStack, arrays: list[RowArray], give: Callable[[Tensor], Tensor]
    ) -> Keep:
        writers: list[tuple[Slice, RowsWriter]] = [
            (some, held.enter_context(self.folder.write(array)))
            for some, array in zip(self._plan.slices, arrays, strict=True)
        ]

        def keep(h: Tensor, first: int) -> None:
            del first  # they come in order
            given = give(h)
            for some, writer in writers:
                writer.append(given[:, some.first : some.stop].contiguous().numpy())

        return keep
