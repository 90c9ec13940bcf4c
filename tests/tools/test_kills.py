"""Kills of the real command, drawn from all of its run."""

import json

import pytest

from tools import command, memory, tree


def test_a_killed_command_goes_on_to_the_same_store(small_graph, tmp_path):
    out = tmp_path / "lines"
    options = ["--", "--undirected", "--edge-ids", "--block-size", "4K"]
    words = ["ingest", str(small_graph), "--folder", str(tmp_path), "--mem", "256M", "--kills", "2"]
    *kills, whole = memory.main([*words, "--out", str(out), *options])
    assert [json.loads(line) for line in out.read_text().splitlines()] == [*kills, whole]
    assert all(0 < k["after_s"] < whole["seconds"] for k in kills)
    assert len({k["after_s"] for k in kills}) == 2
    for kill in kills:
        assert kill["stages"] in (0, len(whole["stages"]))  # 0: the store was there
    assert [p.name for p in tmp_path.iterdir()] == ["lines"]


def test_a_store_that_differs_is_found(small_graph, tmp_path, monkeypatch):
    found = iter([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}])
    monkeypatch.setattr(memory, "file_digests", lambda folder: next(found))
    words = ["ingest", str(small_graph), "--folder", str(tmp_path), "--mem", "64M", "--kills", "1"]
    with pytest.raises(SystemExit, match=r"kill 1, .*: b differs, c differs"):
        memory.main(words)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_fails_is_no_kill(tmp_path):
    with pytest.raises(SystemExit, match=r"ended with 2, 0 kills: error: .*nothing"):
        memory.undisturbed(None, str(tmp_path / "nothing"), str(tmp_path / "store"))


def test_a_tree_has_one_digest(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_bytes(b"one")
    found = tree.file_digests(tmp_path)
    assert found == {"inner/a": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"}
    assert tree.one_digest(found) != tree.one_digest({"inner/b": found["inner/a"]})
    assert tree.differences(found, {**found, "b": "0"}) == ["b"]


def test_words_behind_two_dashes_are_for_the_command():
    assert command.split_options(["a", "--b", "--", "--c", "--"]) == (["a", "--b"], ["--c", "--"])
    assert command.split_options(["a"]) == (["a"], [])
