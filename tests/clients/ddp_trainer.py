"""One rank of training runs, which writes down what it trained on: started by torchrun."""

import json
import sys
from pathlib import Path
from typing import Any

from clients.ranks import Ranks, joined
from clients.train import Settings, train


def trained(ranks: Ranks, settings: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """(epoch, step, places of the seeds) of each batch, and a sum of each of the weights."""
    seen: list[Any] = []
    trainer = train(
        Settings(**settings), ranks, lambda b: seen.append([b.epoch, b.step, b.input_id.tolist()])
    )
    return seen, [p.double().sum().item() for p in trainer.model.parameters()]


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
