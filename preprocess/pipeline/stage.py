"""Stages: declared with their cost, run in order, and each recorded in a journal.

A command builds a list of `Stage`.  The dry run, the check of the disk and the progress display use
the declared costs and files; `PipelineRun.execute` runs the stages that are not yet in the journal
of the work folder.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from blockstore.errors import OutOfSpace
from blockstore.format import arrays_of
from blockstore.io.files import flush_tree, take_name
from blockstore.units import format_bytes
from blockstore.writer import StoreWriter
from preprocess.pipeline.disk import existing_folder
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import StagePlan, StageResult
from preprocess.pipeline.work import STORE, StageRecord, WorkFolder, work_path

Facts = dict[str, Any]
_FILES = "files"  # key in a stage's facts: digests of the files, other than shards, that it wrote


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a stage: bytes read and written, and items of work for the processors."""

    read: int = 0
    written: int = 0
    passing: int = 0  # temporary bytes on disk that are gone when the stage is over
    work: Mapping[str, float] = field(default_factory=dict)  # items, by field of `ProcessorRates`


RunT = TypeVar("RunT", bound="PipelineRun")


@dataclass(frozen=True)  # no slots: `Stage[SomeRun](...)` sets an attribute on the instance
class Stage(Generic[RunT]):
    """One stage: what is known before it runs, and how to run it.

    run      returns facts (plain values), which later stages and runs look up by the stage's name
    files    temporary files that it leaves for later stages, with their maximum size in bytes
    spent    temporary files that no later stage reads
    arrays   paths in the result that it writes
    ends     whether it publishes the result; such a stage is not recorded
    """

    name: str
    cost: Cost
    run: Callable[[RunT], Facts | None]
    files: Mapping[str, int] = field(default_factory=dict)
    spent: Sequence[str] = ()
    arrays: Sequence[str] = ()
    ends: bool = False

    @property
    def plan(self) -> StagePlan:
        return StagePlan(self.name, self.cost.read, self.cost.written)


def temporary_bytes(stages: Iterable[Stage[Any]]) -> int:
    """Peak of temporary bytes on disk.  Bucket files are kept for reuse: see `files.buckets`."""
    held: dict[str, int] = {}
    maximum = spare = 0
    for stage in stages:
        spare = max(spare, stage.cost.passing)
        held.update(stage.files)
        maximum = max(maximum, sum(held.values()) + spare)
        for name in stage.spent:
            held.pop(name, None)
    return maximum


class RunPlan(NamedTuple):
    """The stages of a run, and the disk space that it needs: bytes at most."""

    stages: Sequence[StagePlan]
    result: int
    temporary: int
    facts: Mapping[str, Any] = {}  # plain values, for scripts

    @classmethod
    def of(cls, stages: Sequence[Stage[Any]], result: int | None = None) -> "RunPlan":
        """`result`: bytes of the result; None: what the stages write permanently."""
        if result is None:
            result = sum(s.cost.written - s.cost.passing - sum(s.files.values()) for s in stages)
        return cls([s.plan for s in stages], result, temporary_bytes(stages))

    def check_disk(self, target: Path) -> None:
        """Raises OutOfSpace if the disk of the target is too small.

        Space that the work folder of an earlier run takes counts as free.
        """
        where = existing_folder(target)
        left = (p for p in work_path(target).rglob("*") if p.is_file())
        free = shutil.disk_usage(where).free + sum(p.stat().st_blocks * 512 for p in left)
        if self.result + self.temporary > free:
            raise OutOfSpace(
                f"{where}: found {format_bytes(free)} free, expected {format_bytes(self.result)} "
                f"for the result and {format_bytes(self.temporary)} for its making; free some "
                "space, or choose another disk"
            )


@contextmanager
def resumable(
    target: Path, signature: str, progress: Progress, plan: RunPlan, fresh: bool = False
) -> Iterator[WorkFolder]:
    """Open the work folder of a target; if the run is stopped or the disk full, say what stays.

    signature   hash of everything that decides the result; if it differs, begin from scratch
    fresh       begin from scratch in any case

    Raises StoreBusy; OutOfSpace before anything is written, if the plan does not fit the disk.
    """
    plan.check_disk(target)
    progress.begin(plan.stages, plan.facts)
    work = WorkFolder(target, signature, fresh)
    try:
        with work:
            yield work
    except (OutOfSpace, OSError, KeyboardInterrupt, SystemExit) as error:
        if not work.path.exists():
            raise
        left = f"what {len(work.stages)} stages made stays in {work.path}: the same command goes on"
        if isinstance(error, OutOfSpace):
            result, more = format_bytes(plan.result), format_bytes(plan.temporary)
            need = f"the result takes {result}, its making {more} more"
            raise OutOfSpace(f"{error}; {need}; {left}") from error
        progress.line(left)
        raise


@dataclass(eq=False)
class PipelineRun:
    """A run of stages in one work folder, and the files and facts that they share."""

    work: WorkFolder
    progress: Progress
    # of the store built in the work folder; by a factory, so that a subclass can require it
    writer: StoreWriter | None = field(default_factory=lambda: None, kw_only=True)
    _ended: list[StageResult] = field(default_factory=list, init=False)

    @property
    def folder(self) -> Path:
        return self.work.path

    @property
    def result(self) -> Path:
        """The folder that will get the name of the target."""
        return self.work.path / STORE

    def path(self, name: str) -> Path:
        return self.work.path / name

    def facts(self, name: str) -> Facts:
        """The facts that a finished stage returned."""
        record = self.work.find(name)
        assert record is not None, name
        return record.facts

    def execute(self, stages: Iterable[Stage[Self]]) -> None:
        """Run the stages that no earlier run has finished."""
        for stage in stages:
            body = partial(stage.run, self)
            if not stage.ends:
                self.record(stage.name, body, stage.files, stage.spent, stage.arrays)
                continue
            with self.progress.recorded(stage.name) as took:
                body()
            self._ended.append(took.result())

    def record(
        self,
        name: str,
        body: Callable[[], Facts | None],
        made: Iterable[str] | Callable[[Facts], Iterable[str]],
        spent: Iterable[str] = (),
        arrays: Sequence[str] = (),
    ) -> Facts:
        """Run a stage, unless the journal has it; returns its facts.

        made   temporary files that it leaves, or a function that derives them from its facts
        """
        record = self.work.find(name)
        if record is None:
            for path in arrays:
                remove(self.result / path)
            before = set(self.writer.digests) if self.writer else set()
            with self.progress.recorded(name) as took:
                facts = dict(body() or {})
            files: dict[str, str] = {}
            if self.writer is not None:
                files = {p: d for p, d in self.writer.digests.items() if p not in before}
                facts[_FILES] = files
            record = StageRecord(took.result(), facts, sorted({*arrays, *arrays_of(files)}))
            self.work.finish(record, made(facts) if callable(made) else made, spent)
        elif name in self.work.resumed:
            self.progress.resumed(record.took)
        if self.writer is not None:
            self.writer.restore(record.facts[_FILES])
        return record.facts

    @property
    def results(self) -> tuple[StageResult, ...]:
        """Results of all stages in order, those of earlier runs included."""
        resumed = self.work.resumed
        found = [replace(r.took, resumed=r.name in resumed) for r in self.work.stages]
        return (*found, *self._ended)

    def appear(self, target: Path) -> None:
        """Flush the result and rename it to the target.  Raises StoreExists."""
        flush_tree(self.result)
        take_name(self.result, target)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
