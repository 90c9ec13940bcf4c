"""Paired runs: a line for each in a file, so that none is repeated, and a table of all."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.command import append, read_lines, table

CONTEXT = get_context("spawn")  # each run has threads of its own

Runs = Callable[[set[tuple[str, int]]], Iterable[dict[str, Any]]]  # takes those that are done


def run_each(
    train: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], jobs: int
) -> Iterator[Any]:
    """Yield `train(*task)` of each task as it ends, `jobs` at a time, in processes if several."""
    if jobs == 1:
        yield from starmap(train, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=CONTEXT) as pool:
        for future in as_completed([pool.submit(train, *task) for task in tasks]):
            yield future.result()


def interval(differences: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of two or more differences."""
    from scipy import stats  # takes a second of CPU, and most runs only train

    return float(stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences))


def summarize(lines: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: the accuracy of each way, and its paired difference to its baseline."""
    runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        runs[line["way"]][line["seed"]] = line
    rows = [["way", "accuracy", "against", "difference", "95 %", "pairs", "steps an epoch"]]
    for way, by_seed in runs.items():
        first = next(iter(by_seed.values()))
        base = runs.get(first["against"], {}) if way != first["against"] else {}
        pairs = [r["accuracy"] - base[s]["accuracy"] for s, r in by_seed.items() if s in base]
        cells = ["", "", "", ""]
        if pairs:
            half = f"± {interval(pairs):.2f}" if len(pairs) > 1 else ""
            cells = [first["against"], f"{fmean(pairs):+.2f}", half, str(len(pairs))]
        mean = fmean(r["accuracy"] for r in by_seed.values())
        rows.append([way, f"{mean:.2f}", *cells, str(first["steps"])])
    return table(rows)


def finish(out: Path, runs: Runs) -> str:
    """Do the runs that `out` lacks, append them, print the table of all, and return it."""
    lines = read_lines(out)
    for line in runs({(line["way"], line["seed"]) for line in lines}):
        lines.append(line)
        append([line], out)
        found = f"{line['way']}, seed {line['seed']}: {line['accuracy']:.2f} points"
        print(found, file=sys.stderr, flush=True)
    made = summarize(lines)
    print(made)
    return made
