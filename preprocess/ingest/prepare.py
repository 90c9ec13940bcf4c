"""What a source does before its nodes and edges can be counted: steps that a stopped run keeps."""

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

_PREPARATION = 1  # goes up when steps or their files change: nothing older is taken over


@dataclass(eq=False)
class Preparation(PipelineRun):
    """Steps that are recorded, in a folder that is gone when the store is there."""

    mem_bytes: int


@runtime_checkable
class Preparable(Protocol):
    """A source that has more to do than to open its files, such as to map ids of nodes.

    Before it is prepared its counts may be too high, and its splits are missing; no edges are read.
    """

    def prepare(self, preparation: Preparation) -> None:
        """Do it, within the memory, or find what an earlier run has done.  Raises BadInput."""

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """Write the owner's ids of nodes that no array of the store holds, a file a type."""


@contextmanager
def prepared(
    source: Source,
    target: Path,
    mem_bytes: int,
    progress: Progress,
    fresh: bool,
    files: SourceFiles,
) -> Iterator[None]:
    """A source is ready to be read, inside; its files lie in a work folder beside the target.

    files   of the source, as they were when it was opened

    Raises BadInput, BudgetTooSmall, StoreBusy, OutOfSpace.
    """
    if not isinstance(source, Preparable):
        yield
        return
    facts = {"preparation": _PREPARATION, "layout": source.layout}
    signature = sign(facts, files.digest())
    # a folder of its own: what is found here stays when the command is given with other options
    with WorkFolder(preparation_of(target), signature, fresh) as work, files.unchanged():
        source.prepare(Preparation(work, progress, mem_bytes))
        with keys_beside(target, lambda folder: source.write_keys(folder, progress)):
            yield


@contextmanager
def keys_beside(target: Path, write: Callable[[Path], None]) -> Iterator[None]:
    """The owner's ids are on disk, inside; if no store comes of it they are removed.

    write   makes the folder, where there is something to put there
    """
    folder = keys_of(target)
    made = missing_parents(folder)
    try:
        write(folder)
        if folder.is_dir():
            flush_tree(folder)
            for changed in (folder, *made):  # a new name is on disk after its parent's fsync
                flush(changed.parent)
        yield
    except BaseException:
        if not target.exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def preparation_of(target: Path) -> Path:
    """What the work folder of a preparation is named after."""
    return target.with_name(f"{target.name}.prepared")


def keys_of(target: Path) -> Path:
    """The folder of the owner's ids, beside a store."""
    return target.with_name(f"{target.name}.keys")
