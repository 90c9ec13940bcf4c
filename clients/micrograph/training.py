"""Training with home placement: what `clients.train --placement home` does in each iteration."""

import time
from typing import Any, NamedTuple, Protocol, Self

from torch.optim import Optimizer

from clients.micrograph.dataset import HomeBatch, HomeDataset
from clients.micrograph.merging import MergeSearch
from clients.micrograph.updates import Averaging, HomeUpdates, LossOf
from clients.ranks import FlatGradients, Ranks

AUTO = "auto"  # in place of a number of time steps
MERGES = ("server", "model")
MIGRATE = ("never", "always")


class HomeSettings(Protocol):
    """Settings of a training command, as a user gives them."""

    @property
    def parts(self) -> str: ...
    @property
    def merge(self) -> str: ...
    @property
    def migrate(self) -> str: ...
    @property
    def sync_every(self) -> int: ...


class HomeOptions(NamedTuple):
    """How models visit the owners of their seeds."""

    time_steps: int  # of an iteration; 0: they are searched for
    by_model: bool  # seeds of time steps that are left out go to others of their model
    averaging: Averaging

    @classmethod
    def of(cls, wanted: HomeSettings, num_ranks: int) -> Self:
        """Raises ValueError: options that do not go together."""
        parts, merge, migrate = wanted.parts, wanted.merge, wanted.migrate
        steps = 0 if parts == AUTO else int(parts) if parts.isascii() and parts.isdigit() else -1
        if parts != AUTO and not 1 <= steps <= num_ranks:
            raise ValueError(
                f"parts {parts!r}: expected 1 to {num_ranks}, the number of ranks, or {AUTO!r}"
            )
        if wanted.sync_every < 1:
            raise ValueError(f"sync_every {wanted.sync_every}: expected 1 or more")
        several = f"sync_every {wanted.sync_every}"
        if wanted.sync_every > 1 and merge != "model":
            raise ValueError(
                f"{several}, merge {merge!r}: expected merge 'model', as each model takes steps on "
                "its own seeds alone; give --merge model"
            )
        if wanted.sync_every > 1 and migrate != "always":
            raise ValueError(
                f"{several}, migrate {migrate!r}: expected 'always', as models differ between two "
                "averages; give --migrate always"
            )
        if migrate == "always" and steps == 1:
            raise ValueError(
                "migrate 'always', parts '1': expected several time steps, between which models "
                "travel; give --parts 2 or more, or leave --migrate out"
            )
        return cls(steps, merge == "model", Averaging(wanted.sync_every, migrate == "always"))


class HomeTraining:
    """Iterations of one rank, and the search for the number of their time steps."""

    def __init__(
        self,
        options: HomeOptions,
        data: HomeDataset,
        gradients: FlatGradients,
        optimizer: Optimizer,
        ranks: Ranks,
    ) -> None:
        """All ranks make theirs at the same time."""
        self._options, self._data, self._ranks = options, data, ranks
        self._updates = HomeUpdates(gradients, optimizer, ranks, options.averaging)
        self._search: MergeSearch | None = None
        if not options.time_steps:
            self._search = MergeSearch(ranks.world_size, time.monotonic)

    @property
    def time_steps(self) -> int:
        return self._options.time_steps if self._search is None else self._search.time_steps

    @property
    def averaged(self) -> bool:
        """All ranks have the same model."""
        return self._updates.averaged

    def begin_epoch(self) -> None:
        """On all ranks, before batches of an epoch are read."""
        if self._options.by_model:
            self._data.set_time_steps(self.time_steps)
            self._ranks.barrier()  # the stream of the epoch before has nobody who reads it
            self._data.attached()
            self._ranks.barrier()  # who comes later may not find a place in their stream
        if self._search is not None:
            self._search.begin_epoch()

    def update(self, batch: HomeBatch, loss_of: LossOf) -> tuple[float, int]:
        """One iteration: as `HomeUpdates.take`."""
        last = batch.step == len(self._data) - 1
        kept = self._ranks.world_size if self._options.by_model else self.time_steps
        found = self._updates.take(batch, kept, loss_of, last)
        if last and self._search is not None:
            self._search.end_epoch()
            self._agree(self._search)
        return found

    def _agree(self, search: MergeSearch) -> None:
        """Clocks differ: rank 0 decides."""
        first = self._ranks.rank == 0
        steps, ended = self._ranks.total(search.time_steps * first, search.ended * first)
        search.time_steps, search.ended = int(steps), bool(ended)

    def state_dict(self) -> dict[str, Any]:
        """Where the search stands."""
        return {} if self._search is None else self._search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A search begins from scratch if none was asked for when the state was saved."""
        if self._search is not None and state:
            self._search.load_state_dict(state)
