"""Chunks against single rows, and models against each other: `python -m tools.hop_accuracy FOLDER`.

Each seed trains every model on batches of random rows (SGD-RR) and of chunks (SGD-CR) from a
daemon; the test accuracy is that of the epoch that was best on valid.  Differences are paired.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from clients.hopwise.dataset import HopDataset
from clients.hopwise.models import ALONE, make_model
from tools.bench.setup import command, serving
from tools.pairs import HOP_ACCURACY, finish, run_each


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained."""

    folder: str
    undirected: bool = False
    operator: str = "sym+loops"
    hops: int = 3
    epochs: int = 40
    batch_size: int = 8000
    hidden: int = 128
    learning_rate: float = 0.01
    dropout: float = 0.3


class Way(NamedTuple):
    """One way to train."""

    model: str
    chunk: int  # 0: single rows
    redeal: int = 0  # epochs

    @property
    def name(self) -> str:
        """As tables name it."""
        how = f"chunks of {self.chunk}" if self.chunk else "rows"
        return f"{self.model}, {how}" + f", redealt every {self.redeal}" * bool(self.redeal)


def split_of(endpoint: str, settings: Settings, split: str) -> tuple[list[Tensor], Tensor]:
    """All rows of a split: tensors by hop, and labels."""
    data = HopDataset(endpoint, split, hops=settings.hops, shuffle=False)
    batches = list(data)
    data.close()
    hops = [torch.cat([b.x[i] for b in batches]) for i in range(settings.hops + 1)]
    return hops, torch.cat([b.y for b in batches if b.y is not None])


def train(settings: Settings, endpoint: str, way: Way, seed: int) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = HopDataset(
        endpoint, "train", hops=settings.hops, batch_size=settings.batch_size,
        method="cr" if way.chunk else "rr", chunk=way.chunk, redeal=way.redeal,
        seed=seed,
    )  # fmt: skip
    held = {split: split_of(endpoint, settings, split) for split in ("valid", "test")}
    classes = 1 + max(int(y.max()) for _, y in held.values())
    width, arrays = held["valid"][0][0].size(1), settings.hops + 1
    model = make_model(way.model, width, arrays, classes, settings.hidden, settings.dropout)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, fused=True)
    own = 1 if way.model in ALONE else arrays
    best = 0.0, 0.0
    for _ in range(settings.epochs):
        model.train()
        for b in data:
            assert b.y is not None
            loss = functional.cross_entropy(model(b.x[:own]), b.y)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            valid, test = (
                100 * float((model(x[:own]).argmax(dim=1) == y).double().mean())
                for x, y in held.values()
            )
        best = max(best, (valid, test))
    steps = len(data)
    data.close()
    return {
        "bench": HOP_ACCURACY, "graph": Path(settings.folder).name, "way": way.name, "seed": seed,
        "accuracy": best[1], "valid": best[0], "steps": steps,
    }  # fmt: skip


def run_all(
    settings: Settings,
    wanted: Sequence[Way],
    seeds: Sequence[int],
    jobs: int,
    done: set[tuple[str, int]],
) -> Iterator[dict[str, Any]]:
    """Every run that is not done, seed by seed."""
    with tempfile.TemporaryDirectory(prefix="hop-accuracy-") as name:
        store = Path(name) / "store"
        extra = ["--undirected"] if settings.undirected else []
        command("preprocess", "ingest", settings.folder, str(store), "--no-summary", *extra)
        base, _, loops = settings.operator.partition("+")
        words = ["--operator", base, "--hops", str(settings.hops)]
        words += ["--self-loops" if loops else "--no-self-loops"]
        command("preprocess", "hops", str(store), *words)
        with serving(store, Path(name), "768M", "--workers", "1", "--readers", "2") as endpoint:
            tasks = (
                (settings, endpoint, way, seed)
                for seed in seeds
                for way in wanted
                if (way.name, seed) not in done
            )
            yield from run_each(train, tasks, jobs)


def main(words: list[str] | None = None) -> str:
    """Run, append lines, print a table a model and return them."""
    default = Settings("")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a graph in the plain layout")
    parser.add_argument("--undirected", action="store_true")
    for name in ("operator", "hops", "epochs", "batch_size", "hidden", "learning_rate", "dropout"):
        value = getattr(default, name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    parser.add_argument(
        "--models", nargs="+", default=["linear", "features", "sgc", "sign", "hoga"]
    )
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 1000, 8000])
    parser.add_argument(
        "--redeal", type=int, default=0, help="the last of them so too, every N epochs"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("hop-accuracy.jsonl"))
    arguments = vars(parser.parse_args(words))
    out, jobs, seeds = (arguments.pop(name) for name in ("out", "jobs", "seeds"))
    models, chunks, redeal = (arguments.pop(name) for name in ("models", "chunks", "redeal"))
    settings = Settings(**arguments)
    tables = []
    for model in models:
        wanted = [Way(model, chunk) for chunk in (0, *chunks)]
        wanted += [Way(model, chunk, redeal) for chunk in chunks[-1:] if redeal]

        def runs(done: set[tuple[str, int]], own: Sequence[Way] = wanted) -> Any:
            return run_all(settings, own, range(seeds), jobs, done)

        tables.append(finish(out.with_stem(f"{out.stem}-{model}"), settings, runs, wanted[0].name))
    return "\n\n".join(tables)


if __name__ == "__main__":
    main()
