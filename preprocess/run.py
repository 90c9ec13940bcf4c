"""One run of an ingest: what all its stages share, and the record that each leaves."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockstore.writer import StoreWriter
from preprocess.contents import Contents
from preprocess.options import IngestOptions
from preprocess.plan import MemoryPlan
from preprocess.progress import Progress
from preprocess.result import StageResult
from preprocess.source import Source
from preprocess.work import StageRecord, WorkFolder

Facts = dict[str, Any]
_SIDES = "sides"  # in the facts of a stage: digests of the side arrays that it wrote


@dataclass(slots=True)
class Run:
    """Everything that a stage needs."""

    source: Source
    contents: Contents
    options: IngestOptions
    memory: MemoryPlan
    work: WorkFolder
    writer: StoreWriter
    progress: Progress
    results: list[StageResult] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """Of a temporary file."""
        return self.work.path / name

    def stage(
        self,
        name: str,
        body: Callable[[], Facts | None],
        *,
        made: Iterable[str] = (),
        spent: Iterable[str] = (),
        arrays: Iterable[str] = (),
    ) -> Facts:
        """Run a stage, unless an earlier run has; returns its facts, plain values.

        made     temporary files that it leaves
        spent    temporary files that no stage needs after it
        arrays   paths in the store that it writes
        """
        record = self.work.find(name)
        if record is None:
            record = self._run(name, body, made, spent, arrays)
        else:
            for path, digest in record.facts[_SIDES].items():
                self.writer.restore(path, bytes.fromhex(digest))
        moved, resumed = (record.read_bytes, record.written_bytes), name in self.work.resumed
        self.results.append(StageResult(name, *moved, record.elapsed_s, resumed))
        return record.facts

    def _run(
        self,
        name: str,
        body: Callable[[], Facts | None],
        made: Iterable[str],
        spent: Iterable[str],
        arrays: Iterable[str],
    ) -> StageRecord:
        for path in arrays:
            self.writer.discard(path)
        before, (read, written), begun = set(self.writer.digests), _moved(), time.monotonic()
        facts = body() or {}
        elapsed_s, (read_now, written_now) = time.monotonic() - begun, _moved()
        sides = {p: d.hex() for p, d in self.writer.digests.items() if p not in before}
        record = StageRecord(
            name, {**facts, _SIDES: sides}, read_now - read, written_now - written, elapsed_s
        )
        self.work.finish(record, made, spent)
        return record


def _moved() -> tuple[int, int]:
    """Bytes that this process has read and written so far, the page cache included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["rchar"], counts["wchar"]
