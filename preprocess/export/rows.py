"""Rows of a store on their way into npy files: as they are written, dense or sparse."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray
from blockstore.store import Store, numpy_dtype, read_rows, scan_rows
from preprocess.files.npy import NpyWriter
from preprocess.files.store import to_floats
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import PipelineRun, Stage
from preprocess.pipeline.work import WorkFolder
from preprocess.sources.plain_names import CSR, CSR_PARTS
from preprocess.stages.rows import Emit

SCAN_BYTES = 4 << 20
_STEP_BYTES = 1 << 20  # that are converted, or looked through for zeros, at a time


class TypeIds(NamedTuple):
    """A node type: store id of its first node, and the original id of each."""

    first: int
    original: NDArray[Any]


class ExportRun(PipelineRun):
    """The store that is read, and the memory for it."""

    def __init__(
        self, work: WorkFolder, progress: Progress, store: Store, mem_bytes: int, share: int
    ) -> None:
        """`share`: bytes of memory for chunks and buckets."""
        super().__init__(work, progress)
        self.store, self.mem_bytes, self.share = store, mem_bytes, share
        self._ids: dict[str, TypeIds] = {}
        self.result.mkdir(exist_ok=True)

    def ids(self, name: str) -> TypeIds:
        """Of a type; they stay in memory."""
        if name not in self._ids:
            t = next(t for t in self.store.manifest.types if t.name == name)
            self._ids[name] = TypeIds(t.first, read_rows(self.store, t.original_id))
        return self._ids[name]


ExportStage = Stage[ExportRun]


def written_dtype(array: RowArray) -> np.dtype[Any]:
    """Of an array in its npy file: bfloat16 and scaled int8 become float32."""
    wide = array.dtype == "bfloat16" or array.scale_path
    return np.dtype(np.float32) if wide else numpy_dtype(array.dtype)


def written_bytes(array: RowArray) -> int:
    """Of an npy file of the array, dense."""
    return array.num_rows * array.row_items * written_dtype(array).itemsize


def write_dense(
    run: ExportRun, stem: str, array: RowArray, num_rows: int, place: Callable[[Emit], None]
) -> None:
    """`<stem>.npy`; `place` hands over the rows in their order."""
    shape = (num_rows, *array.row_shape)
    with NpyWriter(run.result / f"{stem}.npy", shape, written_dtype(array)) as out:
        steps = _steps(run, array)

        def emit(rows: NDArray[Any]) -> None:
            for part in steps(rows):
                out.append(part)

        place(emit)


def write_csr(
    run: ExportRun, stem: Callable[[str], str], array: RowArray, place: Callable[[Emit], None]
) -> None:
    """Dense rows as the CSR matrix that they came from; zeros are not kept.

    stem   of the file of a part
    """
    nnz = 0
    paths = [run.result / f"{stem(part)}.npy" for part in CSR_PARTS]
    with (
        NpyWriter(paths[0], (array.num_rows + 1,), np.int64) as indptr,
        NpyWriter(paths[1], None, np.int32) as indices,
        NpyWriter(paths[2], None, written_dtype(array)) as data,
    ):
        indptr.append(np.zeros(1, np.int64))
        steps = _steps(run, array)

        def emit(rows: NDArray[Any]) -> None:
            nonlocal nnz
            for part in steps(rows):
                row, column = np.nonzero(part)
                indptr.append(nnz + np.cumsum(np.bincount(row, minlength=part.shape[0])))
                indices.append(column.astype(np.int32))
                data.append(part[row, column])
                nnz += row.size

        place(emit)
    meta = {"shape": [array.num_rows, array.row_shape[0]], "nnz": nnz}
    (run.result / f"{stem(CSR)}.json").write_bytes(msgspec.json.encode(meta))


def copy_rows(stem: str, array: RowArray, run: ExportRun) -> None:
    """Rows in the order in which they are stored."""

    def place(emit: Emit) -> None:
        for _, rows in scan_rows(run.store, array, SCAN_BYTES):
            emit(rows)

    write_dense(run, stem, array, array.num_rows, place)


def _steps(run: ExportRun, array: RowArray) -> Callable[[NDArray[Any]], Iterator[NDArray[Any]]]:
    """Rows as they are written, some at a time."""
    dtype = written_dtype(array)
    step = max(1, _STEP_BYTES // max(1, array.row_items * dtype.itemsize))
    scale = run.store.scale(array).reshape(array.row_shape) if array.scale_path else None

    def steps(rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        for first in range(0, rows.shape[0], step):
            some = rows[first : first + step]
            yield some if some.dtype == dtype else to_floats(some, array, scale)

    return steps
