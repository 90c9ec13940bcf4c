"""JSON in pieces is JSON: entries and lists, wherever the text is cut; damage is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.sources import graphsaint
from preprocess.sources.graphsaint import read_entries, read_lists

IDS = st.integers(0, 1 << 40)
SPACES = st.sampled_from([None, 1, "\t"])
ROWS = st.dictionaries(IDS, st.lists(st.integers(-3, 99), max_size=9), max_size=20)
NUMBERS = st.dictionaries(IDS, st.integers(-3, 99), max_size=20)


@pytest.fixture(params=[1, 7, 64, 1 << 18])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes at a time."""
    monkeypatch.setattr(graphsaint, "_PART_BYTES", request.param)
    return int(request.param)


def write(tmp_path_factory: Any, text: str) -> Path:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(text)
    return path


def entries(path: Path, value: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for place, some in read_entries(path, value):
        assert place.startswith(f"{path}+")
        found |= some
    return found


def lists(path: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, ids in read_lists(path):
        assert ids.dtype == np.int64
        found.setdefault(name, []).extend(ids.tolist())
    return found


@pytest.mark.usefixtures("part")
def test_entries_are_those_of_json(tmp_path_factory):
    @given(held=ROWS | NUMBERS, indent=SPACES)
    def check(held: dict[int, Any], indent: Any):
        path = write(tmp_path_factory, json.dumps(held, indent=indent))
        assert entries(path, int | list[int]) == held

    check()


@pytest.mark.usefixtures("part")
def test_lists_are_those_of_json(tmp_path_factory):
    names = st.sampled_from(["tr", "va", "te", "more"])

    @given(held=st.dictionaries(names, st.lists(IDS, max_size=20)), indent=SPACES)
    def check(held: dict[str, list[int]], indent: Any):
        assert lists(write(tmp_path_factory, json.dumps(held, indent=indent))) == held

    check()


def test_little_is_held_at_a_time(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({str(i): i for i in range(100_000)}))
    sizes = [len(some) for _, some in read_entries(path, int)]
    assert sum(sizes) == 100_000
    assert max(sizes) < 40_000  # two parts


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"0": 1', '{"0": 1]', '{"0": 1}}', '{"0": 1,}', '{"0" 1}', '{"a": 1}',
     '{"-1": 1}', '{"0": "1"}', '{"0": 1.5, "1": 2}', '{"0": null}', '{"0": 1} x',
     '{"4611686018427387904": 1}', '{"0": 1, "1": [2]}', '{\xff: 1}'],
)  # fmt: skip
def test_damaged_entries_are_refused(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match=r"a\.json\+\d+: found .*, expected "):
        entries(tmp_path / "a.json", int)


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", '{"tr": [1', '{"tr": [1, ', '{"tr": [1]', '{"tr": 1}', '{"tr": [1.5]}',
     '{"tr": [-1]}', '{"tr": ["1"]}', '{"tr": [[1]]}', '{"tr": [1]} x', '{"tr": [1], 5}',
     '{"tr": [1],' + " " * 2000 + '"va"}', '{"tr": [1 2]}'],
)  # fmt: skip
def test_damaged_lists_are_refused(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadInput, match=r"a\.json\+\d+: found .*, expected "):
        lists(tmp_path / "a.json")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(BadInput, match=r"a\.json: found No such file"):
        lists(tmp_path / "a.json")
