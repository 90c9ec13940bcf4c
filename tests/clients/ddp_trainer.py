"""One rank of training runs, which writes down what it trained on: started by torchrun."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn.utils import parameters_to_vector

from clients.ranks import FlatGradients, Ranks, joined
from clients.settings import Settings
from clients.train import AnyBatch, train


def trained(ranks: Ranks, settings: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """(epoch, step, places of the seeds) of each batch, and the weights."""
    seen: list[Any] = []
    trainer = train(
        Settings(**settings), ranks, lambda b: seen.append([b.epoch, b.step, b.input_id.tolist()])
    )
    return seen, parameters_to_vector(trainer.model.parameters()).tolist()


def trained_with_losses(
    ranks: Ranks, settings: dict[str, Any]
) -> tuple[list[Any], list[float], list[float]]:
    """The same, and the mean loss of each step."""
    losses: list[float] = []
    plain = FlatGradients.of_mean

    def noted(self: FlatGradients, loss: Tensor, labelled: Tensor) -> tuple[float, float]:
        found = plain(self, loss, labelled)
        losses.append(found[0] / found[1])
        return found

    with patch.object(FlatGradients, "of_mean", noted):
        return *trained(ranks, settings), losses


def trained_until_killed(ranks: Ranks, settings: dict[str, Any], rank: int, epoch: int = 0) -> None:
    """One rank ends itself at its second batch of an epoch."""

    def observe(batch: AnyBatch) -> None:
        if (ranks.rank, batch.epoch, batch.step) == (rank, epoch, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    train(Settings(**settings), ranks, observe)


def main() -> None:
    """`ddp_trainer.py SETTINGS FOLDER`: one run, then the same one stopped, and gone on with."""
    wanted, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    saved = {"checkpoint": str(folder / "saved")}
    with joined() as ranks:
        whole = trained(ranks, wanted)
        before, _ = trained(ranks, wanted | saved | {"max_steps": 3})
        ranks.barrier()  # rank 0 has saved
        after, weights = trained(ranks, wanted | saved)
        result = {"whole": whole, "stopped": (before + after, weights), "before": len(before)}
        (folder / f"{ranks.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
