"""Accuracy in pairs: `python -m tools.compare CASE FOLDER [--out FILE]`.

Each seed trains the same model from the same parameters once in every way; only the loader
differs.  Differences to a baseline are paired by seed, with 95 % intervals.  The score is the mean
of tests in the last fifth of the epochs, or that of the epoch that was best on valid (hops).
"""

import math
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from preprocess.errors import BadInput
from tools.bench.setup import command, serving
from tools.command import parse, stamped
from tools.compare.cases import CASES, TrainingRun, Way
from tools.compare.pairs import finish, run_each
from tools.compare.tasks import CompareOptions, ServedStore, TrainingTask


@cache
def task_of(case: str, options: CompareOptions, served: ServedStore) -> TrainingTask:
    return CASES[case].task(options, served)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def train(
    case: str, options: CompareOptions, served: ServedStore, name: str, seed: int
) -> dict[str, Any]:
    """One run, of the way with this name: its line."""
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "Using 'NeighborSampler' without")  # pyg-lib may be missing
    task = task_of(case, options, served)
    way = next(w for w in CASES[case].ways(options) if w.name == name)
    torch.manual_seed(seed)
    model = task.model(*way.model)
    optimizer = torch.optim.Adam(
        model.parameters(), options.learning_rate, weight_decay=options.weight_decay, fused=True
    )
    loader = way.loader(TrainingRun(options, way, seed, served.endpoint, task))
    batches, some = endless(loader), options.steps // options.epochs
    found: list[tuple[float, float]] = []
    for epoch in range(options.epochs):
        model.train()
        if options.cosine:
            share = (1 + math.cos(math.pi * epoch / options.epochs)) / 2
            optimizer.param_groups[0]["lr"] = share * options.learning_rate
        steps = 0
        for batch in islice(batches, some) if some else loader:
            steps += 1
            loss = task.loss(model, batch)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if CASES[case].best or epoch >= options.epochs * 4 // 5:
            with torch.no_grad():
                found.append(task.test(model.eval()))
    data = getattr(loader, "dataset", loader)
    if hasattr(data, "close"):
        data.close()
    score = max(found)[1] if CASES[case].best else fmean(test for _, test in found)
    return stamped(
        "compare", case=case, graph=options.folder.name, way=name, against=way.against, seed=seed,
        accuracy=score, steps=steps,
        settings=asdict(options),
    )  # fmt: skip


def serve_all(
    case: str, options: CompareOptions, wanted: Sequence[Way], stack: ExitStack
) -> dict[tuple[str, ...], ServedStore]:
    """A store and a daemon for each way of ingesting.  Raises BadInput."""
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{case}-")))
    source, served = CASES[case].source(options, work), {}
    for number, ingest in enumerate(dict.fromkeys(way.ingest for way in wanted)):
        (folder := work / f"daemon-{number}").mkdir()
        words = [str(source), str(folder / "store"), "--no-summary", *ingest]
        command("preprocess", "ingest", *words, *["--undirected"] * options.undirected)
        few = ("--workers", "1", "--readers", "2")
        endpoint = stack.enter_context(serving(folder / "store", folder, options.mem, *few))
        served[ingest] = ServedStore(endpoint, folder / "store")
    return served


def main(words: Sequence[str]) -> str:
    """Do the runs that the file of lines lacks; returns the table of all."""
    about = "\n".join(f"  {name:10}{case.about}" for name, case in CASES.items())
    if not words or words[0] not in CASES:
        print(f"{__doc__}\ncases:\n{about}", file=sys.stderr)
        raise SystemExit(2)
    name, case = words[0], CASES[words[0]]
    options = parse(CompareOptions, words[1:], f"tools.compare {name}", case.about, case.defaults)
    begins = tuple(options.ways)
    wanted = [w for w in case.ways(options) if not begins or w.name.startswith(begins)]

    def runs(done: set[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            served = serve_all(name, options, wanted, stack)
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            left = (
                (name, options, served[way.ingest], way.name, seed)
                for seed in seeds
                for way in wanted
                if (way.name, seed) not in done
            )
            yield from run_each(train, left, options.jobs)

    try:
        return finish(options.out, runs)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main(sys.argv[1:])
