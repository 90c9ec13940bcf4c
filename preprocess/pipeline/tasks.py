"""Tasks over ranges, which other processes run for a stage: executors and results.

A task is a frozen record, which is pickled.  It reads and writes files in folders that all
processes see under the same paths, and returns a small value.  If a process dies its task is run
again, while the first attempt may still run elsewhere: so a task writes under a name of its own and
renames, or writes the same bytes in the same place.
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

_MIN_SPAN, _MAX_SPAN = 1 << 14, 1 << 24  # edges or rows of a task
_SPANS = 4  # tasks for each worker, if there is enough work


class Task(Protocol):
    def run(self, progress: Progress) -> Any:
        """Run the task; must be idempotent."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The value that a task returned, and its cost."""

    value: Any
    took: StageResult


class Executor(Protocol):
    """Runs tasks in other processes.

    `run` raises what a task raises, and ExecutorLost if the processes are gone.
    """

    @property
    def workers(self) -> int:
        """About how many tasks run at the same time."""

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[int, TaskResult]]:
        """Yield (number, result) of each task as it ends, in any order."""


def run_task(task: Task) -> TaskResult:
    """Run a task in this process, which is dedicated to it."""
    give_back_freed()
    progress = Progress(rendering=Rendering())
    with progress.recorded("task") as took:
        value = task.run(progress)
    return TaskResult(value, took.result())


class TaskFolder(Closing):
    """Runs the tasks of a stage, with a folder for the files that they exchange."""

    def __init__(self, executor: Executor, work: Path, progress: Progress) -> None:
        """`work`: an existing folder; its owner removes what is left in it after a kill."""
        self._executor, self._progress = executor, progress
        # a new name for each run: tasks of a killed run may still write to its folder
        self.path = work / f"tasks-{uuid.uuid4().hex}"
        self.path.mkdir()

    def run(
        self, name: str, unit: str, tasks: Sequence[Task], sizes: Sequence[int]
    ) -> Generator[tuple[int, Any]]:
        """Run tasks as one step; yields (number, value) of each as it ends, in any order.

        sizes   size of each task, in `unit`
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
        """As `run`, but yields the values in the order of the tasks."""
        waiting: dict[int, Any] = {}
        following = 0
        with closing(self.run(name, unit, tasks, sizes)) as results:
            for number, value in results:
                waiting[number] = value
                while following in waiting:
                    yield waiting.pop(following)
                    following += 1

    def spans(self, count: int, maximum: int = _MAX_SPAN) -> list[range]:
        """Split [0, count) into ranges of at most `maximum`, one a task, several per worker."""
        each = -(-count // (_SPANS * self._executor.workers))
        return cut_spans(count, max(1, min(maximum, max(_MIN_SPAN, each))))

    @property
    def workers(self) -> int:
        return self._executor.workers

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def cut_spans(count: int, each: int) -> list[range]:
    """Split [0, count) into ranges of `each`."""
    return [range(first, min(first + each, count)) for first in range(0, count, max(each, 1))]


class SavedArray:
    """A temporary array in a file, pickled as its path; a task reads the file."""

    def __init__(self, path: Path, dtype: Any, values: NDArray[Any] | None = None) -> None:
        """`values`: the content of the file, if it is in memory already."""
        self._path, self._dtype, self._values = path, dtype, values

    @property
    def values(self) -> NDArray[Any]:
        if self._values is None:
            self._values = load_array(self._path, self._dtype)
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedArray, (self._path, self._dtype)


def put_array(path: Path, values: NDArray[Any]) -> None:
    """Write an array to a file atomically, even if other processes write the same one."""
    own = own_name(path)
    save_array(own, values)
    own.rename(path)


def own_name(path: Path) -> Path:
    """A temporary name beside a file, unique to this call."""
    return path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex}")
