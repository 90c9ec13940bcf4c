"""Modules that a few tests need: imported as one of these first uses them.

Each worker of pytest-xdist collects all files, and importing PyG takes seconds of CPU.
"""

import importlib
import warnings
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that are not ours, as importorskip does
            module = importlib.import_module(self._name)
        return getattr(module, name)
