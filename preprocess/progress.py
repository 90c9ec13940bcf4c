"""What a person sees while a stage runs: share done, rate, time left, peak memory."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from blockstore.units import format_bytes

_LINE_S = 5.0  # between lines where there is no terminal
_DRAW_S = 0.2
_LOOK_S = 0.05  # between looks at the memory
_NAME_WIDTH = 28


class Progress:
    """A bar a stage on a terminal, a plain line now and then elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.is_terminal = self._stream.isatty()
        self.interval_s = _DRAW_S if self.is_terminal else _LINE_S
        self.peak_bytes = 0  # of this process, as far as it was looked at

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator["Stage"]:
        """A stage of `total` items of `unit` ("edges", "B", ...)."""
        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.fields[text]}"),
            console=Console(file=self._stream),
            auto_refresh=False,
            disable=not self.is_terminal,
        )
        with bar:
            stage = Stage(self, name, total, unit, bar)
            yield stage
            stage.show(last=True)

    def line(self, text: str) -> None:
        """Put a plain line out."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def look_at_memory(self) -> str:
        """The peak so far, for a person."""
        self.peak_bytes = max(self.peak_bytes, resident_bytes())
        return format_bytes(self.peak_bytes)


class Stage:
    """Progress of one stage, in items."""

    def __init__(self, progress: Progress, name: str, total: int, unit: str, bar: Bar) -> None:
        self._progress, self._name, self._total, self._unit = progress, name, total, unit
        self._bar = bar
        self._task = bar.add_task(name.ljust(_NAME_WIDTH), total=max(total, 1), text="")
        self._begun = self._shown = self._looked = time.monotonic()
        self._done = 0

    def advance(self, count: int) -> None:
        """So many more items are done."""
        self._done += count
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._progress.look_at_memory()
        if now - self._shown >= self._progress.interval_s:
            self._shown = now
            self.show()

    def show(self, last: bool = False) -> None:
        """Put out where the stage stands."""
        text = self._text(time.monotonic() - self._begun, last)
        if self._progress.is_terminal:
            done = max(self._total, 1) if last else self._done
            self._bar.update(self._task, completed=done, text=text, refresh=True)
        else:
            self._progress.line(f"{self._name:<{_NAME_WIDTH}} {text}")

    def _text(self, elapsed_s: float, last: bool) -> str:
        rate = self._done / max(elapsed_s, 1e-9)
        share = 1.0 if last else self._done / max(self._total, 1)
        left = (self._total - self._done) / rate if rate else 0.0
        when = f"{elapsed_s:.1f} s" if last else f"{left:.0f} s left"
        peak = self._progress.look_at_memory()
        done, speed = self._count(self._done), self._count(int(rate))
        return f"{share:4.0%}  {done}  {speed}/s  {when}  peak {peak}"

    def _count(self, count: int) -> str:
        return format_bytes(count) if self._unit == "B" else f"{count:,} {self._unit}"


def resident_bytes() -> int:
    """Memory of this process that no file stands behind, the interpreter's included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
