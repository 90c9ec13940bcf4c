"""Sides of the harness's tests: they live in a module, since each runs in a process of its own."""

import itertools
import os
from pathlib import Path

import numpy as np

from tools.bench.harness import SideSkipped


def logging(log: Path, name: str, num_bytes: int = 0):
    """Writes its name down for every round, and what it did before and after."""

    def note(text):
        with log.open("a") as f:
            f.write(f"{text}\n")

    def run():
        note(name)
        return {"bytes": float(np.ones(num_bytes, np.uint8).sum()), "pid": float(os.getpid())}

    note(f"open {name}")
    yield run
    note(f"close {name}")


def counting(first: int):
    """Gives the number of the round, from `first`."""
    numbers = itertools.count(first)
    yield lambda: {"round": float(next(numbers))}


def missing():
    raise SideSkipped("not here")
    yield


def failing(when: str):
    if when == "open":
        raise ValueError("no luck")

    def run():
        if when == "exit":
            os._exit(3)
        raise ValueError("no luck")

    yield run
