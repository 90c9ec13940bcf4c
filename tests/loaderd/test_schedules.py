"""Sessions that come and go, under random schedules of their threads: see tests/schedules.py.

`pytest tests/loaderd/test_schedules.py --schedules 10000` is the long form; a seed that failed is
tried again by `--schedules 1 --first-schedule SEED`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loaderd.racing import Bench, run_script
from tests.schedules import schedule

CHUNK = 50  # schedules of one test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first = metafunc.config.getoption("first_schedule")
        end = first + metafunc.config.getoption("schedules")
        parts = [range(i, min(i + CHUNK, end)) for i in range(first, end, CHUNK)]
        metafunc.parametrize("seeds", parts, ids=[str(part.start) for part in parts])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("racing")
    return Bench(folder)


def trace(bench: Bench, seed: int) -> tuple[int, int]:
    """Of a schedule, all decisions."""
    with schedule(seed) as scheduler:
        run_script(bench, seed)
    return scheduler.trace, scheduler.steps


def test_batches_and_ledger_under_any_schedule(bench, seeds):
    """The same batches, no deadlock, nothing left: two stores, sessions of all plans, reloads."""
    for seed in seeds:
        try:
            trace(bench, seed)
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


def test_a_seed_gives_one_schedule(bench):
    assert trace(bench, 3) == trace(bench, 3)
    assert trace(bench, 3) != trace(bench, 5)
