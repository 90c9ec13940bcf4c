"""Parts of a store: what is here, what holes say, what refuses them."""

import shutil
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.errors import AbsentRows, CorruptBlock, StoreError, StoreExists
from blockstore.format import shard_path
from blockstore.make_part import make_part, part_bytes, plan_part
from blockstore.owners import write_owners
from blockstore.part import PART, Holes, StorePart, find_keepers, kept_rows
from blockstore.root import read_digested, write_digested
from blockstore.store import Store, open_store, read_rows, scan_rows
from blockstore.verify import verify_store
from tests.graphs import make_csc
from tests.preprocess.kills import run_and_kill
from tests.preprocess.test_commands import good, refused
from tests.stores import write_store

NODES, WIDTH = 900, 64  # 16 rows a block of 4 KiB


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(0, 99))
def test_keepers_are_those_of_plain_python(rows: int, per_block: int, servers: int, seed: int):
    owner = np.repeat(np.random.default_rng(seed).integers(0, servers, rows), 1 + seed % 9)[:rows]
    for server in range(servers):
        found = find_keepers(owner, per_block, server)
        for block in range(-(-rows // per_block)):
            own = owner[block * per_block : (block + 1) * per_block].tolist()
            assert found[block] == (server if server in own else own[0])
        runs = kept_rows(found, per_block, rows)
        assert [r for first, stop, _ in runs for r in range(first, stop)] == list(range(rows))
        assert all(found[first // per_block] == s for first, _, s in runs)
        holes = Holes(server, found)
        here = [b for low, high in holes.present() for b in range(low, high)]
        assert here == np.flatnonzero(found == server).tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an owner map of three servers: ranges of nodes."""
    path = tmp_path_factory.mktemp("parts") / "store"
    graph = make_csc([6] * NODES, 3)
    write_store(path, graph, list(range(0, NODES, 3)), width=WIDTH)
    owner = np.minimum(np.arange(NODES) // 310, 2)
    write_owners(open_store(path), "thirds", owner, 3, {})
    return path


def made(whole: Path, target: Path, server: int = 1) -> Store:
    store = open_store(whole)
    plan = plan_part(store, "thirds", server)
    written: list[int] = []
    make_part(store, target, plan, written.append)
    assert sum(written) == part_bytes(store, plan)
    return open_store(target)


def test_a_part_has_its_own_rows_and_all_of_the_rest(whole: Path, tmp_path: Path):
    store, part = open_store(whole), made(whole, tmp_path / "p1")
    assert part.manifest == store.manifest
    (t,) = store.manifest.types
    x = t.features["x"]
    # nodes 310 to 619, in blocks of 16 rows: 304 to 623
    own = np.concatenate([rows.copy() for _, rows in scan_rows(part, x, start=304, stop=624)])
    assert np.array_equal(own, read_rows(store, x)[304:624])
    for array in (t.original_id, t.store_id, t.splits["train"]):
        assert np.array_equal(read_rows(part, array), read_rows(store, array))
    for first, stop, owner in ((0, 16, 0), (300, 320, 0), (624, 625, 2), (620, 640, 2)):
        with pytest.raises(AbsentRows, match=f"is with server {owner}, this part has that of"):
            list(scan_rows(part, x, start=first, stop=stop))
    report = verify_store(part.path)
    assert (report.strays, report.part) == ((), str(part.part))
    shard = shard_path(x.path, 0, 2)
    sparse, full = ((path / shard).stat() for path in (part.path, store.path))
    assert sparse.st_size == full.st_size
    assert sparse.st_blocks < full.st_blocks / 2


def test_damage_is_found_in_what_is_here(whole: Path, tmp_path: Path):
    part = made(whole, tmp_path / "p1")
    shard = part.path / shard_path(part.manifest.types[0].features["x"].path, 0, 2)
    with shard.open("r+b") as file:
        file.seek(400 * WIDTH * 4)
        file.write(b"\1")
    with pytest.raises(CorruptBlock, match="crc32c"):
        verify_store(part.path)


def test_a_part_that_says_otherwise_is_refused(whole: Path, tmp_path: Path):
    part = made(whole, tmp_path / "p1")
    raw = msgspec.json.encode(read_digested(part.path / PART, "part", StorePart, 1, ""))
    for old, new, match in (
        (b"[0,304,0]", b"[0,304,2]", "rows of the part of server 1"),  # found by verify
        (b"[0,304,0]", b"[0,305,0]", "all rows of 1 arrays in whole blocks"),
        (b'"servers":3', b'"servers":1', "server 1 of 1"),
        (part.manifest.fingerprint.encode(), b"0" * 32, "fingerprint 0000"),
        (b'"format":1', b'"format":2', "format 2, this code reads 1"),
    ):
        assert old in raw
        write_digested(part.path / PART, "part", msgspec.Raw(raw.replace(old, new)))
        with pytest.raises(StoreError, match=match):
            verify_store(part.path)
    (part.path / PART).write_bytes(raw)
    with pytest.raises(CorruptBlock, match="expected 'part' and a digest"):
        open_store(part.path)


def test_a_kill_leaves_a_whole_part_or_none(whole: Path, tmp_path: Path):
    target = tmp_path / "p"
    for number in range(5):
        run_and_kill(partial(made, whole, target), 0.01 * number)
        if target.exists():
            verify_store(target)
            shutil.rmtree(target)
    made(whole, target)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_what_cannot_be_made_is_refused(whole: Path, tmp_path: Path):
    part = made(whole, tmp_path / "p1")
    with pytest.raises(StoreError, match="part of server 1 of 3, by the owner map 'thirds'"):
        plan_part(part, "thirds", 0)
    with pytest.raises(StoreError, match="--server 3: the owner map 'thirds' has 3 owners"):
        plan_part(open_store(whole), "thirds", 3)
    with pytest.raises(StoreError, match="no owner map 'x'"):
        plan_part(open_store(whole), "x", 0)
    with pytest.raises(StoreExists):
        made(whole, tmp_path / "p1")


def test_the_command_and_who_refuses_parts(whole: Path, tmp_path: Path):
    part = tmp_path / "p0"
    line = good("part", whole, part, "--owners", "thirds", "--server", "0")
    assert line.strip() == f"{part}: part of server 0 of 3, by the owner map 'thirds'"
    assert "part of server 0 of 3" in good("info", part)
    assert "good, part of server 0 of 3" in good("verify", part)
    for words in (
        ("export", part, tmp_path / "out"),
        ("repartition", part, tmp_path / "new", "--partitions", "2"),
        ("hops", part, "--operator", "row", "--hops", "1", "--rows", "all"),
        ("derive", part, "--type", "node", "--from", "node", "--relation", "to", "--name", "d"),
        ("pack", part),
        ("part", part, tmp_path / "again", "--owners", "thirds", "--server", "0"),
    ):
        assert "expects a whole store" in refused(*words), words
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p0"]
