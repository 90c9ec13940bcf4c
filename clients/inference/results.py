"""Outputs for computed rows: a NumPy or Parquet file, or an array of the store."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.extend import StoreExtender
from blockstore.format import EXTEND_FOLDER, NodeType, RowArray
from blockstore.io.files import flush, take_name
from blockstore.store import Store, read_rows
from blockstore.writer import StoreWriter
from clients.inference.model import ModelSteps
from clients.inference.plan import BUFFER_BYTES
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


class InferenceRun(PipelineRun):
    """A run with the input store, the rows of finished layers, and memory for the result."""

    def __init__(
        self, work: WorkFolder, progress: Progress, store: Store, hidden: StoreWriter, share: int
    ) -> None:
        super().__init__(work, progress, writer=hidden)
        self.store, self.hidden, self.share = store, hidden, share


class Result(NamedTuple):
    """An output for rows."""

    name: str
    target: Path  # the work folder is named after it
    array: RowArray  # the rows, in the order in which they are written
    write: Callable[[InferenceRun, Rows], None]  # rows of all nodes, in the order of the store


def _write_file(
    path: Path, t: NodeType, array: RowArray, split: RowArray | None, run: InferenceRun, rows: Rows
) -> None:
    """Write a file, and rename it into place.  `split`: nodes whose rows are wanted; None: all."""
    ids: NDArray[Any] | None = None
    if split is None:
        places = read_rows(run.store, t.original_id)
    else:
        ids = read_rows(run.store, split)
        stored = read_rows(run.store, t.store_id)[ids].astype(np.int64) - t.first
        places = np.argsort(stored, kind="stable")
        rows = _chosen(rows, stored[places])
    made = run.path(_FILE)
    made.unlink(missing_ok=True)

    def place(emit: Emit) -> None:
        place_rows(rows, array, places, run.share, run.folder, emit, run.progress)

    if path.suffix == ".npy":
        with NpyWriter(made, (array.num_rows, *array.row_shape), array.dtype) as out:
            place(out.append)
    else:
        write_parquet(made, ids, array.row_items, array.dtype, place)
    flush(made)
    take_name(made, path)


def _chosen(pieces: Rows, wanted: NDArray[np.int64]) -> Rows:
    """The wanted rows (ascending numbers) out of the pieces of all rows."""
    first = 0
    for piece in pieces:
        low, high = np.searchsorted(wanted, [first, first + piece.shape[0]])
        if low < high:
            yield piece[wanted[low:high] - first]
        first += piece.shape[0]


def _write_array(name: str, array: RowArray, t: NodeType, run: InferenceRun, rows: Rows) -> None:
    """Add an array of features to the store."""
    with StoreExtender(run.store.path, BUFFER_BYTES) as extender:
        with (
            extender.rows(array) as out,
            run.progress.stage(name, array.num_rows * array.row_bytes, "B") as stage,
        ):
            for piece in rows:
                out.append(piece)
                stage.advance(piece.nbytes)
        manifest = extender.store.manifest
        types = tuple(
            msgspec.structs.replace(known, features={**known.features, name: array})
            if known.name == t.name
            else known
            for known in manifest.types
        )
        extender.commit(msgspec.structs.replace(manifest, types=types))


def find_result(out: str, store: Store, steps: ModelSteps, split: str) -> Result:
    """The output that `out` names.  Raises Refused, StoreExists."""
    t, dtype = steps.output_type, steps.numpy_dtype.name
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
    array = RowArray("rows", dtype, rows, (steps.num_out,))
    return Result(str(path), path, array, partial(_write_file, path, t, array, chosen))


def _find_split(t: NodeType, name: str) -> RowArray:
    if name not in t.splits:
        found = ", ".join(t.splits) or "none"
        raise Refused(f"split {name!r}: expected one of {t.name}: {found}")
    return t.splits[name]


def _array_result(name: str, store: Store, t: NodeType, dtype: str, width: int) -> Result:
    path = f"nodes/{as_path(t.name)}/features/{as_path(name)}"
    where = f"{store.path}: {_IN_STORE}{name}"
    array = RowArray(path, dtype, t.num_nodes, (width,), "dense")
    target = store.path.with_name(f"{store.path.name}.infer")
    # files that a dead run moved in are removed when the store is extended again
    stray = (store.path / path).exists() and not (store.path / EXTEND_FOLDER).exists()
    if not name or name in t.features or stray:
        remove_dead(target)
        raise Refused(f"{where}: expected a name that {t.name} does not have yet; choose another")
    if t.halo is not None:
        raise Refused(
            f"{where}: found copies of rows for hubs and halos, expected a store without; write "
            "FILE.npy instead"
        )
    return Result(f"{_IN_STORE}{name}", target, array, partial(_write_array, name, array, t))
