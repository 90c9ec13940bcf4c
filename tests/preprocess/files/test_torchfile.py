"""Files of torch.save: the same values from either process, and torch does not stay."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from preprocess.errors import BadInput
from preprocess.files.strided import GivenArray, Placed, StridedRows
from preprocess.files.torchfile import Other, TorchObject, open_tensor, read_torch

ROOT = Path(__file__).resolve().parents[3]
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
ARRAYS = arrays_of.arrays(
    st.sampled_from([np.int64, np.uint8, np.float32, np.float16, np.bool_]),
    arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
VALUES = st.recursive(
    SCALARS | ARRAYS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3)
)


class Wild:
    """An object that only unpickling could rebuild."""


def read_elsewhere(reader: str, *paths: tuple[Path, str]) -> Any:
    """What a process without torch gets of each file, and whether it has torch afterwards."""
    words = [word for path, executable in paths for word in (str(path), executable)]
    command = [sys.executable, "-m", "tests.preprocess.reader", reader, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(done.stdout)


@given(VALUES)
def test_values_arrive_as_they_are(tmp_path_factory: pytest.TempPathFactory, value: Any):
    path = tmp_path_factory.mktemp("torch") / "value.pt"
    torch.save(value, path)
    same(read_torch(path), value)


def same(found: Any, value: Any) -> None:
    """Equal, of the same types, shapes and dtypes."""
    if isinstance(value, np.ndarray):
        assert found == GivenArray(value.dtype.str, value.shape, value.tobytes())
        return
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert list(found) == list(value)
        for name, held in value.items():
            same(found[name], held)
    elif isinstance(value, list):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            same(one, other)
    else:
        assert found == value or (found != found and value != value)


GOOD, BAD = "file with ä space.pt", "bad.pt"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with files, and what one process found in them: good, bad, no process for a third.

    Each of its children loads torch, and then it does itself: seconds of CPU every time.
    """
    folder = tmp_path_factory.mktemp("torch")
    save_good(folder / GOOD)
    torch.save({"a": Path("b")}, folder / BAD)
    torch.save({"a": 1}, folder / "a.pt")
    asked = ((folder / GOOD, ""), (folder / BAD, ""), (folder / "a.pt", "/bin/false"))
    return folder, read_elsewhere("values", *asked)


def save_good(path: Path, zipped: bool = True) -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).T
    held = {"a": tensor, "b": np.array([0.5]), "c": 7, "d": torch.ones(1).bfloat16()}
    torch.save(held, path, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", [True, pytest.param(False, marks=pytest.mark.long)])
def test_torch_is_loaded_by_another_process(tmp_path: Path, elsewhere: Any, zipped: bool):
    shown = {"a": [[0, 3], [1, 4], [2, 5]], "b": [0.5], "c": 7, "d": [1.0]}
    found = elsewhere[1][0]
    if not zipped:
        save_good(tmp_path / GOOD, zipped)
        (found,) = read_elsewhere("values", (tmp_path / GOOD, ""))
    assert found == [shown, False]


def test_where_no_process_can_be_had_this_one_reads(elsewhere: Any):
    assert elsewhere[1][2] == [{"a": 1}, True]


def test_what_is_wrong_is_said_by_either(elsewhere: Any):
    path = elsewhere[0] / BAD
    with pytest.raises(BadInput) as caught:
        read_torch(path)
    assert elsewhere[1][1] == [str(caught.value), False]
    assert str(caught.value).startswith(f"{path}: found ")


@pytest.mark.parametrize(
    ("value", "found"),
    [({"a": 2**70}, "found can't serialize ints"), (Wild, "found Unsupported global")],
)
def test_other_values_are_refused(tmp_path: Path, value: Any, found: str):
    path = tmp_path / "a.pt"
    torch.save(value() if callable(value) else value, path)
    with pytest.raises(BadInput) as caught:
        read_torch(path)
    assert str(caught.value).startswith(f"{path}: {found}")
    assert "\n" not in str(caught.value)


def test_values_that_nothing_reads_are_named(tmp_path: Path):
    held = [1 + 2j, torch.eye(2).to_sparse(), torch.float32, torch.ones(2).to(torch.float8_e5m2)]
    torch.save([*held, np.array(["a"])], tmp_path / "a.pt")
    words = ["complex", "torch.sparse_coo", "dtype", "items of torch.float8_e5m2", "items of <U1"]
    assert read_torch(tmp_path / "a.pt") == [Other(word) for word in words]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_tuple_and_a_sparse_matrix(tmp_path: Path):
    torch.save((torch.eye(2).to_sparse_csr(), (1, 2)), tmp_path / "a.pt")
    matrix, pair = read_torch(tmp_path / "a.pt")
    assert isinstance(matrix, TorchObject)
    parts = matrix.attributes["storage"].attributes
    assert list(parts) == ["_rowptr", "_col", "_value", "_sparse_sizes"]
    assert [parts["_sparse_sizes"], pair] == [[2, 2], [1, 2]]


WHOLE = torch.arange(24, dtype=torch.int32).reshape(6, 4)


@pytest.mark.parametrize(
    "tensor",
    [WHOLE, WHOLE.t(), WHOLE[1::2, 2:], WHOLE[:, 0], WHOLE[3:4].expand(5, 4), WHOLE.bool(),
     WHOLE.to(torch.bfloat16), WHOLE.double()],
)  # fmt: skip
def test_rows_are_those_of_the_tensor(tmp_path: Path, tensor: Any):
    torch.save(tensor, tmp_path / "a.pt")
    array = read_torch(tmp_path / "a.pt")
    assert isinstance(array, Placed)
    rows = StridedRows(tmp_path / "a.pt", array, "a")
    found = np.concatenate([p.copy() for p in rows.all_pieces(2)])
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
    array = read_torch(path)
    assert array == GivenArray(
        values.numpy().dtype.str, tuple(values.shape), values.numpy().tobytes()
    )


def test_what_is_no_tensor_is_refused(tmp_path: Path):
    for value in ([1], Other("items of <U1")):
        with pytest.raises(BadInput, match=r"here: found (a list|items of <U1), expected one"):
            open_tensor(tmp_path / "a.pt", "here", value, "one tensor")


def test_other_objects_and_damage_are_refused(tmp_path: Path):
    path = tmp_path / "a.pt"
    with pytest.raises(BadInput, match=r"a.pt: found no file"):
        read_torch(path)
    torch.save({"a": Wild()}, path)
    with pytest.raises(BadInput, match=r"a.pt: found .*Wild.*, expected a whole file of tensors"):
        read_torch(path)
    torch.save(torch.arange(1000), path)
    whole = path.read_bytes()
    for raw in (whole[:900], b"junk" * 10, b"", b"PK"):
        path.write_bytes(raw)
        with pytest.raises(BadInput, match=r"a.pt: found .*, expected a whole file of tensors"):
            read_torch(path)


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise ImportError(name)

    (tmp_path / "a.pt").write_bytes(b"PK")
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(BadInput, match=r"pip install 'blockstore\[torch\]'"):
        read_torch(tmp_path / "a.pt")
