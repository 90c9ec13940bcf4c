"""Inference that is killed inside each stage: the same call goes on, and gives the same bytes."""

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")

from blockstore.errors import StoreExists
from blockstore.extend import StoreExtender
from blockstore.store import open_store, read_rows
from blockstore.verify import verify_store
from blockstore.writer import GraphWriter, RowsWriter
from clients.inference import rows
from loaderd.api.errors import Refused
from preprocess.files.npy import NpyWriter
from preprocess.pipeline.work import WorkFolder
from tests.clients.inference.test_inference import infer, make_model, minimum
from tests.effort import tries

# each call of these is an event, once before it and once after it
EVENTS = [
    (RowsWriter, "append"), (RowsWriter, "close"), (NpyWriter, "append"), (StoreExtender, "commit"),
    (GraphWriter, "append"), (WorkFolder, "finish"), (Path, "rename"), (rows.RowCursor, "take"),
]  # fmt: skip


def watch(patch: pytest.MonkeyPatch, event: Callable[[str], None]) -> None:
    """Call `event` with what comes, before and after each of `EVENTS`."""

    def watched(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            event(f"before {name}")
            result = real(*arguments, **options)
            event(f"after {name}")
            return result

        return call

    for owner, name in EVENTS:
        patch.setattr(owner, name, watched(getattr(owner, name), f"{owner.__name__}.{name}"))


def events_of(run: Callable[[], object]) -> list[str]:
    """What happens in a run, in order."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, found.append)
        run()
    return found


def killed_at(run: Callable[[], object], number: int) -> bool:
    """Whether a process that runs it was killed at an event; otherwise it had ended before."""
    child = os.fork()
    if child == 0:
        code, seen = 1, 0
        try:

            def event(_what: str) -> None:
                nonlocal seen
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

            with pytest.MonkeyPatch.context() as patch:
                watch(patch, event)
                run()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


def moments(events: list[str]) -> list[int]:
    """In each stage an event between and the last one, or five; some of the end."""
    over = [i for i, what in enumerate(events) if what == "after WorkFolder.finish"]
    chosen, begun = set[int](), 0
    for end in over:
        some = (end, (begun + 2 * end) // 3, begun, (2 * begun + end) // 3, end - 1)
        chosen |= {*some[: tries(2, 5)]}
        begun = end + 1
    return sorted(chosen | set(range(begun, len(events), max(1, (len(events) - begun) // 5))))


@pytest.fixture
def store(graph: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(graph.store, tmp_path / "store"))


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("kind", "suffix", "name"),
    [
        ("sage", "npy", "sparse"),
        pytest.param("gat", "parquet", "graph", marks=pytest.mark.long),
        pytest.param("sage", "npy", "full", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_kill_in_each_stage_changes_no_byte(request, tmp_path, kind, suffix, name):
    """Killed at each of some moments and run again, which is killed later; then it may end."""
    graph = request.getfixturevalue(name)
    model = make_model(kind, num_hidden=32)
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"y.{suffix}"
    mem = minimum(model, graph.store, whole) + (100 << 10 if kind == "sage" else 1 << 20)
    events = events_of(lambda: infer(model, graph.store, whole, mem_bytes=mem))
    assert {what.split()[1] for what in events} > {"RowsWriter.append", "WorkFolder.finish"}
    stages, kills = set(), 0
    for number in moments(events):
        kills += killed_at(lambda: infer(model, graph.store, out, mem_bytes=mem), number)
        work = tmp_path / f".{out.name}.work"
        stages.add((work / "journal.json").exists())
        if not out.exists():  # the run that goes on is killed, too
            killed_at(lambda: infer(model, graph.store, out, mem_bytes=mem), 1 + number % 7)
        if out.exists():
            with pytest.raises(StoreExists):
                infer(model, graph.store, out, mem_bytes=mem)
        else:
            result = infer(model, graph.store, out, mem_bytes=mem)
            names = [s.name for s in result.stages]
            ahead = ["edges by source"] if name == "sparse" else []
            assert names[:-1] == ["nodes with edges", *ahead, "layer 1 of 2", "layer 2 of 2"]
        assert out.read_bytes() == whole.read_bytes(), events[number]
        out.unlink()
        assert [p.name for p in tmp_path.iterdir()] == [whole.name], events[number]
    assert kills >= 12
    assert stages == {False, True}
    rows_there = np.load(whole) if suffix == "npy" else np.stack(pq.read_table(whole)["rows"])
    assert rows_there.shape == (4000, 5)


@pytest.mark.usefixtures("tight")
@pytest.mark.long
def test_a_kill_while_the_store_gets_an_array_leaves_it_whole(store, tmp_path):
    model = make_model("gcn")
    infer(model, store, tmp_path / "y.npy")
    (t,) = open_store(store).manifest.types
    expected = np.load(tmp_path / "y.npy")[read_rows(open_store(store), t.original_id)]
    events, kills = events_of(lambda: infer(model, store, "array:first")), 0
    for number in moments(events, more=True):
        name = f"y{number}"
        kills += killed_at(lambda name=name: infer(model, store, f"array:{name}"), number)
        verify_store(store)
        there = name in open_store(store).manifest.types[0].features
        if there:
            with pytest.raises(Refused, match="does not have yet"):
                infer(model, store, f"array:{name}")
        else:
            infer(model, store, f"array:{name}")
        opened = open_store(store)
        found = read_rows(opened, opened.manifest.types[0].features[name])
        np.testing.assert_array_equal(found, expected)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "y.npy"], events[number]
    assert kills >= 12
