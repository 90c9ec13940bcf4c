"""Files of torch.save: tensors and numpy arrays come out, anything else is refused."""

from pathlib import Path

import numpy as np
import pytest

from preprocess.errors import BadInput
from preprocess.files.torchfile import as_numpy, is_tensor, load_torch

torch = pytest.importorskip("torch")


class Wild:
    """An object that only unpickling could rebuild."""


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_and_arrays_come_out(tmp_path: Path, zipped: bool):
    held = {
        "a": torch.arange(6).reshape(2, 3),
        "b": [torch.tensor([0.5, 2], dtype=torch.bfloat16)],
        "c": np.arange(3, dtype=np.int32),
        "d": np.empty((0, 2), np.int16),
    }
    torch.save(held, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = load_torch(tmp_path / "a.pt")
    assert as_numpy(found["a"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert as_numpy(found["b"][0]).tolist() == [0.5, 2]
    assert as_numpy(found["c"]).dtype == np.int32
    assert (found["d"].shape, found["d"].dtype) == ((0, 2), np.int16)
    assert is_tensor(found["a"])
    assert is_tensor(found["c"])
    assert not is_tensor(found["b"])


def test_other_objects_and_damage_are_refused(tmp_path: Path):
    path = tmp_path / "a.pt"
    with pytest.raises(BadInput, match=r"a.pt: found no file"):
        load_torch(path)
    torch.save({"a": Wild()}, path)
    with pytest.raises(BadInput, match=r"a.pt: found .*Wild.*, expected a whole file of tensors"):
        load_torch(path)
    torch.save(torch.arange(1000), path)
    whole = path.read_bytes()
    for raw in (whole[:900], b"junk" * 10, b"", b"PK"):
        path.write_bytes(raw)
        with pytest.raises(BadInput, match=r"a.pt: found .*, expected a whole file of tensors"):
            load_torch(path)


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise ImportError(name)

    (tmp_path / "a.pt").write_bytes(b"PK")
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(BadInput, match=r"pip install 'blockstore\[torch\]'"):
        load_torch(tmp_path / "a.pt")
