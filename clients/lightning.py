"""Lightning's data module over a daemon: ranks from the trainer, states in checkpoints."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

try:
    from lightning import LightningDataModule
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"clients.lightning: found no {error.name}, expected it: "
        'pip install "blockstore[lightning]"',
        name=error.name,
    ) from None

from clients.connection.position import Position
from clients.torch import Fanouts, HeteroDataset, NeighborDataset

__all__ = [
    "GraphDataModule",
]

_USES = ("train", "valid", "test")


class GraphDataModule(LightningDataModule):  # type: ignore[misc]
    """Batches of a daemon's splits; `Trainer.fit(model, datamodule=GraphDataModule(endpoint))`.

    Each rank gets its share of each batch.  A checkpoint holds the position in the epoch: a fit
    that resumes from it begins with the next batch.  Lightning needs no distributed sampler.
    """

    def __init__(
        self,
        endpoint: str,
        num_neighbors: Fanouts = (15, 10),
        batch_size: int = 1000,
        *,
        splits: tuple[str, str, str] = ("train", "valid", "test"),
        input_type: str = "",
        collate: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """`options` are those of a `NeighborDataset`.

        splits      of fit, validation and test
        input_type  node type of the seeds, if the store has several: gives `HeteroBatch`
        collate     function applied to each batch: `clients.pyg.Collate()` gives PyG's records
        """
        super().__init__()
        self._endpoint, self._splits, self._collate = endpoint, splits, collate
        self._num_workers = num_workers
        self._options = options | {
            "num_neighbors": num_neighbors, "batch_size": batch_size, "input_type": input_type
        }  # fmt: skip
        self._datasets: dict[str, Any] = {}
        self._last: Position | None = None  # of the last batch that was trained on

    def setup(self, stage: str) -> None:
        """Datasets of this rank, for all stages; they connect when they are first iterated."""
        del stage
        make = HeteroDataset if self._options["input_type"] else NeighborDataset
        trainer: Any = self.trainer
        for use, split in zip(_USES, self._splits, strict=True):
            if use in self._datasets:  # of an earlier stage
                continue
            self._datasets[use] = make(
                self._endpoint, split, shuffle=use == "train",
                rank=trainer.global_rank, world_size=trainer.world_size, **self._options,
            )  # fmt: skip

    def teardown(self, stage: str) -> None:
        del stage
        for dataset in self._datasets.values():
            dataset.close()

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("valid")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the position; Lightning does not call this for batches only read ahead."""
        del dataloader_idx
        trainer: Any = self.trainer
        if trainer.training:
            self._last = Position(batch.epoch, batch.step)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        if self._last is None:
            return {}
        state: dict[str, Any] = self._datasets["train"].state_dict(self._last)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the last batch that was trained on.  Raises StateMismatch."""
        if state_dict:
            self._datasets["train"].load_state_dict(state_dict)

    def _loader(self, use: str) -> DataLoader[Any]:
        collate: Any = self._collate
        return DataLoader(
            self._datasets[use], batch_size=None, collate_fn=collate or _as_it_is,
            num_workers=self._num_workers,
        )  # fmt: skip


def _as_it_is(batch: Any) -> Any:
    return batch
