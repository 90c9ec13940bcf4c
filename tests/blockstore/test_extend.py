"""Arrays added to a store: the old store or the new one, whenever the run is killed."""

import os
import shutil
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zarr

from blockstore.errors import CorruptBlock, NotAStore, StoreBusy, StoreExists
from blockstore.extend import StoreExtender
from blockstore.format import EXTEND_FOLDER, Manifest, RowArray
from blockstore.store import open_store, read_rows
from blockstore.verify import verify_store
from tests.graphs import make_csc
from tests.kills import counted, kill_at
from tests.preprocess.test_resume import tree
from tests.stores import write_store

ROWS = np.arange(60, dtype=np.int8).reshape(20, 3)
ARRAY = RowArray("nodes/node/features/z", "int8", 20, (3,), "dense", "nodes/node/features/z.scale")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Twenty nodes."""
    write_store(tmp_path / "store", make_csc([3] * 20, 1), [1, 2])
    return tmp_path / "store"


def with_array(manifest: Manifest, name: str, array: RowArray) -> Manifest:
    """The manifest with one more feature."""
    node = manifest.types[0]
    node = msgspec.structs.replace(node, features={**node.features, name: array})
    return msgspec.structs.replace(manifest, types=(node,))


def write(extender: StoreExtender, array: RowArray = ARRAY) -> None:
    """The rows and their scale."""
    extender.side(array.scale_path, np.ones(3, np.float32))
    with extender.rows(array) as rows:
        rows.append(ROWS)


def extend(path: Path) -> Manifest:
    """All of it."""
    with StoreExtender(path) as extender:
        write(extender)
        return extender.commit(with_array(extender.store.manifest, "z", ARRAY))


def test_a_store_has_one_more_array(store: Path):
    before, files = open_store(store), tree(store)
    manifest = extend(store)
    after = open_store(store)
    assert after.manifest == manifest
    assert manifest.fingerprint != before.manifest.fingerprint
    assert read_rows(after, ARRAY).tolist() == ROWS.tolist()
    verify_store(store)
    changed = {name for name, digest in files.items() if tree(store).get(name) != digest}
    assert changed == {"zarr.json"}
    old = before.manifest.types[0].features["x"]
    assert np.array_equal(read_rows(before, old), read_rows(after, old))
    assert zarr.open_group(store, mode="r")["nodes/node/features/z"][:].tolist() == ROWS.tolist()
    assert sorted(p.name for p in store.iterdir()) == ["edges", "nodes", "zarr.json"]


def test_leaving_without_commit_undoes_everything(store: Path):
    files = tree(store)
    with StoreExtender(store) as extender:
        write(extender)
    with StoreExtender(store) as extender:
        extender.rows(ARRAY).append(ROWS[:9])
    assert tree(store) == files
    assert not (store / EXTEND_FOLDER).exists()


CALLS = ("rename", "fsync")


def test_a_kill_at_each_step_leaves_the_old_store_or_the_new_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of the many files that are flushed before any is moved, the first and one in the middle."""
    whole, seen = tmp_path / "whole", [0]
    shutil.copytree(store, whole)
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name), seen, -1))
        old, new = open_store(store).manifest, extend(whole)
    found = []
    for last in (1, seen[0] // 2, *range(seen[0] - 11, seen[0] + 1)):
        path = tmp_path / f"killed-{last}"
        shutil.copytree(store, path)
        kill_at(partial(extend, path), CALLS, last)
        assert (path / EXTEND_FOLDER).exists()
        verify_store(path)
        found.append(open_store(path).manifest)
        with StoreExtender(path) as extender:  # takes away what is left
            assert extender.store.manifest == found[-1]
        if found[-1] == old:
            assert tree(path) == tree(store)
            extend(path)
        assert tree(path) == tree(whole)
    assert found.count(old) > 7  # three arrays are moved, each with a flush, then the manifest
    assert found.count(new) > 0
    assert len(found) == found.count(old) + found.count(new)


def test_groups_that_are_new_go_with_the_run_that_made_them(store: Path, tmp_path: Path):
    """A type without features gets a folder of them; it goes where the manifest does not come."""
    array = RowArray("nodes/node/more/deep/z", "int8", 20, (3,), "", "nodes/node/more/deep/z.scale")
    files = tree(store)
    with StoreExtender(store) as extender:
        write(extender, array)
        shutil.move(store / EXTEND_FOLDER / "store/nodes/node/more", store / "nodes/node/more")
        (store / EXTEND_FOLDER / "moved.json").write_text('["nodes/node/more"]')
    assert tree(store) == files
    assert not (store / "nodes/node/more").exists()


def test_two_runs_do_not_meet(store: Path):
    with StoreExtender(store), pytest.raises(StoreBusy, match="another process is extending it"):
        StoreExtender(store)
    extend(store)


def test_what_stands_in_its_place_is_not_touched(store: Path):
    (store / ARRAY.path).mkdir()
    with StoreExtender(store) as extender, pytest.raises(StoreExists, match="features/z: exists"):
        extender.rows(ARRAY)
    assert (store / ARRAY.path).exists()


def test_attributes_of_others_stay(store: Path):
    zarr.open_group(store, mode="a").attrs["license"] = "CC0"
    extend(store)
    assert zarr.open_group(store, mode="r").attrs["license"] == "CC0"
    verify_store(store)


def test_a_bad_store_is_not_extended(store: Path, tmp_path: Path):
    with pytest.raises(NotAStore):
        StoreExtender(tmp_path)
    assert not (tmp_path / EXTEND_FOLDER).exists()
    chunk = next(store.glob("nodes/node/features/x.crc/c/0"))
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.raises(CorruptBlock):
        StoreExtender(store)
    assert not (store / EXTEND_FOLDER).exists()
