"""State of a run, and three ways to show it: terminal bars, plain lines, events for scripts."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blockstore.units import format_bytes
from preprocess.pipeline.result import StageResult

_HEADS = ("time", "read", "written", "rate", "peak mem")
_COLUMN = 8  # characters of each number in the table of stages
_MIN_NAME, _PLAIN_NAME = 24, 44
_BAR = 20


class PassProgress:
    """A pass that runs inside a stage, counted in items."""

    def __init__(self, name: str, total: int, unit: str) -> None:
        """`unit`: "edges", "nodes", "B"."""
        self.name, self.total, self.unit, self.done = name, total, unit, 0
        self._begun = time.monotonic()

    def advance(self, count: int) -> None:
        """Count `count` more items as done."""
        self.done += count

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    @property
    def share(self) -> float:
        """Done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 1.0

    @property
    def rate(self) -> float:
        return self.done / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the current rate; None if nothing is done yet."""
        return max(0, self.total - self.done) / self.rate if self.done else None


class StageProgress:
    """A running stage: bytes planned, and bytes moved, through the disk or the page cache."""

    def __init__(self, name: str, number: int = 0, planned_bytes: int = 0) -> None:
        """`number`: position in the plan, from 1; 0 if there is no plan, or it is not in it."""
        self.name, self.number, self.planned_bytes = name, number, planned_bytes
        self.read_bytes = self.written_bytes = self.peak_bytes = 0  # peak: of memory
        self.elapsed_s = 0.0
        self.resumed = False  # an earlier run did it
        self.steps: list[PassProgress] = []  # running now
        self._before, self._begun = moved_bytes(), time.monotonic()
        self._elsewhere = [0, 0]  # read and written by tasks in other processes

    def add(self, took: StageResult) -> None:
        """Add the cost of a task that another process has finished."""
        self._elsewhere[0] += took.read_bytes
        self._elsewhere[1] += took.written_bytes
        self.peak_bytes = max(self.peak_bytes, took.peak_bytes)

    def update(self) -> None:
        read, written = moved_bytes()
        self.read_bytes = read - self._before[0] + self._elsewhere[0]
        self.written_bytes = written - self._before[1] + self._elsewhere[1]
        self.elapsed_s = time.monotonic() - self._begun

    def result(self) -> StageResult:
        """The result of the finished stage."""
        moved = self.read_bytes, self.written_bytes, self.elapsed_s
        return StageResult(self.name, *moved, self.resumed, self.peak_bytes)


@dataclass(frozen=True, slots=True)
class WholeView:
    """Progress of all stages of a plan together, in bytes read and written."""

    num_stages: int  # 0: there is no plan
    planned_bytes: int
    moved_bytes: int
    elapsed_s: float
    memory_bytes: int  # now

    @property
    def share(self) -> float:
        """Done, 0 to 1."""
        return min(1.0, self.moved_bytes / self.planned_bytes) if self.planned_bytes else 0.0

    @property
    def left_s(self) -> float | None:
        share = self.share
        return self.elapsed_s * (1 - share) / share if share else None


class Rendering:
    """Base of the displays; called by one thread at a time.  This one shows nothing."""

    interval_s = 5.0  # between two calls of `show`

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Called before the first stage with plain values, the plan among them."""

    def begin_stage(self, stage: StageProgress, whole: WholeView) -> None:
        """Called once for each stage that this run does itself."""

    def show(self, stage: StageProgress, whole: WholeView) -> None:
        """Show the progress of a stage and of the whole run."""

    def end_step(self, stage: StageProgress, step: PassProgress) -> None:
        """Called when a step is over."""

    def end_stage(self, stage: StageProgress, whole: WholeView) -> None:
        """Called when a stage is over, also for one that an earlier run finished."""

    def line(self, text: str, style: str = "") -> None:
        """Print a line of text that stays; `style`: as rich names it."""

    def pause(self) -> None:
        """Erase what is drawn, until the next stage begins."""


class Lines(Rendering):
    """A line for each stage, and one every few seconds while it runs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._headed, self._name_width = stream, False, _PLAIN_NAME

    def show(self, stage: StageProgress, whole: WholeView) -> None:
        for step in list(stage.steps):
            text = f"{step.share:4.0%}  {_done(step)}  {_rate(step)}  {_left(step.left_s)}"
            if whole.num_stages:
                text += f", of all {whole.share:.0%}, {_left(whole.left_s)}"
            self.line(f"      {step.name}: {text}, memory {format_bytes(whole.memory_bytes)}")

    def end_stage(self, stage: StageProgress, whole: WholeView) -> None:
        if not self._headed:
            self._headed = True
            heads = "".join(f"  {head:>{_COLUMN}}" for head in _HEADS)
            self.line(f"{'stage':<{self._name_width}}{heads}", "bold")
        self.line(table_line(stage, whole, self._name_width), "dim" if stage.resumed else "")

    def line(self, text: str, style: str = "") -> None:  # noqa: ARG002
        write_line(self._stream, text)


class Bars(Lines):
    """A table of stages that grows, and below it a bar for each step and one for everything."""

    interval_s = 0.1

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        super().__init__(stream)
        self._console = Console(file=stream, width=width, highlight=False)
        self._live: Live | None = None
        room = self._console.width - len(_HEADS) * (_COLUMN + 2)
        self._name_width = max(_MIN_NAME, min(_PLAIN_NAME, room))

    def begin_stage(self, stage: StageProgress, whole: WholeView) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()
        self.show(stage, whole)

    def show(self, stage: StageProgress, whole: WholeView) -> None:
        if self._live is not None:
            self._live.update(_bars(stage, whole, self._console.width), refresh=True)

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), overflow="ignore", no_wrap=True, crop=False)

    def pause(self) -> None:
        """Erase the bars, and show the cursor again."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class Events(Rendering):
    """A JSON object a line.

    Each has "event", and then:

    begin        source, layout, store, plan: {num_nodes, num_edges, store_bytes, temporary_bytes,
                 mem_bytes, memory: [{what, bytes}], stages: [{name, read_bytes, written_bytes}]}
    stage_begin  stage, number (in the plan, from 1; 0: not in it), of, planned_bytes
    advance      stage, steps: [{name, unit, total, done, elapsed_s, left_s}], read_bytes,
                 written_bytes, peak_bytes, elapsed_s, whole: {share, left_s, memory_bytes}; at most
                 twice a second
    step_end     stage, step, unit, done, elapsed_s
    stage_end    stage, number, of, planned_bytes, read_bytes, written_bytes, peak_bytes,
                 elapsed_s, resumed
    note         text
    end          store, fingerprint, summary: as `blockstore info --summary --json`
    error        message: the line that is on stderr too; the exit code is 2

    Bytes are counts, times are seconds; ignore fields and events that you do not know.
    """

    interval_s = 0.5

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: str, facts: Mapping[str, Any]) -> None:
        write_line(self._stream, msgspec.json.encode({"event": event, **facts}).decode())

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.emit("begin", facts)

    def begin_stage(self, stage: StageProgress, whole: WholeView) -> None:
        self.emit("stage_begin", _named(stage, whole))

    def show(self, stage: StageProgress, whole: WholeView) -> None:
        steps = [
            {
                "name": s.name, "unit": s.unit, "total": s.total, "done": s.done,
                "elapsed_s": s.elapsed_s, "left_s": s.left_s,
            }
            for s in list(stage.steps)
        ]  # fmt: skip
        total = {"share": whole.share, "left_s": whole.left_s, "memory_bytes": whole.memory_bytes}
        self.emit("advance", {"stage": stage.name, "steps": steps, **_moved(stage), "whole": total})

    def end_step(self, stage: StageProgress, step: PassProgress) -> None:
        facts = {"stage": stage.name, "step": step.name, "unit": step.unit, "done": step.done}
        self.emit("step_end", {**facts, "elapsed_s": step.elapsed_s})

    def end_stage(self, stage: StageProgress, whole: WholeView) -> None:
        facts = {**_named(stage, whole), **_moved(stage), "resumed": stage.resumed}
        self.emit("stage_end", facts)

    def line(self, text: str, style: str = "") -> None:  # noqa: ARG002
        self.emit("note", {"text": text})


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read and written so far, the page cache included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["rchar"], counts["wchar"]


def write_line(stream: TextIO, text: str) -> None:
    """Write one line and flush.  If the reader has gone (`| head`), the work goes on silently."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _named(stage: StageProgress, whole: WholeView) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "number": stage.number,
        "of": whole.num_stages,
        "planned_bytes": stage.planned_bytes,
    }


def _moved(stage: StageProgress) -> dict[str, Any]:
    names = ("read_bytes", "written_bytes", "peak_bytes", "elapsed_s")
    return {name: getattr(stage, name) for name in names}


def table_line(stage: StageProgress, whole: WholeView, name_width: int) -> str:
    name = f"{stage.number:>2}/{whole.num_stages} {stage.name}" if stage.number else stage.name
    moved = stage.read_bytes + stage.written_bytes
    if stage.resumed:
        numbers = ("earlier", *(format_bytes(n) for n in (stage.read_bytes, stage.written_bytes)))
    else:
        numbers = (
            format_seconds(stage.elapsed_s),
            format_bytes(stage.read_bytes),
            format_bytes(stage.written_bytes),
            f"{format_bytes(int(moved / max(stage.elapsed_s, 1e-3)))}/s",
            format_bytes(stage.peak_bytes),
        )
    return shorten(name, name_width).ljust(name_width) + "".join(
        f"  {number:>{_COLUMN}}" for number in numbers
    )


def _bars(stage: StageProgress, whole: WholeView, width: int) -> Table:
    """A bar for each step, and one for the whole plan if there is one."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    wide = width >= 80
    bar = _BAR if wide else 10
    memory = format_bytes(whole.memory_bytes)
    for step in list(stage.steps) or [PassProgress(stage.name, 0, "")]:
        left = _left(step.left_s) if step.unit else format_seconds(stage.elapsed_s)
        grid.add_row(
            shorten(step.name, 24 if wide else 16),
            ProgressBar(max(step.total, 1), step.done, width=bar, pulse=not step.unit),
            f"{step.share:4.0%}" if step.unit else "",
            *([_done(step), _rate(step)] if wide and step.unit else ["", ""] if wide else []),
            left,
        )
    if whole.num_stages:
        moved = f"{format_bytes(whole.moved_bytes)} of {format_bytes(whole.planned_bytes)}"
        grid.add_row(
            Text("all stages", style="bold"),
            ProgressBar(max(whole.planned_bytes, 1), whole.moved_bytes, width=bar),
            f"{whole.share:4.0%}",
            *([moved, f"mem {memory}"] if wide else []),
            _left(whole.left_s),
        )
    return grid


def _done(step: PassProgress) -> str:
    return format_bytes(step.done) if step.unit == "B" else f"{format_count(step.done)} {step.unit}"


def _rate(step: PassProgress) -> str:
    rate = int(step.rate)
    return f"{format_bytes(rate) if step.unit == 'B' else format_count(rate)}/s"


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{format_seconds(seconds)} left"


def format_count(count: float) -> str:
    """A count for a person: three digits and a unit, `13.5M`."""
    for unit in ("", "K", "M", "G"):
        if count < 999.5 or unit == "G":
            break
        count /= 1000
    return f"{count:.0f}{unit}" if not unit or count >= 99.95 else f"{count:.3g}{unit}"


def format_seconds(seconds: float) -> str:
    """A time for a person: `0.4 s`, `85 s`, `12:07`, `1:02:03`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shorten(text: str, width: int) -> str:
    """At most `width` characters, cut in the middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"
