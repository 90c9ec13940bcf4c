"""Batches and stores are those that were recorded: a later version gives the same bytes."""

import json
from pathlib import Path

import pytest

from tests.golden_cases import (
    FILE,
    HETERO,
    PLAIN,
    STORES,
    Case,
    epochs,
    made,
    make_store,
    store_digest,
)

RECORDED = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs and stores that the cases share."""
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("name", STORES)
def test_a_store_holds_what_was_recorded(folder: Path, name: str) -> None:
    kind, options = STORES[name]
    store = make_store(made(folder, kind), folder / f"{name}.store", options)
    assert store_digest(store) == RECORDED[f"store/{name}"]


@pytest.mark.parametrize(("name", "cases"), [("plain", PLAIN), ("hetero", HETERO)])
def test_epochs_are_those_that_were_recorded(
    folder: Path, name: str, cases: dict[str, Case]
) -> None:
    kind, options = STORES[name]
    store = folder / f"{name}.store"
    if not store.exists():
        make_store(made(folder, kind), store, options)
    found = dict(epochs(store, cases))
    assert found == {case: RECORDED[f"{name}/{case}"] for case in cases}
