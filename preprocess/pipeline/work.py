"""The work folder of a run: a lock, temporary files, and a journal of the finished stages.

For the target `name` it is `.name.work`, beside it.  A run resumes from the folder it finds if the
signature in the journal matches its own inputs, and begins from scratch otherwise.  Files that the
journal does not list come from an interrupted stage, and are removed.
"""

import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from blockstore.errors import OutOfSpace, StoreBusy, StoreError
from blockstore.format import EXTEND_FOLDER, ROOT, array_paths
from blockstore.io import files as on_disk
from blockstore.io.files import flush, flush_below, missing_parents, naming
from blockstore.lock import LOCK, lock_folder
from blockstore.root import read_root
from preprocess.errors import ExecutorLost
from preprocess.files.array_file import held_open, remove_file
from preprocess.files.buckets import SPARE
from preprocess.pipeline.result import StageResult

STORE = "store"  # subfolder in which the new store is built
_JOURNAL = "journal.json"
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's mallopt
_LARGE_BYTES = 1 << 18


class StageRecord(msgspec.Struct, frozen=True):
    took: StageResult
    facts: dict[str, Any] = {}
    arrays: list[str] = []  # paths in the store that the stage wrote

    @property
    def name(self) -> str:
        return self.took.name


class _Journal(msgspec.Struct):
    signature: str
    stages: list[StageRecord] = []
    files: dict[str, int] = {}  # temporary files that later stages need, and their bytes


class WorkFolder(ExitStack):
    """A context manager that holds the folder's lock while it is open.

    The folder is removed on success, and after an error that another attempt would meet again.  If
    the run was stopped, or the disk is full, the files of finished stages stay.  Raises StoreBusy.
    """

    def __init__(self, target: Path, signature: str, fresh: bool) -> None:
        super().__init__()
        give_back_freed()
        self._target = target
        self._made = missing_parents(target)
        self.path = work_path(target)
        self._lock = lock_folder(self.path, target, "writing")
        try:
            for folder in self._made:
                flush(folder.parent)
            self._journal = _Journal(signature) if fresh else self._take_over(signature)
            self._clean()
        except BaseException:
            os.close(self._lock)
            raise
        self.resumed = frozenset(s.name for s in self._journal.stages)
        self._saved = self._journal  # the last journal on disk; before the first, an empty one
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._saving: Future[None] | None = None
        self.push(self._end)

    def find(self, name: str) -> StageRecord | None:
        """The record of a finished stage, or None."""
        return next((s for s in self._journal.stages if s.name == name), None)

    def finish(self, record: StageRecord, made: Iterable[str], spent: Iterable[str]) -> None:
        """Record a finished stage: flush the files it `made`, and remove those that are `spent`.

        If nothing has to be removed, the flush runs in the background, and its errors are raised
        by the next call.
        """
        self._settle()
        files, made = dict(self._journal.files), list(made)
        for name in made:
            files[name] = (self.path / name).stat().st_size
        gone = [name for name in spent if files.pop(name, None) is not None]
        self._journal = _Journal(self._journal.signature, [*self._journal.stages, record], files)
        self._saving = self._pool.submit(self._save, self._journal, made, record.arrays)
        if gone:
            self._settle()
        for name in gone:
            remove_file(self.path / name)

    def holds(self, name: str) -> bool:
        """Whether the journal lists this temporary file of a finished stage."""
        return name in self._journal.files

    @property
    def stages(self) -> list[StageRecord]:
        """Records of all finished stages in order, those of resumed runs included."""
        return self._journal.stages

    def remove(self) -> None:
        """Remove the folder, and the parents that were created for it if they are empty."""
        with held_open(self.path / SPARE):  # free its blocks after the folder has gone
            shutil.rmtree(self.path, ignore_errors=True)
        if not self._target.exists():
            for folder in self._made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()

    def _take_over(self, signature: str) -> _Journal:
        try:
            raw = (self.path / _JOURNAL).read_bytes()
            journal = msgspec.json.decode(raw, type=_Journal)
        except (FileNotFoundError, msgspec.DecodeError):
            return _Journal(signature)
        whole = all(
            (self.path / name).is_file() and (self.path / name).stat().st_size == size
            for name, size in journal.files.items()
        ) and all(  # arrays are missing if the run was killed just after its store was renamed
            (self.path / STORE / name).exists()
            for record in journal.stages
            for name in record.arrays
        )
        return journal if whole and journal.signature == signature else _Journal(signature)

    def _clean(self) -> None:
        """Remove files that no finished stage has recorded; leave an empty SPARE for buckets.

        The work folder of a run that extends the store lies beside it, and cleans itself.
        """
        kept = {LOCK, _JOURNAL, *self._journal.files}
        if self._journal.stages:
            kept |= {STORE, *(path.name for path in self.path.glob(f".{STORE}.*"))}
        for path in self.path.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if (self.path / STORE).is_dir():
            self._clean_store()
        (self.path / SPARE).touch()

    def _clean_store(self) -> None:
        """Remove all but the arrays of finished stages and those that the manifest names.

        After a power loss other files may hold anything, the metadata of parent folders included.
        """
        store = self.path / STORE
        kept = {path for record in self._journal.stages for path in record.arrays}
        with suppress(StoreError):
            kept |= array_paths(read_root(store))
        above = {str(folder) for path in kept for folder in Path(path).parents}
        for inner, folders, files in os.walk(store):
            here = Path(inner).relative_to(store)
            for name in files:
                needed = name == ROOT and (str(here) in above or inner == str(store))
                if not needed and str(here / name) not in kept:
                    Path(inner, name).unlink()
            for name in list(folders):
                path = str(here / name)
                if path not in above:
                    folders.remove(name)  # do not descend: it is kept or removed as a whole
                    if path not in kept and path != EXTEND_FOLDER:
                        shutil.rmtree(Path(inner, name))
        try:
            msgspec.json.decode((store / ROOT).read_bytes())
        except (FileNotFoundError, UnicodeDecodeError, msgspec.DecodeError):
            (store / ROOT).unlink(missing_ok=True)  # no manifest yet: it will be written again

    def _settle(self) -> None:
        """Wait for the pending write; if it failed, return to the older journal and raise."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except BaseException:
            self._journal = self._saved
            raise
        self._saved = self._journal

    def _save(self, journal: _Journal, made: list[str], arrays: list[str]) -> None:
        """Flush all files that the journal lists, and their folders; then write the journal."""
        for name in made:
            flush(self.path / name)
        for name in arrays:  # a folder in a store, or a file of another result
            if (self.path / STORE / name).is_file():
                flush(self.path / STORE / name)
                flush(self.path / STORE)
            else:
                flush_below(self.path / STORE, name)
        flush(self.path)
        self._write(journal)

    def _write(self, journal: _Journal) -> None:
        fresh = self.path / f"{_JOURNAL}.new"
        raw = msgspec.json.encode(journal)
        with naming(fresh, len(raw)):
            fresh.write_bytes(raw)
        flush(fresh)
        fresh.rename(self.path / _JOURNAL)
        flush(self.path)

    def _end(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with suppress(OSError, OutOfSpace):  # a stage that was not recorded is lost, as by a kill
            self._settle()
        self._pool.shutdown()
        worth_keeping = isinstance(
            error, OutOfSpace | OSError | KeyboardInterrupt | SystemExit | ExecutorLost
        )
        if worth_keeping and self._journal.stages and (self.path / _JOURNAL).exists():
            self._clean()
        else:
            self.remove()
        os.close(self._lock)


def give_back_freed() -> None:
    """Make malloc return large arrays to the system when they are freed, so that --mem holds.

    By default, glibc keeps freed arrays of up to 32 MiB in a heap for each thread.  Does nothing
    under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_ARENA_MAX, 2)


def work_path(target: Path) -> Path:
    """The work folder of runs that make `target`."""
    return target.absolute().with_name(f".{target.name}.work")


def check_free(target: Path, *works: Path) -> None:
    """Raises StoreExists if the path of a new store is taken.

    works   targets whose work folders are removed in this case, if they are left by dead runs
    """
    if os.path.lexists(target):
        for name in works:
            remove_dead(name)
    on_disk.check_free(target)


def remove_dead(target: Path) -> None:
    """Remove the work folder of a run that was killed just after its store appeared."""
    work = work_path(target)
    if work.is_dir():
        try:
            lock = lock_folder(work, target, "writing")
        except StoreBusy:
            return
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def sign(facts: Any, files: bytes) -> str:
    """A hash (32 hex digits) of `facts` and of the digest of the source's files."""
    total = hashlib.blake2b(msgspec.json.encode(facts, order="sorted"), digest_size=16)
    total.update(files)
    return total.hexdigest()
