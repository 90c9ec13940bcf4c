"""Owner maps: whole or absent, of one store, every page verified."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from blockstore.errors import CorruptBlock, StoreError, StoreExists
from blockstore.io import files
from blockstore.owners import list_owners, read_facts, read_owners, remove_owners, write_owners
from blockstore.store import Store, open_store
from blockstore.verify import verify_store
from preprocess.__main__ import app
from tests.graphs import make_csc
from tests.stores import write_store

NODES = 6000  # two pages of uint8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    write_store(tmp_path / "store", make_csc([1] * NODES, 1), [1, 2])
    return open_store(tmp_path / "store")


@pytest.mark.parametrize(("count", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_a_map_comes_back(store: Store, count: int, dtype: type):
    owner = np.arange(NODES) % count
    made = write_owners(store, "m", owner, count, {"method": "test"})
    found = read_owners(open_store(store.path), "m")
    assert found.owner.dtype == dtype
    assert np.array_equal(found.owner, owner)
    assert (found.name, found.owners, found.digest) == ("m", count, made.digest)
    assert found.facts == read_facts(store, "m").facts == {"method": "test"}
    report = verify_store(store.path)
    assert report.strays == ()
    assert open_store(store.path).manifest == store.manifest


def test_a_digest_is_of_owners_and_store(store: Store, tmp_path: Path):
    zeros = np.zeros(NODES, np.uint8)
    first = write_owners(store, "a", zeros, 2, {"tried": 1}).digest
    assert write_owners(store, "b", zeros, 2, {"tried": 2}).digest == first
    zeros[-1] = 1
    assert write_owners(store, "c", zeros, 2, {}).digest != first
    write_store(tmp_path / "other", make_csc([1] * NODES, 2), [1])
    other = open_store(tmp_path / "other")
    zeros[-1] = 0
    assert write_owners(other, "a", zeros, 2, {}).digest != first


def test_a_name_is_taken_until_it_is_removed(store: Store):
    assert list_owners(store) == []
    write_owners(store, "m", np.zeros(NODES, np.uint8), 2, {})
    with pytest.raises(StoreExists, match="owners/m: exists already; remove the map"):
        write_owners(store, "m", np.zeros(NODES, np.uint8), 2, {})
    assert list_owners(store) == ["m"]
    remove_owners(store, "m")
    assert list_owners(store) == []
    with pytest.raises(StoreError, match=r"no owner map 'm', expected one of: none; make it"):
        read_owners(store, "m")
    assert list((store.path / "owners").iterdir()) == []


@pytest.mark.parametrize("name", ["", ".m", "-m", "a/b", "..", "a" * 101])
def test_odd_names_are_refused(store: Store, name: str):
    with pytest.raises(StoreError, match="expected a name of letters"):
        write_owners(store, name, np.zeros(NODES, np.uint8), 2, {})
    with pytest.raises(StoreError, match="no owner map"):
        read_owners(store, name)


def test_a_map_of_another_store_is_refused(store: Store, tmp_path: Path):
    write_owners(store, "m", np.zeros(NODES, np.uint8), 2, {})
    write_store(tmp_path / "other", make_csc([1] * NODES, 2), [1])
    shutil.copytree(store.path / "owners", tmp_path / "other/owners")
    other = open_store(tmp_path / "other")
    with pytest.raises(StoreError, match=r"of fingerprint .* it is of another store"):
        read_owners(other, "m")
    report = verify_store(other.path)
    assert (report.strays, report.foreign_maps) == ((), ("m",))
    assert verify_store(store.path).foreign_maps == ()
    said = CliRunner().invoke(app, ["verify", str(other.path)]).output
    assert "owner map m: of another store" in said


@pytest.mark.parametrize("file", ["owner", "map.json"])
def test_damage_is_found(store: Store, file: str):
    write_owners(store, "m", np.arange(NODES) % 2, 2, {"method": "test"})
    path = store.path / "owners/m" / file
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CorruptBlock, match=f"owners/m/{file}"):
            read_owners(store, "m")
        path.write_bytes(whole[:at])
        with pytest.raises(CorruptBlock, match=f"owners/m/{file}"):
            verify_store(store.path)
    path.unlink()
    with pytest.raises(CorruptBlock, match=f"owners/m/{file}"):
        verify_store(store.path)


def test_what_a_stopped_writer_leaves_is_no_map(store: Store, monkeypatch: pytest.MonkeyPatch):
    """A rename is what makes a map: before it, the folder of a process that is dead by then."""

    def stop(folder: Path) -> None:
        shutil.copytree(folder, folder.with_name(".m.partial-999999999"))
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush_tree", stop)
    with pytest.raises(KeyboardInterrupt):
        write_owners(store, "m", np.zeros(NODES, np.uint8), 2, {})
    assert list_owners(store) == []
    assert len(verify_store(store.path).strays) == 2
    monkeypatch.undo()
    write_owners(store, "m", np.zeros(NODES, np.uint8), 2, {})
    assert [p.name for p in (store.path / "owners").iterdir()] == ["m"]
