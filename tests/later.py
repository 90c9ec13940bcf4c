"""Modules that a few tests need: imported as one of these first uses them.

Each worker of pytest-xdist collects all files, and importing PyG takes seconds of CPU.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Later:
    """The module `name`; whoever asks at the head of a file for one that is not installed is
    skipped, the whole file, as by `pytest.importorskip`."""

    def __init__(self, name: str) -> None:
        package = name.partition(".")[0]
        if find_spec(package) is None:
            pytest.skip(f"needs {package}", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at all that a file has
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
