"""What a work folder takes over of a run that stopped, and when it begins from scratch."""

import os
from pathlib import Path

import pytest

from preprocess.pipeline.result import StageResult
from preprocess.pipeline.work import StageRecord, WorkFolder

RECORD = StageRecord(StageResult("first", 0, 0, 0.0))


def stopped_run(target: Path) -> Path:
    """A run that was interrupted after its first stage; returns the file that the stage made."""
    work = WorkFolder(target, "signature", fresh=False)
    made = work.path / "made"
    made.write_bytes(b"x" * 100)
    work.finish(RECORD, ["made"], [])
    stop = KeyboardInterrupt()
    work.__exit__(type(stop), stop, None)
    return made


def resumed(target: Path, signature: str = "signature", fresh: bool = False) -> frozenset[str]:
    with WorkFolder(target, signature, fresh) as work:
        return work.resumed


def test_finished_stages_are_taken_over_once(tmp_path):
    stopped_run(tmp_path / "store")
    assert resumed(tmp_path / "store") == {"first"}
    assert resumed(tmp_path / "store") == set()


@pytest.mark.parametrize("size", [0, 99, 101])
def test_a_file_of_another_size_is_not_taken_over(tmp_path, size):
    made = stopped_run(tmp_path / "store")
    os.truncate(made, size)
    assert resumed(tmp_path / "store") == set()


def test_a_file_that_has_gone_is_not_taken_over(tmp_path):
    stopped_run(tmp_path / "store").unlink()
    assert resumed(tmp_path / "store") == set()


def test_other_inputs_and_a_fresh_run_take_nothing_over(tmp_path):
    stopped_run(tmp_path / "store")
    assert resumed(tmp_path / "store", "another") == set()
    stopped_run(tmp_path / "store")
    assert resumed(tmp_path / "store", fresh=True) == set()


def test_files_that_no_stage_vouches_for_are_removed(tmp_path):
    made = stopped_run(tmp_path / "store")
    made.with_name("cut-off").write_bytes(b"y")
    with WorkFolder(tmp_path / "store", "signature", fresh=False) as work:
        assert work.holds("made")
        assert not (work.path / "cut-off").exists()


def test_the_journal_is_written_after_all_that_it_vouches_for(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(
        "preprocess.pipeline.work.flush", lambda path: order.append(Path(path).name)
    )
    monkeypatch.setattr("preprocess.pipeline.work.flush_below", lambda _, name: order.append(name))
    with WorkFolder(tmp_path / "store", "signature", fresh=False) as work:
        order.clear()
        for name in ("made", "more"):
            (work.path / name).write_bytes(b"x")
        work.finish(RECORD, ["made", "more"], [])
        folder = work.path.name
    record = StageRecord(StageResult("second", 0, 0, 0.0), arrays=["nodes/x"])
    assert order == ["made", "more", folder, "journal.json.new", folder]
    order.clear()
    with WorkFolder(tmp_path / "other", "signature", fresh=False) as work:
        order.clear()
        work.finish(record, [], [])
        folder = work.path.name
    assert order == ["nodes/x", folder, "journal.json.new", folder]
