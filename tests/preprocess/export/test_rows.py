"""Rows written dense or sparse, in pieces of any size."""

from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from blockstore.format import RowArray
from preprocess.export import edges as export
from preprocess.export.edges import ExportRun, write_csr, write_dense
from preprocess.pipeline.work import WorkFolder
from tests.preprocess.quiet import QUIET

ROWS = np.random.default_rng(1).integers(-3, 4, (40, 7)).astype(np.float32)
ROWS[ROWS < 1] = 0
ROWS[5:9] = 0
ARRAY = RowArray("x", "float32", 40, (7,))


def run_in(folder: Path) -> ExportRun:
    work = WorkFolder(folder / "out", "", True)
    return ExportRun(work, QUIET, None, 1 << 20, 1 << 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("step_bytes", [28, 100, 1 << 20])
@pytest.mark.parametrize("given", [1, 9, 40])
def test_a_sparse_matrix_is_the_dense_one(tmp_path, monkeypatch, step_bytes, given):
    monkeypatch.setattr(export, "_STEP_BYTES", step_bytes)

    def place(run, emit) -> None:
        for first in range(0, 40, given):
            emit(ROWS[first : first + given])

    run = run_in(tmp_path)
    write_csr(lambda part: f"x_{part}", ARRAY, place, run)
    write_dense("dense", ARRAY, 40, place, run)
    indptr, indices, data = (np.load(run.result / f"x_{p}.npy") for p in export.CSR_PARTS)
    assert (indptr.dtype, indices.dtype, data.dtype) == (np.int64, np.int32, np.float32)
    found = sparse.csr_matrix((data, indices, indptr), (40, 7))
    assert found.toarray().tolist() == ROWS.tolist()
    assert np.load(run.result / "dense.npy").tolist() == ROWS.tolist()
