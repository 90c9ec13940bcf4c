"""Home placement: each rank trains those seeds of the global batch that an owner map gives it."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from clients.torch import Batch, Fanouts, NodeSampledDataset, SeededOptions
from loaderd.api.protocol import HomePlacement


@dataclass(slots=True, repr=False, kw_only=True)
class HomeBatch(Batch):
    """One rank's part of a global batch; it may have no seeds, and no nodes at all."""

    seed_rank: Tensor  # int64 (seeds of all ranks,) rank that trains each, in the batch's order


class HomeDataset(NodeSampledDataset[HomeBatch]):
    """One rank's batches of a store of one node type and relation.

    In a step all ranks together train the global batch of `NeighborDataset`, with the same edges;
    a saved position does not depend on the placement of seeds.
    """

    batch_type, several_types = HomeBatch, "clients.torch.HeteroDataset"

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        num_neighbors: Fanouts = (15, 10, 5),
        batch_size: int = 1000,
        *,
        owners: str,
        time_steps: int = 0,
        **options: Unpack[SeededOptions],
    ) -> None:
        """As `NeighborDataset`; the daemon refuses options that do not go with home placement.

        owners       name of an owner map of the store, with as many owners as ranks
        time_steps   time steps that seeds are merged into by model; 0: each seed stays at home
        frontier     must be "layer"
        """
        super().__init__(endpoint, split, num_neighbors, batch_size, **options)
        self._ask_for(owners=owners, home=HomePlacement(time_steps))

    def set_time_steps(self, time_steps: int) -> None:
        """Set the number of time steps that seeds are merged into by model; between two epochs."""
        home = HomePlacement(time_steps)
        if home != self._request.home:
            self.close()
            self._ask_for(home=home)
