"""The work folder of an ingest: a lock, temporary files, a journal of the stages that are over.

Beside the target `name` it is `.name.work`.  A run that finds one takes it over where the journal
has the signature of its own inputs, and begins from scratch otherwise.  Files that the journal does
not name are of a stage that was interrupted: they are removed.
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

STORE = "store"  # the store to be, inside the work folder
_JOURNAL = "journal.json"
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's mallopt
_LARGE_BYTES = 1 << 18


class StageRecord(msgspec.Struct, frozen=True):
    took: StageResult
    facts: dict[str, Any] = {}
    arrays: list[str] = []  # paths in the store of what it wrote there

    @property
    def name(self) -> str:
        return self.took.name


class _Journal(msgspec.Struct):
    signature: str
    stages: list[StageRecord] = []
    files: dict[str, int] = {}  # temporary files that later stages need, and their bytes


class WorkFolder(ExitStack):
    """A context manager: locked while it is open.

    Leaving it after success or for an error that another attempt would meet again removes it; where
    the run was stopped, or the disk is full, what finished stages made stays.  Raises StoreBusy.
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
        self._saved = self._journal  # what is on disk, or nothing yet
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._saving: Future[None] | None = None
        self.push(self._end)

    def find(self, name: str) -> StageRecord | None:
        """The record of a stage that is over."""
        return next((s for s in self._journal.stages if s.name == name), None)

    def finish(self, record: StageRecord, made: Iterable[str], spent: Iterable[str]) -> None:
        """A stage is over: what it made is flushed to disk, what nobody needs is removed.

        Where nothing is to be removed the next stage need not wait for the disk: errors are raised
        by the next call then.
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
        """Whether a temporary file of a finished stage is there."""
        return name in self._journal.files

    @property
    def stages(self) -> list[StageRecord]:
        """Of this run and those that it goes on with, in order."""
        return self._journal.stages

    def remove(self) -> None:
        """Everything, the folders that were made for it too if they are empty."""
        with held_open(self.path / SPARE):  # its blocks are freed when the folder has gone
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
        ) and all(  # of a run that was killed as its store had just taken its name, there is none
            (self.path / STORE / name).exists()
            for record in journal.stages
            for name in record.arrays
        )
        return journal if whole and journal.signature == signature else _Journal(signature)

    def _clean(self) -> None:
        """Remove what no finished stage vouches for; files of buckets may go on as SPARE.

        Beside the store lies the work folder of what extends it, which cleans itself.
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
        """Keep the arrays of finished stages, and those that the manifest names.

        After a power loss the others may hold anything, also the metadata of folders above them.
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
                    folders.remove(name)  # it is kept whole, or not at all
                    if path not in kept and path != EXTEND_FOLDER:
                        shutil.rmtree(Path(inner, name))
        try:
            msgspec.json.decode((store / ROOT).read_bytes())
        except (FileNotFoundError, UnicodeDecodeError, msgspec.DecodeError):
            (store / ROOT).unlink(missing_ok=True)  # it held nothing, or the manifest that comes

    def _settle(self) -> None:
        """The journal on disk is that in memory: where it could not be written, an older one."""
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
        """All that the journal vouches for is on disk before it is, names too."""
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
        with suppress(OSError, OutOfSpace):  # what it could not say did not happen, as after a kill
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
    """So that --mem bounds what the process holds, large arrays are unmapped when they are freed.

    Left alone, glibc keeps freed arrays of up to 32 MiB in heaps, one for each thread.  Nothing
    happens under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_ARENA_MAX, 2)


def work_path(target: Path) -> Path:
    """The work folder of runs that make `target`."""
    return target.absolute().with_name(f".{target.name}.work")


def check_free(target: Path, *works: Path) -> None:
    """Raises StoreExists: there is something under the name of a store that is to be made.

    works   what work folders of its runs are named after: those of dead runs are removed then
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
    """32 hex digits over `facts` and what `SourceFiles.digest` says of the files."""
    total = hashlib.blake2b(msgspec.json.encode(facts, order="sorted"), digest_size=16)
    total.update(files)
    return total.hexdigest()
