"""Bad input, by the commands: one line with file and place, exit code 2, nothing left."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.daemons import spawn, stop

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments: object, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run `python -m ...` to its end."""
    words = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options
    )


def refused(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """Exit code 2 and one line on stderr that has all the words."""
    line = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert result.returncode == 2, result
    assert len(line) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in line[0], line[0]


@pytest.fixture
def source(small_graph: Path, tmp_path: Path) -> Path:
    """A copy of the small graph to be spoilt."""
    return Path(shutil.copytree(small_graph, tmp_path / "in" / "graph"))


@pytest.fixture(scope="module")
def store(small_graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good store of the small graph."""
    path = tmp_path_factory.mktemp("stores") / "good"
    assert command("preprocess", "ingest", small_graph, path, "--block-size", "16K").returncode == 0
    return path


def edit(path: Path, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Load an npy file, change it, save it."""
    array = np.load(path)
    changed = change(array)
    np.save(path, array if changed is None else changed)


def put(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], None]:
    """An edit of one item."""

    def change(array: np.ndarray) -> None:
        array[index] = value

    return change


SPOILT: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray | None], tuple[str, ...]]] = {
    "an id too large": ("edge_index", put((1, 7), 4000), ("edge_index.npy[1, 7]", "4000")),
    "an id below zero": ("edge_index", put((0, 3), -1), ("edge_index.npy[0, 3]", "-1")),
    "odd shape": ("edge_index", lambda a: a[:, :9].reshape(3, 6), ("edge_index.npy", "(3, 6)")),
    "float ids": ("edge_index", lambda a: a.astype(np.float64), ("edge_index.npy", "float64")),
    "too few features": ("node_feat", lambda a: a[:-1], ("node_feat.npy", "3999", "4000")),
    "NaN features": ("node_feat", put((12, 3), np.nan), ("node_feat.npy[12]", "NaN")),
    "a split id too large": ("test_idx", put((2,), 9999), ("test_idx.npy[2]", "9999")),
    "float labels of odd shape": (
        "node_label",
        lambda a: a.reshape(10, 20, 20),
        ("node_label.npy", "(10, 20, 20)"),
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_array_is_named(name: str, source: Path, tmp_path: Path):
    file, change, words = SPOILT[name]
    edit(source / f"{file}.npy", change)
    refused(command("preprocess", "ingest", source, tmp_path / "out" / "store"), *words)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_overlapping_splits(source: Path, tmp_path: Path):
    train = np.load(source / "train_idx.npy")
    edit(source / "valid_idx.npy", put((0,), train[4]))
    result = command("preprocess", "ingest", source, tmp_path / "store")
    refused(result, "valid_idx.npy[0]", str(train[4]), "train_idx.npy")


def test_nan_features_are_taken_where_allowed(source: Path, tmp_path: Path):
    edit(source / "node_feat.npy", put((12, 3), np.nan))
    target = tmp_path / "store"
    assert command("preprocess", "ingest", source, target, "--allow-nan").returncode == 0


def test_an_empty_graph(tmp_path: Path):
    np.save(tmp_path / "edge_index.npy", np.empty((2, 0), np.int64))
    refused(command("preprocess", "ingest", tmp_path, tmp_path / "store"), "no nodes")


def test_a_graph_without_edges_works(source: Path, tmp_path: Path):
    edit(source / "edge_index.npy", lambda a: a[:, :0])
    target, back = tmp_path / "store", tmp_path / "back"
    assert command("preprocess", "ingest", source, target).returncode == 0
    assert command("preprocess", "verify", target).returncode == 0
    assert command("preprocess", "export", target, back).returncode == 0
    assert np.load(back / "edge_index.npy").shape == (2, 0)


def test_missing_truncated_and_pickled_files(source: Path, tmp_path: Path):
    refused(command("preprocess", "ingest", tmp_path / "none", tmp_path / "s"), "found nothing")
    path = source / "node_feat.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    refused(command("preprocess", "ingest", source, tmp_path / "s"), "node_feat.npy", "truncated")
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    refused(command("preprocess", "ingest", source, tmp_path / "s"), "node_feat.npy", "objects")
    path.write_bytes(b"not numpy")
    refused(command("preprocess", "ingest", source, tmp_path / "s"), "node_feat.npy")
    (source / "edge_index.npy").unlink()
    words = ("preprocess", "ingest", source, tmp_path / "s", "--layout", "plain")
    refused(command(*words), "edge_index.npy", "missing")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_the_target_exists(source: Path, store: Path):
    refused(command("preprocess", "ingest", source, store), str(store), "exists")


def test_too_little_memory_says_how_much_would_do(source: Path, tmp_path: Path):
    result = command("preprocess", "ingest", source, tmp_path / "store", "--mem", "4M")
    refused(result, "--mem 4M", "at least")
    enough = result.stderr.split("at least --mem ")[1].split()[0]
    again = command("preprocess", "ingest", source, tmp_path / "store", "--mem", enough)
    assert again.returncode == 0, again.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk(source: Path, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine refuses to mount a tmpfs")
    try:
        refused(command("preprocess", "ingest", source, small / "store"), str(small), "free")
        (small / "filler").write_bytes(bytes(300 << 10))
        early = command("preprocess", "ingest", source, small / "store", "--block-size", "4K")
        refused(early, str(small))
        assert [p.name for p in small.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_is_not_a_store(tmp_path: Path):
    for words in (("preprocess", "info"), ("preprocess", "verify")):
        refused(command(*words, tmp_path), str(tmp_path), "zarr.json")
    serve = ("loaderd", "serve", tmp_path, "--endpoint", f"ipc://{tmp_path}/d.sock")
    refused(command(*serve), "zarr.json")


def test_a_newer_store_a_flipped_bit_and_a_truncated_file(store: Path, tmp_path: Path):
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    root = copy / "zarr.json"
    text = root.read_text()
    root.write_text(text.replace('"format": 3', '"format": 4'))
    refused(command("preprocess", "info", copy), "zarr.json", "format 4", "reads 3")
    root.write_text(text)
    shard = next((copy / "nodes/node/features/x/c").rglob("0"))
    while shard.is_dir():
        shard = next(shard.iterdir())
    raw = bytearray(shard.read_bytes())
    raw[5000] ^= 4
    shard.write_bytes(raw)
    refused(command("preprocess", "verify", copy), f"{shard}+4096", "crc32c")
    shard.write_bytes(raw[:-40])
    refused(command("preprocess", "verify", copy), str(shard), "bytes, expected")


def test_a_daemon_that_is_not_there(tmp_path: Path):
    result = command("loaderd", "status", "--endpoint", f"ipc://{tmp_path}/none.sock")
    refused(result, "none.sock", "no daemon", "loaderd serve")
    refused(command("loaderd", "status", "--endpoint", "tcp://x:1"), "ipc://")


def test_too_little_memory_to_serve(store: Path, tmp_path: Path):
    serve = ("loaderd", "serve", store, "--endpoint", f"ipc://{tmp_path}/d.sock", "--mem")
    result = command(*serve, "64K")
    refused(result, "--mem 64K", "at least --mem")
    enough = result.stderr.split("at least --mem ")[1].split()[0]
    assert command(*serve, enough, "--dry-run").returncode == 0


def test_an_endpoint_in_use_and_a_stale_one(store: Path, tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/d.sock"
    first = spawn(store, endpoint, "--mem", "64M")
    try:
        refused(command("loaderd", "serve", store, "--endpoint", endpoint), "another daemon")
    finally:
        first.kill()
        first.communicate()
    assert (tmp_path / "d.sock.door").exists()  # it was killed
    assert stop(spawn(store, endpoint, "--mem", "64M")) == 0
    assert list(tmp_path.iterdir()) == []
