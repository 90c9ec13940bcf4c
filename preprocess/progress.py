"""What a person sees while a stage runs: rate, time left, peak memory."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from blockstore.units import format_bytes

_LINE_S = 5.0  # between lines where there is no terminal
_DRAW_S = 0.2


class Stage:
    """Progress of one stage, in items."""

    def __init__(self, progress: "Progress", name: str, total: int, unit: str) -> None:
        self._progress, self._name, self._total, self._unit = progress, name, total, unit
        self._begun = self._shown = time.monotonic()
        self._done = 0

    def advance(self, count: int) -> None:
        """So many more items are done."""
        self._done += count
        now = time.monotonic()
        if now - self._shown >= self._progress.interval_s:
            self._shown = now
            self._progress.show(self._text(now), last=False)

    def finish(self) -> None:
        """The stage is over."""
        self._progress.show(self._text(time.monotonic()), last=True)

    def _text(self, now: float) -> str:
        elapsed = max(now - self._begun, 1e-9)
        rate = self._done / elapsed
        left = (self._total - self._done) / rate if rate else 0.0
        share = 100 * self._done / self._total if self._total else 100
        as_text = format_bytes if self._unit == "B" else lambda n: f"{n:,}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return (
            f"{self._name:<22} {share:3.0f}%  {as_text(self._done)} {self._unit.strip('B')}"
            f"  {as_text(int(rate))}{'' if self._unit == 'B' else ' ' + self._unit}/s"
            f"  {f'{left:.0f} s left' if self._done < self._total else f'{elapsed:.1f} s'}"
            f"  peak {format_bytes(peak)}"
        )


class Progress:
    """One line that moves on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self.interval_s = _DRAW_S if self._terminal else _LINE_S

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[Stage]:
        """A stage of `total` items of `unit` ("edges", "B", ...)."""
        stage = Stage(self, name, total, unit)
        yield stage
        stage.finish()

    def show(self, text: str, *, last: bool) -> None:
        """Put a line of progress out."""
        if self._terminal:
            self._stream.write(f"\r\x1b[2K{text}" + ("\n" if last else ""))
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
