"""What is said where a library of an extra is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch_geometric", "lightning"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
sys.modules["torch"] = None
for module in ("clients", "clients.pyg", "clients.lightning"):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(error.name, error)
    sys.modules.pop("torch", None) if module == "clients" else None
"""


def test_the_extra_is_named():
    words = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "torch clients: found no torch, expected it for batches of tensors: "
        'pip install "blockstore[torch]"',
        "torch_geometric clients.pyg: found no torch_geometric, expected it: "
        'pip install "blockstore[pyg]"',
        "lightning clients.lightning: found no lightning, expected it: "
        'pip install "blockstore[lightning]"',
    ]
