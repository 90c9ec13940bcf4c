"""Small torch files: the same values from either process, and torch does not stay."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from preprocess.errors import BadInput
from preprocess.files.torchapart import load_apart

ROOT = Path(__file__).resolve().parents[3]
_READ = """
import json, sys
from pathlib import Path
import numpy as np
from preprocess.errors import BadInput
from preprocess.files.torchapart import load_apart
sys.executable = sys.argv[2] or sys.executable
try:
    found = load_apart(Path(sys.argv[1]))
    shown = {k: [str(v.dtype), v.shape, v.tolist()] if isinstance(v, np.ndarray) else v
             for k, v in found.items()}
except BadInput as error:
    shown = str(error)
print(json.dumps([shown, "torch" in sys.modules]))
"""
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
ARRAYS = arrays_of.arrays(
    st.sampled_from([np.int64, np.uint8, np.float32, np.float16, np.bool_]),
    arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
VALUES = st.recursive(
    SCALARS | ARRAYS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3)
)


def read_elsewhere(path: Path, executable: str = "") -> Any:
    """What a process without torch gets, and whether it has torch afterwards."""
    command = [sys.executable, "-c", _READ, str(path), executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(done.stdout)


@given(VALUES)
def test_values_arrive_as_they_are(tmp_path_factory: pytest.TempPathFactory, value: Any):
    path = tmp_path_factory.mktemp("torch") / "value.pt"
    torch.save(value, path)
    same(load_apart(path), value)


def same(found: Any, value: Any) -> None:
    """Equal, of the same types, shapes and dtypes."""
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.tobytes() == value.tobytes()
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for name, held in value.items():
            same(found[name], held)
    elif isinstance(value, list):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            same(one, other)
    else:
        assert found == value or (found != found and value != value)


def test_torch_is_loaded_by_another_process(tmp_path: Path):
    path = tmp_path / "file with ä space.pt"
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).T
    torch.save({"a": tensor, "b": np.array([0.5]), "c": 7, "d": torch.ones(1).bfloat16()}, path)
    shown = {"a": ["int32", [3, 2], [[0, 3], [1, 4], [2, 5]]], "b": ["float64", [1], [0.5]],
             "c": 7, "d": ["float32", [1], [1.0]]}  # fmt: skip
    assert read_elsewhere(path) == [shown, False]


def test_where_no_process_can_be_had_this_one_reads(tmp_path: Path):
    torch.save({"a": 1}, tmp_path / "a.pt")
    assert read_elsewhere(tmp_path / "a.pt", "/bin/false") == [{"a": 1}, True]


def test_what_is_wrong_is_said_by_either(tmp_path: Path):
    path = tmp_path / "a.pt"
    torch.save({"a": Path("b")}, path)
    with pytest.raises(BadInput) as caught:
        load_apart(path)
    assert read_elsewhere(path) == [str(caught.value), False]
    assert str(caught.value).startswith(f"{path}: found ")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"a": 1 + 2j}, "found a complex, expected"),
        ([torch.eye(2).to_sparse()], "found "),
        ({"a": 2**70}, "found can't serialize ints"),
        (torch.float32, "found a dtype, expected"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, value: Any, found: str):
    path = tmp_path / "a.pt"
    torch.save(value, path)
    with pytest.raises(BadInput) as caught:
        load_apart(path)
    assert str(caught.value).startswith(f"{path}: {found}")
    assert "\n" not in str(caught.value)
