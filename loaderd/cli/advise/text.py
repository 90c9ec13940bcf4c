"""Advice as people and as scripts read it."""

from typing import Any

import msgspec

from blockstore.units import format_bytes
from loaderd.cli.advise.report import Line, Report
from loaderd.monitoring.report import table

_HEADER = (
    "plan", "batches", "batches/s", "epoch s", "read an epoch", "MB/s", "cores", "first batch s",
)  # fmt: skip


def advice_text(report: Report) -> str:
    """The advice, how it was measured, a table of the plans, and what is to be said of them."""
    name = f"{report.plan}, {report.options}" if report.options else report.plan
    pages = [f"advice: {name}: {report.reason}" if name else report.reason]
    if report.hops is not None:
        pages.append(f"advice for hop-wise batches: {report.hops.text}")
    rows = [_HEADER, *(_row(line) for line in report.lines)]
    pages += [
        "",
        f"each plan served for {report.seconds:g} s within --mem {format_bytes(report.mem_bytes)}, "
        f"on {report.cores} cores; an epoch at the pace of the second half of that time",
        "", *table(rows, frozenset({2, 3, 4, 5, 6, 7})), "",
    ]  # fmt: skip
    pages += [f"{line.name}: {line.note}" for line in report.lines if line.note]
    pages += [f"{line.name} cannot run: {line.refused}" for line in report.lines if line.refused]
    if not any(line.batches == "others" for line in report.lines):
        pages.append(
            "macrobatch: the store is not partitioned; `blockstore repartition STORE NEW "
            "--partitions 64` makes one that is"
        )
    if report.auto:
        pages.append(f"plan auto takes {report.auto}: the same batches as minibatch")
    if report.split is not None:
        pages += ["", report.split.text]
    return "\n".join(pages)


def _row(line: Line) -> tuple[str, ...]:
    trial = line.trial
    if trial is None:
        return (line.name, line.batches, "cannot run", *["-"] * 5)
    return (
        line.name, line.batches, f"{trial.batches / trial.seconds:.3g}", f"{trial.epoch_s:.3g}",
        format_bytes(trial.epoch_bytes), f"{trial.num_bytes / trial.seconds / 1e6:.0f}",
        f"{trial.cores:.1f}", f"{trial.first_s:.2f}",
    )  # fmt: skip


def advice_json(report: Report) -> str:
    """The same numbers with their names, times in seconds, sizes in bytes."""
    made: dict[str, Any] = msgspec.to_builtins(report)
    for raw, line in zip(made["lines"], report.lines, strict=True):
        if line.trial is not None:
            raw |= {name: getattr(line.trial, name) for name in ("epoch_s", "epoch_bytes", "cores")}
    return msgspec.json.encode(made).decode()
