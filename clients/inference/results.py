"""Where rows that were computed go: a file of numpy or Parquet, or an array of the store."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreExists
from blockstore.extend import StoreExtender
from blockstore.format import EXTEND_FOLDER, NodeType, RowArray
from blockstore.io.files import flush
from blockstore.store import Store, read_rows
from blockstore.writer import StoreWriter
from clients.inference.model import ModelSteps
from clients.inference.plan import BUFFER_BYTES, item_bytes
from loaderd.api.errors import Refused
from preprocess.files.arrow import write_parquet
from preprocess.files.npy import NpyWriter
from preprocess.ingest.contents import as_path
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import PipelineRun
from preprocess.pipeline.work import WorkFolder, check_free, remove_dead
from preprocess.stages.rows import Emit, place_rows

_IN_STORE = "array:"
_FILE = "result"  # in the work folder
Rows = Iterator[NDArray[Any]]


class ResultRun(PipelineRun):
    """The store that is read, and the memory for the order of the result."""

    def __init__(
        self, work: WorkFolder, progress: Progress, store: Store, share: int, writer: StoreWriter
    ) -> None:
        super().__init__(work, progress, writer)
        self.store, self.share = store, share


class Result:
    """A place for rows; `target` is what the work folder is named after."""

    def __init__(self, name: str, target: Path, array: RowArray) -> None:
        """`array`: the rows, in the order in which they are written."""
        self.name, self.target, self.array = name, target, array
        self.num_rows = array.num_rows

    @property
    def num_bytes(self) -> int:
        return self.array.num_rows * self.array.row_bytes

    def write(self, run: ResultRun, rows: Rows) -> None:
        """`rows`: of all nodes of the type, in the order of the store."""
        raise NotImplementedError


class FileResult(Result):
    """A file that appears by one rename."""

    def __init__(self, path: Path, t: NodeType, array: RowArray, split: RowArray | None) -> None:
        """`split`: the nodes whose rows are wanted; None: all."""
        super().__init__(str(path), path, array)
        self._type, self._split = t, split

    def write(self, run: ResultRun, rows: Rows) -> None:
        t = self._type
        ids: NDArray[Any] | None = None
        if self._split is None:
            places = read_rows(run.store, t.original_id)
        else:
            ids = read_rows(run.store, self._split)
            stored = read_rows(run.store, t.store_id)[ids].astype(np.int64) - t.first
            places = np.argsort(stored, kind="stable")
            rows = _chosen(rows, stored[places])
        path = run.path(_FILE)
        path.unlink(missing_ok=True)

        def place(emit: Emit) -> None:
            place_rows(rows, self.array, places, run.share, run.folder, emit, run.progress)

        if self.target.suffix == ".npy":
            shape = (self.array.num_rows, *self.array.row_shape)
            with NpyWriter(path, shape, self.array.dtype) as out:
                place(out.append)
        else:
            write_parquet(path, ids, self.array.row_items, self.array.dtype, place)
        flush(path)
        if os.path.lexists(self.target):
            raise StoreExists(f"{self.target}: appeared while it was computed")
        path.rename(self.target)
        flush(self.target.parent)


def _chosen(pieces: Rows, wanted: NDArray[np.int64]) -> Rows:
    """Rows of numbers that ascend, out of all rows."""
    first = 0
    for piece in pieces:
        low, high = np.searchsorted(wanted, [first, first + piece.shape[0]])
        if low < high:
            yield piece[wanted[low:high] - first]
        first += piece.shape[0]


class ArrayResult(Result):
    """One more array of features in the store."""

    def __init__(self, store: Store, t: NodeType, name: str, array: RowArray) -> None:
        super().__init__(
            f"{_IN_STORE}{name}", store.path.with_name(f"{store.path.name}.infer"), array
        )
        self._type, self._name = t, name

    def write(self, run: ResultRun, rows: Rows) -> None:
        with StoreExtender(run.store.path, BUFFER_BYTES) as extender:
            with (
                extender.rows(self.array) as out,
                run.progress.stage(self.name, self.num_bytes, "B") as stage,
            ):
                for piece in rows:
                    out.append(piece)
                    stage.advance(piece.nbytes)
            manifest = extender.store.manifest
            types = tuple(
                msgspec.structs.replace(t, features={**t.features, self._name: self.array})
                if t.name == self._type.name
                else t
                for t in manifest.types
            )
            extender.commit(msgspec.structs.replace(manifest, types=types))


def find_result(out: str, store: Store, steps: ModelSteps, split: str) -> Result:
    """What `out` names.  Raises Refused, StoreExists."""
    t, dtype = steps.output_type, f"float{8 * item_bytes(steps.dtype)}"
    chosen = _find_split(t, split) if split else None
    if out.startswith(_IN_STORE):
        if chosen is not None:
            raise Refused(f"{out}: found split {split!r}, expected all nodes; leave the split out")
        return _array_result(out.removeprefix(_IN_STORE), store, t, dtype, steps.num_out)
    path = Path(out).absolute()
    if path.suffix not in (".npy", ".parquet"):
        raise Refused(f"{out}: expected FILE.npy, FILE.parquet or array:NAME")
    if chosen is not None and path.suffix == ".npy":
        raise Refused(
            f"{out}: found split {split!r}, expected all nodes; give FILE.parquet, which has ids"
        )
    check_free(path, path)
    if not path.parent.is_dir():
        raise Refused(f"{path.parent}: no such folder; make it, or choose another one")
    rows = t.num_nodes if chosen is None else chosen.num_rows
    return FileResult(path, t, RowArray("rows", dtype, rows, (steps.num_out,)), chosen)


def _find_split(t: NodeType, name: str) -> RowArray:
    if name not in t.splits:
        found = ", ".join(t.splits) or "none"
        raise Refused(f"split {name!r}: expected one of {t.name}: {found}")
    return t.splits[name]


def _array_result(name: str, store: Store, t: NodeType, dtype: str, width: int) -> ArrayResult:
    path = f"nodes/{as_path(t.name)}/features/{as_path(name)}"
    where = f"{store.path}: {_IN_STORE}{name}"
    result = ArrayResult(store, t, name, RowArray(path, dtype, t.num_nodes, (width,), "dense"))
    # what a dead run has moved in goes when the store is extended again
    stray = (store.path / path).exists() and not (store.path / EXTEND_FOLDER).exists()
    if not name or name in t.features or stray:
        remove_dead(result.target)
        raise Refused(f"{where}: expected a name that {t.name} does not have yet; choose another")
    if t.halo is not None:
        raise Refused(
            f"{where}: found copies of rows for hubs and halos, expected a store without; write "
            "FILE.npy instead"
        )
    return result
