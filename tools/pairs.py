"""Runs in pairs: one line each in a file, so that none is run twice, and the table of them all."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.accuracy import T_95
from tools.machine import machine, today

Runs = Callable[[set[tuple[str, int]]], Iterable[dict[str, Any]]]  # those that are not done


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
            error = statistics.stdev(pairs) / len(pairs) ** 0.5
            t = T_95[max(k for k in T_95 if k <= len(pairs) - 1)]
            cells = [f"{statistics.fmean(pairs):+.2f}", f"± {t * error:.2f}", str(len(pairs))]
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
        print(f"{line['way']}, seed {line['seed']}: {line['accuracy']:.2f}", file=sys.stderr)
    table = summarize(lines, baseline)
    print(table)
    return table
