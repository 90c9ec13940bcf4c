"""Advice as people and as scripts read it."""

from typing import Any

import msgspec

from blockstore.units import format_bytes
from loaderd.advise.measuring import Report
from loaderd.engine.advice import Line, least_text
from loaderd.sight.report import table

_HEADER = (
    "plan", "batches", "needs", "in memory", "read an epoch", "as", "I/O s", "CPU s", "epoch s",
    "first epoch s", "limit",
)  # fmt: skip


def advice_text(report: Report) -> str:
    """What was measured, a table of the plans, what is to be said of them, and the advice."""
    advice = report.advice
    rows = [_HEADER, *(_row(line) for line in advice.lines)]
    pages = [*_measured(report), "", *table(rows, frozenset({2, 4, 6, 7, 8, 9})), ""]
    pages += [f"{_name(line)}: {line.note}" for line in advice.lines if line.note]
    if advice.auto:
        pages.append(f"plan auto takes {advice.auto}: the same batches as minibatch")
    chosen = [p for p in advice.lines if (p.plan, p.options) == (advice.plan, advice.options)]
    pages.append(f"advice: {_name(chosen[0])}: {advice.reason}" if chosen else advice.reason)
    if advice.hops is not None:
        pages.append(f"advice for hop-wise batches: {advice.hops.text}")
    return "\n".join(pages)


def _measured(report: Report) -> list[str]:
    machine = report.machine
    if machine is None:
        return ["nothing was measured: no plan can run"]
    device = machine.device
    return [
        f"disk, {device.mode}: {1e-9 / device.order_s:.2f} GB/s in order; {device.run_s * 1e6:.0f} "
        f"us for one more run of pages, {device.page_s * 1e6:.2g} us for one more page",
        f"{machine.cores} cores, of which {machine.workers} workers got {machine.granted:.1f}; "
        f"--mem {format_bytes(machine.mem_bytes)}, {report.steps:,} minibatches an epoch",
    ]


def _row(line: Line) -> tuple[str, ...]:
    batches = "equal" if line.equal else "others" if line.sampled else "hops"
    head = (_name(line), batches, least_text(line))
    if not line.runs:
        return (*head, "cannot run", *["-"] * 7)
    if not line.reads:
        return (*head, "not measured", *["-"] * 7)
    times = (line.io_s, line.cpu_s, line.epoch_s, line.first_epoch_s)
    return (
        *head, line.held, format_bytes(int(line.epoch_bytes)),
        line.reads if line.epoch_bytes else "nothing", *(f"{t:.3g}" for t in times), line.limit,
    )  # fmt: skip


def _name(line: Line) -> str:
    return f"{line.plan}, {line.options}" if line.options else line.plan


def advice_json(report: Report) -> str:
    """The same numbers with their names, times in seconds, sizes in bytes."""
    made: dict[str, Any] = msgspec.to_builtins(report)
    for raw, line in zip(made["advice"]["lines"], report.advice.lines, strict=True):
        raw |= {
            "epoch_s": line.epoch_s, "first_epoch_s": line.first_epoch_s, "limit": line.limit,
        }  # fmt: skip
    return msgspec.json.encode(made).decode()
