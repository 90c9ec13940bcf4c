"""Runs in pairs: one line each in a file, so that none is run twice, and the table of them all."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tools.machine import machine, today

CONTEXT = get_context("spawn")  # a run's threads are its own
HOP_ACCURACY = "accuracy on hops"  # what lines of `tools.hop_accuracy` are

Runs = Callable[[set[tuple[str, int]]], Iterable[dict[str, Any]]]  # those that are not done


def run_each(
    train: Callable[..., dict[str, Any]], tasks: Iterable[tuple[Any, ...]], jobs: int
) -> Iterator[dict[str, Any]]:
    """`train(*task)` of each task, begun in their order, in processes of their own; as they end."""
    with ProcessPoolExecutor(jobs, mp_context=CONTEXT) as pool:
        for future in as_completed([pool.submit(train, *task) for task in tasks]):
            yield future.result()


_T_95 = {  # two-sided, by degrees of freedom
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23,
    11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13, 19: 2.09, 24: 2.06, 29: 2.05,
}  # fmt: skip


def interval(pairs: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of two differences or more."""
    t = _T_95[max(k for k in _T_95 if k <= len(pairs) - 1)]
    return t * statistics.stdev(pairs) / float(len(pairs) ** 0.5)


def summarize(lines: Sequence[dict[str, Any]], baseline: str) -> str:
    """A Markdown table: accuracy of each way, and its paired difference to the baseline."""
    runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        runs[line["way"]][line["seed"]] = line
    table = [
        f"| way | accuracy | against {baseline} | 95 % | pairs | steps an epoch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    base = runs.get(baseline, {})
    for way, by_seed in runs.items():
        mean = statistics.fmean(r["accuracy"] for r in by_seed.values())
        steps = next(iter(by_seed.values()))["steps"]
        pairs = [r["accuracy"] - base[s]["accuracy"] for s, r in by_seed.items() if s in base]
        cells = ["", "", ""]
        if way != baseline and len(pairs) > 1:
            mean_of = f"{statistics.fmean(pairs):+.2f}"
            cells = [mean_of, f"± {interval(pairs):.2f}", str(len(pairs))]
        table.append(f"| {way} | {mean:.2f} | {' | '.join(cells)} | {steps} |")
    return "\n".join(table)


def finish(out: Path, settings: Any, runs: Runs, baseline: str) -> str:
    """Do the runs that `out` has not, append them, and return the table of all, printed."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for line in runs({(line["way"], line["seed"]) for line in lines}):
        lines.append(line)
        with out.open("a") as file:
            stamp = {"date": today(), "machine": machine(), "settings": asdict(settings)}
            file.write(json.dumps(line | stamp) + "\n")
        found = f"{line['way']}, seed {line['seed']}: {line['accuracy']:.2f} points"
        print(found, file=sys.stderr, flush=True)
    table = summarize(lines, baseline)
    print(table)
    return table
