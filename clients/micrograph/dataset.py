"""Home batches: each rank trains the seeds of the global batch that it owns by an owner map."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from clients.torch import Batch, Fanouts, NodeSampledDataset, SeededOptions
from loaderd.api.protocol import HomePlacement


@dataclass(slots=True, repr=False, kw_only=True)
class HomeBatch(Batch):
    """What one rank trains of a global batch; there may be no seeds, and no nodes at all."""

    seed_rank: Tensor  # int64 (seeds of all ranks,) which rank trains each, in the batch's order


class HomeDataset(NodeSampledDataset[HomeBatch]):
    """The batches of a rank, of a store of one node type and relation.

    In a step all ranks together train the global batch of `NeighborDataset`, with the same edges;
    which of its seeds a rank gets does not change a saved position.
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
        """As `NeighborDataset`; what cannot be placed at home, the daemon refuses.

        owners       name of an owner map of the store, with as many owners as ranks
        time_steps   seeds are merged by model into so many time steps; 0: each stays at home
        frontier     "layer"
        """
        super().__init__(endpoint, split, num_neighbors, batch_size, **options)
        self._ask_for(owners=owners, home=HomePlacement(time_steps))

    def set_time_steps(self, time_steps: int) -> None:
        """Between two epochs: merge by model into another number of time steps from now on."""
        home = HomePlacement(time_steps)
        if home != self._request.home:
            self.close()
            self._ask_for(home=home)
