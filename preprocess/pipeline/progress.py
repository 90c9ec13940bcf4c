"""What runs now: stages, the passes inside them, and the memory and bytes that they take.

A thread looks at the process twenty times a second while a stage runs, and shows where it stands.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TextIO

from preprocess.pipeline.renderings import Bars, Lines, Rendering, StageView, StepView, WholeView
from preprocess.pipeline.result import StagePlan

_LOOK_S = 0.05  # between looks at the memory


class Progress:
    """Shown on a stream, stderr unless told otherwise: bars where it is a terminal, else lines."""

    def __init__(self, stream: TextIO | None = None, rendering: Rendering | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        if rendering is None:
            rendering = Bars(self._stream) if self._stream.isatty() else Lines(self._stream)
        self._rendering = rendering
        self._lock = Lock()
        self._planned: dict[str, tuple[int, int]] = {}  # number and bytes of each stage
        self._whole_bytes = self._passed_bytes = 0  # of the plan; of stages that are over
        self._begun = time.monotonic()
        self._recorded: Recorded | None = None
        self._watch: _Watch | None = None
        self.peak_bytes = 0  # of this process while stages ran

    def begin(self, stages: Sequence[StagePlan], facts: Mapping[str, Any]) -> None:
        """What is going to be done; `facts`: plain values, for scripts."""
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
    def recorded(self, name: str) -> Iterator["Recorded"]:
        """A stage; steps that run inside it belong to it."""
        assert self._recorded is None
        recorded = Recorded(self, name, *self._planned.get(name, (0, 0)))
        self._recorded = recorded
        try:
            with self._watched():
                with self._lock:
                    self._rendering.begin_stage(recorded.view(), self._whole(recorded))
                yield recorded
                recorded.finish()
                self._passed_bytes += recorded.planned_bytes
                with self._lock:
                    self._rendering.end_stage(recorded.view(), self._whole(None))
        finally:
            self._recorded = None

    def resumed(self, name: str, read_bytes: int, written_bytes: int, elapsed_s: float) -> None:
        """A stage that an earlier run did."""
        number, planned = self._planned.get(name, (0, 0))
        self._whole_bytes -= planned
        view = StageView(name, number, planned, read_bytes, written_bytes, elapsed_s, 0, True)
        with self._lock:
            self._rendering.end_stage(view, self._whole(None))

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator["PassProgress"]:
        """A step of `total` items of `unit` ("edges", "B", ...): a stage itself if none runs."""
        if self._recorded is None:
            with self.recorded(name), self.stage(name, total, unit) as stage:
                yield stage
            return
        recorded = self._recorded
        stage = PassProgress(name, total, unit)
        recorded.running.append(stage)
        try:
            yield stage
            with self._lock:
                self._rendering.end_step(recorded.view(), stage.view())
        finally:
            recorded.running.remove(stage)

    def line(self, text: str) -> None:
        with self._lock:
            self._rendering.line(text)

    def look(self) -> None:
        found = resident_bytes()
        self.peak_bytes = max(self.peak_bytes, found)
        recorded = self._recorded
        if recorded is not None:
            recorded.memory_bytes = found
            recorded.peak_bytes = max(recorded.peak_bytes, found)

    def show(self) -> None:
        recorded = self._recorded
        if recorded is not None and not recorded.is_over:
            with self._lock:
                self._rendering.show(recorded.view(), self._whole(recorded))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        watch = _Watch(self, self._rendering.interval_s)
        try:
            yield
        finally:
            watch.stop()
            with self._lock:
                self._rendering.pause()

    def _whole(self, recorded: "Recorded | None") -> WholeView:
        """`recorded`: the stage that runs."""
        moved, memory = self._passed_bytes, 0
        if recorded is not None:
            view = recorded.view()
            moved += min(view.planned_bytes, view.read_bytes + view.written_bytes)
            memory = recorded.memory_bytes
        elapsed_s = time.monotonic() - self._begun
        return WholeView(len(self._planned), self._whole_bytes, moved, elapsed_s, memory)


class Recorded:
    """A stage: what it has taken so far, and all of it once it is over."""

    def __init__(self, progress: Progress, name: str, number: int, planned_bytes: int) -> None:
        self._progress, self._name, self._number = progress, name, number
        self.planned_bytes = planned_bytes
        self.running: list[PassProgress] = []
        self.is_over = False
        self.elapsed_s = 0.0
        self.read_bytes = self.written_bytes = 0
        self.memory_bytes = self.peak_bytes = resident_bytes()
        self._before, self._begun = moved_bytes(), time.monotonic()

    def finish(self) -> None:
        self._progress.look()
        self._update()
        self.is_over = True

    def view(self) -> StageView:
        if not self.is_over:
            self._update()
        steps = tuple(stage.view() for stage in list(self.running))
        return StageView(
            self._name, self._number, self.planned_bytes, self.read_bytes, self.written_bytes,
            self.elapsed_s, self.peak_bytes, steps=steps,
        )  # fmt: skip

    def _update(self) -> None:
        read, written = moved_bytes()
        self.read_bytes, self.written_bytes = read - self._before[0], written - self._before[1]
        self.elapsed_s = time.monotonic() - self._begun


class PassProgress:
    """Progress of one pass, in items."""

    def __init__(self, name: str, total: int, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._begun, self._done = time.monotonic(), 0

    def advance(self, count: int) -> None:
        """So many more items are done."""
        self._done += count

    def view(self) -> StepView:
        elapsed_s = time.monotonic() - self._begun
        return StepView(self._name, self._unit, self._total, self._done, elapsed_s)


class _Watch:
    """A thread that looks, and shows, until it is stopped."""

    def __init__(self, progress: Progress, interval_s: float) -> None:
        self._progress, self._interval_s = progress, interval_s
        self._over = Event()
        self._thread = Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        shown = time.monotonic()
        while not self._over.wait(_LOOK_S):
            self._progress.look()
            now = time.monotonic()
            if now - shown >= self._interval_s:
                shown = now
                self._progress.show()


def resident_bytes() -> int:
    """Memory of this process that no file stands behind, the interpreter's included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read and written so far, the page cache included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["rchar"], counts["wchar"]
