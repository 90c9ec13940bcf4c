"""One run of an ingest: what all its stages share, and the record that each leaves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockstore.format import arrays_of
from blockstore.writer import StoreWriter
from preprocess.contents import Contents
from preprocess.options import IngestOptions
from preprocess.plan import MemoryPlan
from preprocess.progress import Progress
from preprocess.result import StageResult
from preprocess.source import Source
from preprocess.sourcefiles import SourceFiles
from preprocess.work import StageRecord, WorkFolder

Facts = dict[str, Any]
_FILES = "files"  # in the facts of a stage: digests of what it wrote beside shards


@dataclass(slots=True)
class Run:
    """Everything that a stage needs."""

    source: Source
    files: SourceFiles  # of the source, as they were when it was opened
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
            self.writer.restore(record.facts[_FILES])
        moved, resumed = (record.read_bytes, record.written_bytes), name in self.work.resumed
        if resumed:
            self.progress.resumed(name, *moved, record.elapsed_s)
        self.results.append(StageResult(name, *moved, record.elapsed_s, resumed, record.peak_bytes))
        return record.facts

    def _run(
        self,
        name: str,
        body: Callable[[], Facts | None],
        made: Iterable[str],
        spent: Iterable[str],
        arrays: Iterable[str],
    ) -> StageRecord:
        arrays = list(arrays)
        for path in arrays:
            self.writer.discard(path)
        before = set(self.writer.digests)
        with self.progress.recorded(name) as took:
            facts = body() or {}
        files = {p: d for p, d in self.writer.digests.items() if p not in before}
        record = StageRecord(
            name, {**facts, _FILES: files}, took.read_bytes, took.written_bytes, took.elapsed_s,
            took.peak_bytes, sorted({*arrays, *arrays_of(files)}),
        )  # fmt: skip
        self.work.finish(record, made, spent)
        return record
