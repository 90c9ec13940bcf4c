"""One tensor of a file by its place: the same rows as torch gives, and torch does not stay."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from preprocess.errors import BadInput
from preprocess.files.strided import Held, Placed, StridedRows
from preprocess.files.torchplaces import open_tensor

WHOLE = torch.arange(24, dtype=torch.int32).reshape(6, 4)


@pytest.mark.parametrize(
    "tensor",
    [WHOLE, WHOLE.t(), WHOLE[1::2, 2:], WHOLE[:, 0], WHOLE[3:4].expand(5, 4), WHOLE.bool(),
     WHOLE.to(torch.bfloat16), WHOLE.double()],
)  # fmt: skip
def test_rows_are_those_of_the_tensor(tmp_path: Path, tensor: Any):
    torch.save(tensor, tmp_path / "a.pt")
    array = open_tensor(tmp_path / "a.pt")
    assert isinstance(array, Placed)
    rows = StridedRows(tmp_path / "a.pt", array, "a")
    found = np.concatenate([p.copy() for p in rows.pieces(0, rows.num_rows, 2)])
    expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    assert found.dtype == expected.numpy().dtype
    assert np.array_equal(found, expected.numpy())


def in_big_endian(path: Path) -> None:
    """Rewrite a file of 8-byte items as a machine of the other byte order writes it."""
    with ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with ZipFile(path, "w") as file:
        for name, raw in members.items():
            if "/data/" in name:
                raw = np.frombuffer(raw, np.int64).byteswap().tobytes()
            file.writestr(name, b"big" if name.endswith("/byteorder") else raw)


@pytest.mark.parametrize("way", ["old", "array", "empty", "other order", "negative"])
def test_what_does_not_lie_in_the_file_is_held(tmp_path: Path, way: str):
    path = tmp_path / "a.pt"
    values: Any = torch.arange(6).reshape(2, 3)
    if way == "old":
        torch.save(values, path, _use_new_zipfile_serialization=False)
    elif way == "array":
        torch.save(values.numpy(), path)
    elif way == "empty":
        values = values[:0]
        torch.save(values, path)
    elif way == "negative":
        values = torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag  # its sign is a flag, not in the file
        torch.save(values, path)
        values = values.resolve_neg()
    else:
        torch.save(values, path)
        in_big_endian(path)
    array = open_tensor(path)
    assert array == Held(values.numpy().dtype.str, tuple(values.shape), values.numpy().tobytes())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.ones(1)], "a.pt: found a list, expected one tensor"),
        (torch.eye(2).to_sparse(), "a.pt: found a Tensor, expected one tensor"),
        (
            torch.ones(2).to(torch.float8_e5m2),
            "a.pt: found items of torch.float8_e5m2",
        ),
        (np.array(["a"]), "a.pt: found items of <U1, expected numbers"),
    ],
)
def test_what_is_no_tensor_is_refused(tmp_path: Path, value: Any, words: str):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(BadInput) as caught:
        open_tensor(tmp_path / "a.pt")
    assert words in str(caught.value)


def test_torch_is_loaded_by_another_process(tmp_path: Path):
    torch.save(WHOLE, tmp_path / "a.pt")
    code = (
        "import sys; from pathlib import Path\n"
        "from preprocess.files.torchplaces import open_tensor\n"
        f"print(open_tensor(Path({str(tmp_path / 'a.pt')!r})).shape, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(6, 4) False\n"
