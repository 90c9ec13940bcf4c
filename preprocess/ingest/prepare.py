"""Resumable steps that a source runs before its nodes and edges can be counted."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from blockstore.io.files import flush, flush_tree, missing_parents
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import PipelineRun
from preprocess.pipeline.work import WorkFolder, sign
from preprocess.sources.source import Source
from preprocess.sources.sourcefiles import SourceFiles

_PREPARATION = 1  # increased when steps or their files change: older folders are not resumed


@dataclass(eq=False)
class Preparation(PipelineRun):
    """Recorded steps in a work folder of their own, which is removed once the store exists."""

    mem_bytes: int


@runtime_checkable
class Preparable(Protocol):
    """A source that needs more than opening its files, such as mapping the ids of nodes.

    Until then its counts are upper bounds, its splits are missing, and no edges may be read.
    """

    def prepare(self, preparation: Preparation) -> None:
        """Prepare within the memory, or resume what an earlier run has done.  Raises BadInput."""

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """Write the user's ids of nodes that no array of the store holds, one file per type."""


@contextmanager
def prepared(
    source: Source,
    target: Path,
    mem_bytes: int,
    progress: Progress,
    fresh: bool,
    files: SourceFiles,
) -> Iterator[None]:
    """Context in which the source is prepared; its temporary files lie beside the target.

    files   state of the source's files when it was opened

    Raises BadInput, BudgetTooSmall, StoreBusy, OutOfSpace.
    """
    if not isinstance(source, Preparable):
        yield
        return
    facts = {"preparation": _PREPARATION, "layout": source.layout}
    signature = sign(facts, files.digest())
    # a work folder of its own, so that a run with other options can reuse the preparation
    with WorkFolder(preparation_of(target), signature, fresh) as work, files.unchanged():
        source.prepare(Preparation(work, progress, mem_bytes))
        with keys_beside(target, lambda folder: source.write_keys(folder, progress)):
            yield


@contextmanager
def keys_beside(target: Path, write: Callable[[Path], None]) -> Iterator[None]:
    """Context in which the user's ids are on disk; they are removed if no store is made.

    write   creates the folder and its files, if there are any to write
    """
    folder = keys_of(target)
    made = missing_parents(folder)
    try:
        write(folder)
        if folder.is_dir():
            flush_tree(folder)
            for changed in (folder, *made):  # a new name is durable after an fsync of its parent
                flush(changed.parent)
        yield
    except BaseException:
        if not target.exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def preparation_of(target: Path) -> Path:
    """The name from which that of a preparation's work folder is made."""
    return target.with_name(f"{target.name}.prepared")


def keys_of(target: Path) -> Path:
    """The folder beside a store with the user's ids."""
    return target.with_name(f"{target.name}.keys")
