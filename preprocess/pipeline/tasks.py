"""Tasks over ranges, for stages that other processes work on: what runs them, and what they say.

A task is a frozen record, which is pickled.  What it reads and writes are files in folders that all
processes see, under the same paths; what it returns is small.  It is run again where a process
dies, and may still run elsewhere then: it writes under a name of its own and renames, or writes
the same bytes in the same place.
"""

import os
import shutil
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from blockstore.closing import Closing
from preprocess.files.array_file import load_array, save_array
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Rendering
from preprocess.pipeline.result import StageResult
from preprocess.pipeline.work import give_back_freed

_MIN_SPAN, _MOST_SPAN = 1 << 14, 1 << 24  # edges or rows of a task
_SPANS = 4  # for each worker, where there is enough to do


class Task(Protocol):
    def run(self, progress: Progress) -> Any:
        """Do it; the same call again does the same."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task returned, and what it took."""

    value: Any
    took: StageResult


class Executor(Protocol):
    """Where tasks run.

    Raises, from `run`, what a task raises; ExecutorLost: its processes are gone.
    """

    @property
    def workers(self) -> int:
        """Tasks that run at the same time, about."""

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[int, TaskResult]]:
        """Each task once, as it ends, by its number: in any order."""


def run_task(task: Task) -> TaskResult:
    """Run a task in this process, which has nothing else to do."""
    give_back_freed()
    progress = Progress(rendering=Rendering())
    with progress.recorded("task") as took:
        value = task.run(progress)
    return TaskResult(value, took.result())


class TaskFolder(Closing):
    """Tasks of a stage, and a folder for the files that they leave to each other."""

    def __init__(self, executor: Executor, work: Path, progress: Progress) -> None:
        """`work`: an existing folder; what is left in it after a kill is removed by its owner."""
        self._executor, self._progress = executor, progress
        # not the name that an earlier run had, whose last tasks may not have noticed its end
        self.path = work / f"tasks-{uuid.uuid4().hex}"
        self.path.mkdir()

    def run(
        self, name: str, unit: str, tasks: Sequence[Task], sizes: Sequence[int]
    ) -> Generator[tuple[int, Any]]:
        """(number, what it returned) of each task as it ends, in any order: one step.

        sizes   of each task, in `unit`
        """
        with (
            self._progress.stage(name, sum(sizes), unit) as step,
            closing(self._executor.run(tasks)) as results,
        ):
            for number, result in results:
                self._progress.add(result.took)
                step.advance(sizes[number])
                yield number, result.value

    def in_order(
        self, name: str, unit: str, tasks: Sequence[Task], sizes: Sequence[int]
    ) -> Generator[Any]:
        """What each task returned, in the order of the tasks, as soon as that is possible."""
        waiting: dict[int, Any] = {}
        following = 0
        with closing(self.run(name, unit, tasks, sizes)) as results:
            for number, value in results:
                waiting[number] = value
                while following in waiting:
                    yield waiting.pop(following)
                    following += 1

    def spans(self, count: int, most: int = _MOST_SPAN) -> list[range]:
        """[0, count) in ranges of at most `most`, one a task: several for each worker."""
        each = -(-count // (_SPANS * self._executor.workers))
        return cut_spans(count, max(1, min(most, max(_MIN_SPAN, each))))

    @property
    def workers(self) -> int:
        return self._executor.workers

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def cut_spans(count: int, each: int) -> list[range]:
    """[0, count) in ranges of `each`."""
    return [range(first, min(first + each, count)) for first in range(0, count, max(each, 1))]


class SavedArray:
    """A temporary array, as its file; a task is sent the path, and reads it."""

    def __init__(self, path: Path, dtype: Any, values: NDArray[Any] | None = None) -> None:
        """`values`: what the file holds, where that is in memory."""
        self._path, self._dtype, self._values = path, dtype, values

    @property
    def values(self) -> NDArray[Any]:
        if self._values is None:
            self._values = load_array(self._path, self._dtype)
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedArray, (self._path, self._dtype)


def put_array(path: Path, values: NDArray[Any]) -> None:
    """One array to a file that appears whole, whoever else writes the same."""
    own = own_name(path)
    save_array(own, values)
    own.rename(path)


def own_name(path: Path) -> Path:
    """A name beside a file, of this process alone."""
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex}")
