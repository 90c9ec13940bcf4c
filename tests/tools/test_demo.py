"""The demo's store: used again for the same data, never removed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from preprocess.__main__ import app
from tests.preprocess.test_resume import tree
from tools import demo


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small graph, made in this process; returns the commands that were run."""
    commands: list[str] = []

    def run(*words: str) -> None:
        commands.append(words[1])
        done = CliRunner().invoke(app, list(words[1:]))
        assert done.exit_code == 0, done.output

    monkeypatch.setattr(demo, "DEMO", tmp_path / "demo")
    monkeypatch.setattr(demo, "GRAPH", ("--nodes", "500", "--degree", "4"))
    monkeypatch.setattr(demo, "run", run)
    return commands


def test_the_same_demo_again_uses_its_store(tmp_path: Path, small: list[str]):
    store = demo.make_store(None)
    before = tree(tmp_path)
    assert store == demo.make_store(None)
    assert store.parent.parent == tmp_path / "demo"
    assert small == ["generate", "ingest"]
    assert tree(tmp_path) == before


def test_other_data_goes_beside_it(tmp_path: Path):
    first = demo.make_store(None)
    data = tmp_path / "mine"
    (first.parent / "graph").rename(data)
    before = tree(first)
    second = demo.make_store(data)
    assert demo.make_store(data) == second != first
    (data / "node_label.npy").touch()
    assert demo.make_store(data) not in (first, second)
    assert tree(first) == tree(second) == before


def test_a_demo_that_was_stopped_goes_on(tmp_path: Path, small: list[str]):
    store = demo.make_store(None)
    store.rename(tmp_path / "gone")
    (store.parent / "graph").rename(store.parent / "graph.begun")
    assert demo.make_store(None) == store
    assert small == ["generate", "ingest"] * 2
    assert tree(store) == tree(tmp_path / "gone")
