"""Executors of tasks in this process, as faulty as others may be."""

import pickle
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import PassProgress, Rendering
from preprocess.pipeline.tasks import Task, TaskResult, run_task


class Died(Exception):
    """A worker has died inside a task."""


class Dying(Progress):
    """Of a task that dies at the end of its first step, before anything has its name."""

    def __init__(self) -> None:
        super().__init__(rendering=Rendering())

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[PassProgress]:
        with super().stage(name, total, unit) as step:
            yield step
        raise Died


class Shuffled:
    """Tasks in any order, sent as bytes; some die and are run again, some are run twice."""

    def __init__(self, workers: int, seed: int = 0) -> None:
        self.workers, self._random = workers, Random(seed)
        self.deaths = self.tasks = 0

    def run(self, tasks: Sequence[Task]) -> Generator[tuple[int, TaskResult]]:
        sent = [(number, pickle.dumps(task)) for number, task in enumerate(tasks)]
        self._random.shuffle(sent)
        self.tasks += len(tasks)
        for number, raw in sent:
            if self._random.random() < 0.3:
                try:
                    pickle.loads(raw).run(Dying())
                except Died:
                    self.deaths += 1
            result = run_task(pickle.loads(raw))
            if self._random.random() < 0.3:  # the last of two runs is the one that counts
                result = run_task(pickle.loads(raw))
            yield number, result
