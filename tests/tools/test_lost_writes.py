"""Simulated power loss: every command survives it, and the tool finds an order that does not."""

import ctypes
import random
from pathlib import Path

import pytest

from preprocess.pipeline.work import WorkFolder
from tests.effort import tries
from tools.lost_writes import Command, Loss, Recorder, commands, lose, write_source
from tools.tree import file_digests

LONG = ("ingest --hops", "hops", "repartition")
MAX_POINTS = 600  # until the first that is wrong, of which one in 10 to 40 was
POINTS = {
    "ingest": tries(6, 24), "ingest --hops": 3, "derive": tries(6, 24), "hops": 4, "repartition": 3
}  # fmt: skip


def command(folder: Path, name: str) -> Command:
    return next(c for c in commands(write_source(folder / "source")) if c.name == name)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.mark.parametrize(
    "name",
    ["ingest", "derive", *(pytest.param(n, marks=pytest.mark.long) for n in LONG)],
)
def test_a_store_is_whole_absent_or_resumable_after_any_loss(tmp_path: Path, name: str):
    found = lose(command(tmp_path, name), tmp_path / "run", POINTS[name], 7)
    assert found["different"] > POINTS[name] // 4


def test_a_journal_that_is_written_before_what_it_names_is_found(tmp_path: Path, monkeypatch):
    """The order of fsync and rename is what these tests hold."""
    monkeypatch.setattr(WorkFolder, "_save", lambda self, journal, *_: self._write(journal))
    with pytest.raises(SystemExit, match=r"ingest: point [0-9]+, entry [0-9]+ of "):
        lose(command(tmp_path, "ingest"), tmp_path / "run", MAX_POINTS, 0)


def test_a_folder_that_gets_the_inode_of_a_file_is_not_taken_for_it(tmp_path: Path):
    """Two threads remove the one and make the other between two snapshots."""
    libc = ctypes.CDLL(None)  # calls that no audit hook hears, so that no snapshot is taken
    root = tmp_path / "recorded"
    root.mkdir()
    with Recorder(root) as recorder:
        for name in ("a", "b", "c"):
            (root / name).write_text(name)
            (root / "other").write_text(name)  # the snapshot that finds the file
            inode = (root / name).stat().st_ino
            assert libc.unlink(bytes(root / name)) == 0
            assert libc.mkdir(bytes(root / f"folder-{name}"), 0o700) == 0
            assert (root / f"folder-{name}").stat().st_ino != inode
            (root / f"folder-{name}" / "inner").write_text(name)
    Loss(recorder, len(recorder.log)).make(tmp_path / "replayed", 1, random.Random(0))
    assert file_digests(root) == file_digests(tmp_path / "replayed")
