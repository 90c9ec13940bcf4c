"""Progress of a run: its stages, their passes, and the memory and disk traffic that they cause.

While a stage runs, a thread samples this process twenty times a second and updates the display.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TextIO

from preprocess.pipeline.renderings import (
    Bars,
    Lines,
    PassProgress,
    Rendering,
    StageProgress,
    WholeView,
)
from preprocess.pipeline.result import StagePlan, StageResult

_POLL_S = 0.05  # seconds between two samples of the memory


class Progress:
    """Display on a stream (default: stderr), with bars if it is a terminal, else plain lines."""

    def __init__(self, stream: TextIO | None = None, rendering: Rendering | None = None) -> None:
        stream = stream if stream is not None else sys.stderr
        self._rendering = rendering or (Bars(stream) if stream.isatty() else Lines(stream))
        self._lock = Lock()  # guards the rendering and the end of a stage
        self._planned: dict[str, tuple[int, int]] = {}  # number and bytes of each stage
        self._whole_bytes = self._passed_bytes = 0  # of the plan; of finished stages
        self._begun = time.monotonic()
        self._stage: StageProgress | None = None
        self._memory_bytes = 0
        self.peak_bytes = 0  # of this process while stages ran

    def begin(self, stages: Sequence[StagePlan], facts: Mapping[str, Any]) -> None:
        """Announce the planned stages; `facts`: plain values, for scripts."""
        moved = [s.read_bytes + s.written_bytes for s in stages]
        self._planned = {
            s.name: (number, size)
            for number, (s, size) in enumerate(zip(stages, moved, strict=True), 1)
        }
        self._whole_bytes, self._passed_bytes = sum(moved), 0
        self._begun = time.monotonic()
        with self._lock:
            self._rendering.begin(facts)

    @contextmanager
    def recorded(self, name: str) -> Iterator[StageProgress]:
        """Run a stage.  Steps inside it belong to it; its result is complete when it ends."""
        assert self._stage is None
        stage = self._stage = StageProgress(name, *self._planned.get(name, (0, 0)))
        self._look()
        try:
            with self._watched():
                with self._lock:
                    self._rendering.begin_stage(stage, self._whole())
                yield stage
                self._look()
                # under the lock: the other thread may be about to show the stage
                with self._lock:
                    stage.update()
                    self._stage = None
                    self._passed_bytes += stage.planned_bytes
                    self._rendering.end_stage(stage, self._whole())
        finally:
            self._stage = None

    def resumed(self, took: StageResult) -> None:
        """Show a stage that an earlier run finished."""
        stage = StageProgress(took.name, *self._planned.get(took.name, (0, 0)))
        self._whole_bytes -= stage.planned_bytes
        stage.read_bytes, stage.written_bytes = took.read_bytes, took.written_bytes
        stage.elapsed_s, stage.resumed = took.elapsed_s, True
        with self._lock:
            self._rendering.end_stage(stage, self._whole())

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[PassProgress]:
        """Run a step of `total` items of `unit` ("edges", "B"); outside a stage, as its own."""
        if self._stage is None:
            with self.recorded(name), self.stage(name, total, unit) as step:
                yield step
            return
        stage, step = self._stage, PassProgress(name, total, unit)
        stage.steps.append(step)
        try:
            yield step
            with self._lock:
                self._rendering.end_step(stage, step)
        finally:
            stage.steps.remove(step)

    def add(self, took: StageResult) -> None:
        """Add the cost of a task of the current stage that another process has finished."""
        if self._stage is not None:
            self._stage.add(took)

    def line(self, text: str) -> None:
        """Print a plain line."""
        with self._lock:
            self._rendering.line(text)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Sample and display from another thread inside this context."""
        over = Event()
        thread = Thread(target=self._watch, args=(over,), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            with self._lock:
                self._rendering.pause()

    def _watch(self, over: Event) -> None:
        shown = time.monotonic()
        while not over.wait(_POLL_S):
            self._look()
            now = time.monotonic()
            if now - shown >= self._rendering.interval_s:
                shown = now
                with self._lock:
                    if self._stage is not None:
                        self._stage.update()
                        self._rendering.show(self._stage, self._whole())

    def _look(self) -> None:
        """Sample the memory of this process, and update the peaks."""
        self._memory_bytes = found = resident_bytes()
        self.peak_bytes = max(self.peak_bytes, found)
        if (stage := self._stage) is not None:
            stage.peak_bytes = max(stage.peak_bytes, found)

    def _whole(self) -> WholeView:
        moved, memory = self._passed_bytes, 0
        if (stage := self._stage) is not None:
            moved += min(stage.planned_bytes, stage.read_bytes + stage.written_bytes)
            memory = self._memory_bytes
        elapsed_s = time.monotonic() - self._begun
        return WholeView(len(self._planned), self._whole_bytes, moved, elapsed_s, memory)


def resident_bytes() -> int:
    """Memory of this process that is not backed by files, the interpreter's included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
