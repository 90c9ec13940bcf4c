"""The `blockstore` command: what it says, its exit codes, and that it leaves nothing behind."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from preprocess.__main__ import app
from tests import processes

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*words: object) -> Result:
    """One command in this process."""
    return CliRunner().invoke(app, [str(w) for w in words])


def good(*words: object) -> str:
    """What a command that works prints."""
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object) -> str:
    """The one line of a command that is refused."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    return lines[0].removeprefix("error: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated folder."""
    path = tmp_path_factory.mktemp("commands") / "graph"
    words = "--nodes 500 --degree 6 --features 5 --classes 3 --train 0.5 --seed 1 --noise 0.5"
    good("generate", path, *words.split())
    return path


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    """Its store."""
    path = folder.parent / "store"
    good("ingest", folder, path, "--mem", "32M", "--edge-ids", "--block-size", "8K")
    return path


def test_there_and_back(folder: Path, store: Path, tmp_path: Path):
    assert "good: " in good("verify", store)
    good("export", store, tmp_path / "back", "--mem", "64M")
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_info_for_people_and_for_scripts(store: Path):
    text = good("info", store)
    assert "500 nodes" in text
    assert "3,000 edges" in text
    assert "float32 500x5" in text
    assert "\x1b" not in text
    facts = json.loads(good("info", store, "--json"))
    assert (facts["num_nodes"], facts["num_edges"]) == (500, 3000)
    assert facts["manifest"]["fingerprint"] in text
    assert facts["disk_bytes"] == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())


def test_ingest_says_its_policy():
    text = " ".join(good("ingest", "--help").split())
    for words in ("--undirected", "--edge-ids", "kept unless", "E + original", "smallest"):
        assert words in text


def test_a_store_with_32_megabytes(folder: Path, tmp_path: Path):
    said = good("ingest", folder, tmp_path / "s", "--mem", "32M", "--undirected")
    assert "500 nodes" in said


@pytest.mark.parametrize(
    "words",
    [
        ["ingest", "--mem", "much"],
        ["ingest", "--block-size", "0"],
        ["ingest", "--order", "sideways"],
        ["ingest", "--dtype", "int4"],
        ["export", "--mem", "-1"],
        ["verify", "--deep"],
    ],
)
def test_unknown_words_are_usage_errors(folder: Path, tmp_path: Path, words: list[str]):
    result = run(words[0], folder, *([] if words[0] == "verify" else [tmp_path / "x"]), *words[1:])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_each_refusal_names_file_and_place(folder: Path, store: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert str(store) in refused("ingest", folder, store)
    assert str(folder) in refused("export", store, folder)
    assert str(folder) in refused("generate", folder)
    assert "--block-size: found 5000" in refused("ingest", folder, out, "--block-size", "5000")
    assert "at least --mem" in refused("ingest", folder, out, "--mem", "1M")
    assert "at least --mem" in refused("export", store, out, "--mem", "1M")
    for words in (["info"], ["verify"], ["export", out]):
        said = refused(words[0], tmp_path, *words[1:])
        assert said.startswith(str(tmp_path))
        assert "zarr.json" in said
    assert "found a store, expected a graph in another layout" in refused("ingest", store, out)
    assert "none: found nothing" in refused("ingest", tmp_path / "none", out)
    assert "--classes" in refused("generate", out, "--classes", "0")
    assert list(tmp_path.iterdir()) == []


def test_a_changed_store_is_not_exported(store: Path, tmp_path: Path):
    for place in ("nodes/node/features/x", "edges/node___to___node/blocks"):
        copy = Path(shutil.copytree(store, tmp_path / "copy"))
        shard = next(p for p in sorted((copy / place / "c").rglob("*")) if p.is_file())
        raw = bytearray(shard.read_bytes())
        raw[4100] ^= 1
        shard.write_bytes(raw)
        for words in (["verify", copy], ["export", copy, tmp_path / "back"]):
            assert refused(*words).startswith(f"{shard}+4096: ")
        shard.write_bytes(raw[:-1])
        assert str(shard) in refused("export", copy, tmp_path / "back")
        shutil.rmtree(copy)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_other_writers_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def rename(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "rename", rename)
    said = refused("ingest", folder, tmp_path / "store")
    assert str(tmp_path) in said
    assert "No space left" in said
    assert "free some space" in said
    assert list(tmp_path.iterdir()) == []


def limited(limit: int, words: list[str]) -> tuple[int, str]:
    """Exit code and output of a command in a process that may write files of so many bytes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            os.dup2(writing, 2)
            with os.fdopen(2, "w") as sys.stderr:
                sys.stdout = sys.stderr
                code = processes.run_main("preprocess", *words)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def test_a_file_too_large_for_the_limit_of_the_process(folder: Path, tmp_path: Path):
    """RLIMIT_FSIZE of 6 KiB: the first shard does not fit."""
    words = ["ingest", str(folder), str(tmp_path / "store"), "--block-size", "4K", "--edge-ids"]
    code, said = limited(6144, words)
    assert code == 2, said
    assert said.splitlines()[-1].startswith(f"error: {tmp_path}")
    assert "File too large" in said
    assert f"stays in {tmp_path}/.store.work: the same command goes on" in said
    good(*words)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_a_terminated_ingest_leaves_the_store_or_what_goes_on(folder: Path, tmp_path: Path):
    command = [sys.executable, "-m", "preprocess", "ingest", str(folder), str(tmp_path / "store")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()  # the first stage is over
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (0, 128 + signal.SIGTERM)
    left = [p.name for p in tmp_path.iterdir()]
    assert left in ([[], [".store.work"]] if process.returncode else [["store"]])
    if process.returncode:
        good("ingest", folder, tmp_path / "store")
        assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_types_that_nothing_leads_to_are_named(dataset, tmp_path: Path):
    """Papers of ACM: their neighborhoods are empty unless reverses are added."""
    source, said = dataset("hetero-acm"), []
    for name, options in (("as-is", []), ("both", ["--undirected"])):
        result = run("ingest", source, tmp_path / name, *options)
        assert result.exit_code == 0, result.output
        said.append(result.stderr)
    assert "no relation leads to" in said[0]
    assert "no relation leads to" not in said[1]


@pytest.mark.parametrize(
    "name",
    [
        "planetoid-cora",
        pytest.param("flickr-small", marks=pytest.mark.long),
        pytest.param("facebook-pagepage", marks=pytest.mark.long),
    ],
)
def test_real_graphs_within_little_memory(dataset, tmp_path: Path, name: str):
    source = dataset(name)
    good("ingest", source, tmp_path / "store", "--mem", "32M", "--edge-ids", "--order", "bfs")
    num_edges = np.load(source / "edge_index.npy", mmap_mode="r").shape[1]
    assert json.loads(good("info", tmp_path / "store", "--json"))["num_edges"] == num_edges
    assert "good: " in good("verify", tmp_path / "store")
    good("export", tmp_path / "store", tmp_path / "back", "--mem", "48M")
    for path in (tmp_path / "back").glob("*.npy"):
        a, b = np.load(path), np.load(source / path.name)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    missing = {"SOURCE.md", "stats.json"}
    assert {p.name for p in source.iterdir()} - missing == {
        p.name for p in (tmp_path / "back").iterdir()
    }


def test_a_column_over_many_blocks(dataset, tmp_path: Path):
    """am-rdf: Fortran order, no features, a node with 154,828 neighbors, in blocks of 64 KiB."""
    source = dataset("am-rdf")
    good("ingest", source, tmp_path / "store", "--mem", "64M", "--block-size", "64K", "--edge-ids")
    assert "good: " in good("verify", tmp_path / "store")
    good("export", tmp_path / "store", tmp_path / "back", "--mem", "128M")
    edges = np.load(tmp_path / "back" / "edge_index.npy")
    assert np.array_equal(edges, np.load(source / "edge_index.npy"))


@pytest.mark.parametrize(
    "words",
    [
        ("ingest", "--mem", "2X"), ("ingest", "--block-size", "1Q"),
        ("ingest", "--split", "most,rest"), ("pack", "--hot", "lots"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_read_is_the_last_event(words: tuple[str, ...], tmp_path: Path):
    command, *options = words
    targets = [tmp_path / "graph", tmp_path / "store"][: 2 if command == "ingest" else 1]
    result = run(command, *targets, "--json", *options)
    assert result.exit_code == 2
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["event"] == "error"
    assert repr(options[1]) in last["message"]


def test_nobody_reading_events_stops_nothing(small_graph: Path, tmp_path: Path):
    command = [sys.executable, "-m", "preprocess", "ingest", str(small_graph), str(tmp_path / "s")]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{")
        process.stdout.close()
        assert process.wait(60) == 0
    assert (tmp_path / "s" / "zarr.json").exists()
