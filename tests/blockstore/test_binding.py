"""A store whose files are not those that were written together is refused when it is opened.

Pages of blocks are checked when they are read; every other byte of a store is checked whenever the
store is opened.  BLOCKSTORE_DAMAGES=n gives each kind of file n random damages, instead of each
file one; BLOCKSTORE_FLIPS=n flips so many bits anywhere in the store.
`--junitxml FILE -o junit_family=xunit1` writes how many of which kind there were.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from blockstore.errors import CorruptBlock, NotAStore, StoreError, UnsupportedVersion
from blockstore.format import Manifest, bound_files
from blockstore.root import read_root
from blockstore.store import open_store
from blockstore.verify import verify_store
from tests.blockstore.damage import (
    KINDS,
    MAKERS,
    Damage,
    damaged,
    files_of,
    kind_of,
    random_damage,
    random_flips,
    spoils_pages,
)
from tests.graphs import make_csc
from tests.stores import write_store

DAMAGES = int(os.environ.get("BLOCKSTORE_DAMAGES", "0"))
FLIPS = int(os.environ.get("BLOCKSTORE_FLIPS", "20"))


@pytest.fixture(scope="module", params=MAKERS)
def stores(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A store, another one whose arrays have the same shapes, and, of one type, another graph's."""
    folder = tmp_path_factory.mktemp(request.param)
    made = {"store": (0, 0), "content": (1, 0)}
    if request.param == "one":
        made["graph"] = (0, 1)
    for name, (content, graph) in made.items():
        MAKERS[request.param](folder / name, content, graph)
    return [folder / name for name in made]


def missed(stores: list[Path], damages: list[Damage]) -> tuple[list[str], "Counter[str]"]:
    """Damages that were not reported, or not with the name of the file; the others by kind."""
    store, found, reported = stores[0], [], Counter[str]()
    whole = files_of(store)
    for damage in damages:
        with damaged(store, damage, whole) as differs:
            if not differs:
                continue
            try:
                open_store(store)
                if not spoils_pages(damage):
                    found.append(f"{damage}: the store is opened")
                verify_store(store)
            except StoreError as error:  # of verify, where the store could be opened
                # without a root there is no store; that of another store binds other files
                root = damage.name == "zarr.json" and damage.kind in ("swap", "delete")
                named = str(store / ("" if root else damage.name)) in str(error)
                if not named or "\n" in str(error):
                    found.append(f"{damage}: {error}")
            else:
                found.append(f"{damage}: verify accepts it")
            reported[f"{kind_of(damage.name)}, {damage.kind}"] += 1
    assert files_of(store) == whole
    verify_store(store)
    return found, reported


def test_each_file_that_is_not_what_was_written_is_named(stores: list[Path], record_property: Any):
    rng, whole = np.random.default_rng(1), files_of(stores[0])
    names: dict[str, list[str]] = {}
    for name in sorted(whole):
        names.setdefault(kind_of(name), []).append(name)
    chosen = [(name, KINDS[i % len(KINDS)]) for i, name in enumerate(sorted(whole))]
    if DAMAGES:
        chosen = [
            (of_kind[int(rng.integers(len(of_kind)))], KINDS[int(rng.integers(len(KINDS)))])
            for of_kind in names.values()
            for _ in range(DAMAGES)
        ]
    damages = [random_damage(rng, kind, name, whole, stores) for name, kind in chosen]
    found, reported = missed(stores, damages)
    record_property("damages", dict(sorted(reported.items())))
    assert not found, "\n".join(found[:9])
    assert reported.total() > len(damages) // 2  # other files are equal in both stores
    assert {key.split(",")[0] for key in reported} == set(names)


def test_every_flipped_bit_is_named(stores: list[Path], record_property: Any):
    damages = random_flips(np.random.default_rng(2), files_of(stores[0]), FLIPS)
    found, reported = missed(stores, damages)
    record_property("flips", dict(sorted(reported.items())))
    assert not found, "\n".join(found[:9])
    assert reported.total() == FLIPS


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of so many nodes."""
    path = tmp_path_factory.mktemp("twenty") / "store"
    write_store(path, make_csc([3] * 20, 1), [1, 2])
    return path


@pytest.fixture
def store(twenty: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(twenty, tmp_path / "store"))


def edit(store: Path, change: Any) -> None:
    """Change the root's metadata as another program would, fingerprint and all else as it is."""
    document = json.loads((store / "zarr.json").read_text())
    change(document)
    (store / "zarr.json").write_text(json.dumps(document, indent=2))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["types"][0]["features"]["x"].update(dtype="float34"),  # one bit of a digit
        lambda m: m["types"][0]["features"]["x"].update(dtype="int32"),
        lambda m: m.update(block_bytes=0),
        lambda m: m.update(id_dtype="uint64"),
        lambda m: m.update(a_field_of_later="x"),
        lambda m: m["types"][0].pop("features"),
        lambda m: m["relations"][0].update(has_weightz=True),
        lambda m: m["files"].popitem(),
    ],
)
def test_a_manifest_that_was_edited_is_refused_in_one_line(store: Path, change: Any):
    edit(store, lambda document: change(document["attributes"]["blockstore"]))
    with pytest.raises(CorruptBlock, match=r"zarr\.json: the manifest has fingerprint") as refused:
        open_store(store)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [None, 5, "f00d", ["a"]])
def test_a_fingerprint_that_was_edited_is_refused(store: Path, value: Any):
    edit(store, lambda d: d["attributes"].update(blockstore_fingerprint=value))
    with pytest.raises(CorruptBlock, match="the manifest has fingerprint"):
        open_store(store)
    edit(store, lambda d: d["attributes"].pop("blockstore_fingerprint"))
    with pytest.raises(CorruptBlock, match="the manifest has fingerprint"):
        open_store(store)


def test_a_store_of_format_2_is_to_be_ingested_again(store: Path):
    edit(store, lambda document: document["attributes"]["blockstore"].update(format=2))
    with pytest.raises(UnsupportedVersion, match=r"format 2, this code reads 3; .*ingest again"):
        open_store(store)


def test_a_store_of_format_1_is_to_be_ingested_again(store: Path):
    def to_format_1(document: Any) -> None:
        attributes = document["attributes"]
        attributes["blockstore"]["format"] = 1
        attributes["blockstore"]["fingerprint"] = attributes.pop("blockstore_fingerprint")
        del attributes["blockstore"]["files"]

    edit(store, to_format_1)
    with pytest.raises(UnsupportedVersion, match=r"format 1, this code reads 3; .*ingest again"):
        open_store(store)


DEEP = b'{"zarr_format": 3, "node_type": "group", "attributes": {"blockstore": ' + b"[" * 100_000


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"attributes": 3}', b"{", b"null", DEEP])
def test_a_root_that_is_no_manifest_is_not_a_store(store: Path, raw: bytes):
    (store / "zarr.json").write_bytes(raw)
    with pytest.raises(NotAStore):
        open_store(store)


def test_all_metadata_of_arrays_may_not_be_deleted(store: Path):
    for path in [p for p in store.rglob("zarr.json") if p.parent != store]:
        path.unlink()
    for look in (open_store, verify_store):
        with pytest.raises(CorruptBlock, match=r"zarr\.json: No such file"):
            look(store)


def test_attributes_of_other_programs_change_nothing(store: Path):
    manifest = open_store(store).manifest
    zarr.open_group(store, mode="a").attrs["license"] = "CC0"
    assert open_store(store).manifest == manifest


def test_verify_names_files_that_are_not_of_the_store(store: Path):
    assert verify_store(store).strays == ()
    shutil.copytree(store / "nodes/node/features/x", store / "nodes/node/features/y")
    (store / "notes").write_text("mine")
    (store / "nodes/node/features/x/c/1").mkdir()
    (store / "nodes/node/features/x/c/1/0").write_bytes(b"old")
    assert verify_store(store).strays == (
        "nodes/node/features/x/c/1/0", "nodes/node/features/y/c/0/0",
        "nodes/node/features/y/zarr.json", "notes",
    )  # fmt: skip


def test_every_file_but_root_and_shards_is_bound(store: Path):
    manifest: Manifest = read_root(store)
    names = set(files_of(store)) - {"zarr.json"}
    shards = {n for n in names if kind_of(n).endswith("shard")}
    assert sorted(manifest.files) == bound_files(manifest) == sorted(names - shards)
    assert {n.partition("/c/")[0] for n in shards} == {
        "edges/node___to___node/blocks", "nodes/node/features/x", "nodes/node/original_id",
        "nodes/node/splits/train", "nodes/node/store_id",
    }  # fmt: skip
