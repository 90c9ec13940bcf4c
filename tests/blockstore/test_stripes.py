"""Blocks dealt over folders: the map, the reader, what a kill leaves, which disk is named."""

import errno
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore import concurrency, make_stripes
from blockstore.errors import CorruptBlock, StoreError
from blockstore.format import PAGE_BYTES, STRIPE_FOLDER, blocked_arrays
from blockstore.io.buffers import aligned_buffer
from blockstore.io.disks import Disks
from blockstore.io.gds import HostReader
from blockstore.io.reader import BlockReader, make_transit
from blockstore.kernels.reads import PAGES
from blockstore.make_part import make_part, plan_part
from blockstore.make_stripes import check_folders, deal_store
from blockstore.objects.push import _objects
from blockstore.owners import write_owners
from blockstore.root import read_digested, write_digested
from blockstore.store import BlockedFile, Store, open_store, read_rows, scan_blocks
from blockstore.stripes import STRIPE, STRIPES, Deal, StripeSet
from blockstore.verify import verify_store
from tests.graphs import make_csc
from tests.kills import counted, kill_at
from tests.preprocess.test_commands import good, refused
from tests.preprocess.test_resume import tree
from tests.reads import watch_reads
from tests.stores import write_store

NODES, WIDTH = 700, 64  # 16 rows a block of 4 KiB
UNIT = 2 * PAGE_BYTES


def nothing(_count: int) -> None:
    """Who is told of bytes that were written."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch):
    """So that these stores have many."""
    monkeypatch.setattr(make_stripes, "UNIT_BYTES", UNIT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, not dealt."""
    path = tmp_path_factory.mktemp("whole") / "store"
    write_store(path, make_csc([6] * NODES, 3), list(range(0, NODES, 3)), width=WIDTH)
    return path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(whole, tmp_path / "store")
    return tmp_path / "store"


def disks(folder: Path, count: int = 2) -> list[Path]:
    return [folder / f"disk{i}" / "graph" for i in range(count)]


# -- the map --------------------------------------------------------------------------------------


@given(unit=st.integers(1, 9), pages=st.integers(0, 200), count=st.integers(1, 5))
def test_each_page_has_one_place_and_files_have_no_gaps(unit: int, pages: int, count: int):
    deal = Deal(unit, pages, (Path(),) * count, ("",) * count)
    places = [deal.place(page) for page in range(pages)]
    for file in range(count):
        # one after the other, in the order of the array
        own = [page for found, page in places if found == file]
        assert own == list(range(deal.file_pages(file)))
    for page, (file, _) in enumerate(places):
        assert file == page // unit % count


@given(
    unit=st.integers(1, 9),
    count=st.integers(1, 4),
    runs=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), max_size=12),
)
def test_runs_are_cut_where_another_disk_begins(unit: int, count: int, runs: list):
    deal = Deal(unit, 200, (Path(),) * count, ("",) * count)
    places = np.cumsum([0, *(pages for _, pages in runs)])[:-1] * PAGE_BYTES
    given_runs = [
        (0, page, pages, place) for (page, pages), place in zip(runs, places, strict=True)
    ]
    expected = {}  # of each page of memory: file, page of the file
    for _, page, pages, place in given_runs:
        expected |= {place // PAGE_BYTES + i: deal.place(page + i) for i in range(pages)}
    found = {}
    cut = deal.cut(np.array(given_runs, np.int64).reshape(-1, 4))
    for file, own in enumerate(cut):
        for row, page, pages, place in own.tolist():
            assert page // unit == (page + pages - 1) // unit == row
            found |= {place // PAGE_BYTES + i: (file, page + i) for i in range(pages)}
    assert found == expected
    assert sum(int(own[:, PAGES].sum()) for own in cut) == sum(pages for _, pages in runs)


# -- reading --------------------------------------------------------------------------------------


def of_rows(store: Store) -> BlockedFile:
    return store.rows(store.manifest.types[0].features["x"])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_comes_is_what_comes_of_a_store_that_is_not_dealt(
    whole: Path, store: Path, tmp_path: Path, count: int
):
    dealt = deal_store(store, disks(tmp_path, count), nothing)
    files = of_rows(open_store(whole)), of_rows(dealt)
    g = files[0].geometry
    rng = np.random.default_rng(count)
    pages = np.unique(rng.integers(0, g.num_pages - 5, 30))
    runs = np.stack([0 * pages, pages, rng.integers(1, 6, pages.size)]).T.copy()
    blocks = np.sort(rng.permutation(g.num_blocks)[: g.num_blocks // 2])
    found = []
    for file in files:
        memory = aligned_buffer((g.num_blocks + 200) * g.slot_bytes)
        memory[:] = 0
        streamed: dict[int, bytes] = {}

        def consume(low: int, high: int, data: np.ndarray, into: dict[int, bytes] = streamed):
            for run in range(low, high):
                size = int(runs[run, 2]) * PAGE_BYTES
                into[run], data = data[:size].tobytes(), data[size:]

        with BlockReader([file], memory, g.slot_bytes, 3) as reader:
            reader.read(0, blocks, blocks)
            targets = (g.num_blocks + np.arange(len(runs)) * 6) * g.slot_bytes
            reader.fetch(0, runs, targets).wait()
            transit = make_transit([aligned_buffer(1 << 16) for _ in range(3)])
            reader.stream(0, runs, transit, consume).wait()
            counters = reader.counters()
        taken = [n for name, n in counters.items() if name.startswith("disk:bytes_read:")]
        if file is files[1]:
            assert sum(taken) == counters["bytes_read"]
            assert len(taken) == count
            assert all(taken)
        ranges = file.row_ranges(4 * WIDTH, 37, 400)
        rows = np.empty(363 * 4 * WIDTH, np.uint8)
        host = HostReader(file)
        host.read(ranges, rows)
        host.close()
        found.append((memory.tobytes(), streamed, counters["bytes_read"], rows.tobytes()))
    assert found[0] == found[1]


def test_a_part_an_object_and_every_row_are_those_of_the_store(
    whole: Path, store: Path, tmp_path: Path
):
    deal_store(store, disks(tmp_path), nothing)
    stores = open_store(whole), open_store(store)
    parts = []
    for each in stores:
        for array in each.manifest.row_arrays():
            assert np.array_equal(read_rows(each, array), read_rows(stores[0], array))
        write_owners(each, "halves", np.arange(NODES) // 350, 2, {})
        part = tmp_path / f"part{len(parts)}"
        make_part(each, part, plan_part(each, "halves", 1), nothing)
        parts.append(tree(part))
    assert parts[0] == parts[1]
    for one, other in zip(*map(_objects, stores), strict=True):
        assert one[:3] == other[:3]
        assert b"".join(one.body()) == b"".join(other.body())
    with pytest.raises(StoreError, match="is the part of server 1 of 2"):
        deal_store(tmp_path / "part1", disks(tmp_path), nothing)
    for each in stores:
        shutil.rmtree(each.path / "owners")


# -- dealing --------------------------------------------------------------------------------------


def test_a_store_is_dealt_dealt_again_and_gathered(whole: Path, store: Path, tmp_path: Path):
    before, written = verify_store(store), list[int]()
    first, second = disks(tmp_path, 3), disks(tmp_path / "more", 2)
    dealt = deal_store(store, first, written.append)
    assert (
        sum(written) == sum(g.num_pages for _, g, _ in blocked_arrays(dealt.manifest)) * PAGE_BYTES
    )
    assert dealt.manifest == open_store(whole).manifest
    assert not list(store.rglob("c/*/*"))
    assert dealt.stripes is not None
    report = verify_store(store)
    assert str(first[2]) in report.stripes
    assert (report.strays, report.bytes) == ((), before.bytes)
    again = deal_store(store, [*second, first[0]], nothing)
    assert again.stripes is not None
    assert again.stripes.id != dealt.stripes.id
    assert [list(folder.iterdir()) for folder in first[1:]] == [[], []]
    assert len(list(first[0].iterdir())) == 1
    verify_store(store)
    gathered = deal_store(store, [], nothing)
    assert gathered.stripes is None
    assert tree(store) == tree(whole)
    assert not any(list(folder.iterdir()) for folder in (*first, *second))
    with pytest.raises(StoreError, match="blocks are in it, expected a store whose blocks are"):
        deal_store(store, [], nothing)


CALLS = ("rename", "fsync", "unlink", "rmdir", "pwrite")


@pytest.mark.parametrize(
    ("dealt_before", "gathers"),
    [
        (False, False),
        (True, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.long),  # of one disk
    ],
)
def test_a_kill_anywhere_leaves_a_whole_store_and_the_next_run_removes_the_rest(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dealt_before: bool, gathers: bool
):
    if gathers and not dealt_before:
        deal_store(store, disks(tmp_path / "old", 1), nothing)
    elif dealt_before:
        deal_store(store, disks(tmp_path / "old"), nothing)
    fingerprint = open_store(store).manifest.fingerprint
    old = open_store(store).stripes
    folders = [] if gathers else disks(tmp_path / "new")
    trial, seen = tmp_path / "trial", [0]
    shutil.copytree(tmp_path, trial, ignore=shutil.ignore_patterns("trial"))
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name), seen, -1))
        deal_store(store, folders, nothing)
    steps = seen[0]
    found = set()
    for last in sorted({1, 2, *np.linspace(3, steps, 6).astype(int).tolist()}):
        for name in ("store", "old", "new"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            if (trial / name).exists():
                shutil.copytree(trial / name, tmp_path / name)
        kill_at(lambda: deal_store(store, folders, nothing), CALLS, last)
        now = open_store(store)
        assert verify_store(store).pages
        assert now.manifest.fingerprint == fingerprint
        found.add(now.stripes == old)
        if now.stripes is None and gathers:
            with pytest.raises(StoreError, match="its blocks are in it"):
                deal_store(store, folders, nothing)
            folders_now = disks(tmp_path / "new")  # the next run of any kind
        else:
            folders_now = folders
        made = deal_store(store, folders_now, nothing)
        assert not verify_store(store).strays
        assert not (store / STRIPE_FOLDER).exists()
        kept = made.stripes.parts() if made.stripes else []
        assert sorted(tmp_path.glob("*/disk*/graph/*")) == sorted(kept)
    assert found == {True, False}


# -- what is refused ------------------------------------------------------------------------------


def test_a_disk_that_is_missing_or_another_one_is_named(store: Path, tmp_path: Path):
    folders = disks(tmp_path, 3)
    deal_store(store, folders, nothing)
    away = tmp_path / "away"
    folders[1].rename(away)
    for match in ("disk 2 of 3, .*disk1/graph, is not there", "disk1/graph, has none of its"):
        with pytest.raises(StoreError, match=match):
            open_store(store)
        folders[1].mkdir(exist_ok=True)
    folders[1].rmdir()
    line = refused("verify", store)
    assert str(folders[1]) in line
    assert "mount the disk there" in line
    # the disks of two other stores, one of the same number
    other = tmp_path / "other"
    write_store(other, make_csc([2] * 90, 1), [1, 2], width=WIDTH)
    deal_store(other, disks(tmp_path / "others", 3), nothing)
    disks(tmp_path / "others", 3)[1].rename(folders[1])
    with pytest.raises(StoreError, match=f"has blocks of {other} or of another dealing"):
        open_store(store)
    # disks that changed places
    shutil.rmtree(folders[1])
    folders[0].rename(folders[1])
    away.rename(folders[0])
    with pytest.raises(StoreError, match=r"disk 1 of 3, .*has disk 2 of 3 of .*mount each disk"):
        open_store(store)


def test_records_that_say_otherwise_are_refused(store: Path, tmp_path: Path):
    deal_store(store, disks(tmp_path), nothing)
    raw = msgspec.json.encode(read_digested(store / STRIPES, "stripes", StripeSet, 1, ""))
    for old, new, match in (
        (b'"format":1', b'"format":2', "format 2, this code reads 1"),
        (str(tmp_path).encode(), b"here", "expected 1 to 64 absolute paths"),
        (b"nodes/node/features/x", b"nodes/node/features/y", "arrays of the store"),
        (f'"unit_bytes":{UNIT}'.encode(), b'"unit_bytes":0', "units of 0 bytes"),
        (b'"id":"', b'"id":"../', "expected 1 to 64 absolute"),
    ):
        assert old in raw
        write_digested(store / STRIPES, "stripes", msgspec.Raw(raw.replace(old, new)))
        with pytest.raises(StoreError, match=match):
            open_store(store)
    (store / STRIPES).write_bytes(raw)
    with pytest.raises(CorruptBlock, match="expected 'stripes' and a digest"):
        open_store(store)


def test_folders_that_cannot_be_are_refused(store: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for folders, match in (
        ([tmp_path / "a", tmp_path / "link"], "link: given twice"),
        ([store / "a"], "store/a: is in the store"),
        ([store], "store: is in the store"),
        ([tmp_path / "\udcff"], r"udcff' or .*: is no UTF-8, expected names"),
        ([tmp_path / "file"], "file: is no folder"),
        ([tmp_path / str(i) for i in range(65)], "65 folders, expected 1 to 64"),
    ):
        with pytest.raises(StoreError, match=match):
            deal_store(store, folders, nothing)
        assert not (store / STRIPE_FOLDER).exists()
    with pytest.raises(StoreError, match="given twice"):
        check_folders([tmp_path / "b", tmp_path / "b"], tmp_path / "store-to-be")
    assert "no folders, expected folders on the disks, or --gather" in refused("stripe", store)
    assert "--gather and folders" in refused("stripe", store, tmp_path / "a", "--gather")


def test_a_page_that_was_changed_and_a_disk_that_fails_are_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folders = disks(tmp_path)
    dealt = deal_store(store, folders, nothing)
    file = of_rows(dealt)
    g = file.geometry
    assert file.deal is not None
    path, everything = file.shards[1], np.arange(g.num_blocks)
    with path.open("r+b") as raw:
        raw.seek(3 * PAGE_BYTES + 9)
        raw.write(b"\x07\x07")
    memory = aligned_buffer(g.num_blocks * g.slot_bytes)
    with BlockReader([file], memory, g.slot_bytes, 2) as reader:
        with pytest.raises(CorruptBlock, match=rf"{path}\+{3 * PAGE_BYTES}: crc32c"):
            reader.read(0, everything, everything)
        assert reader.disks is not None
        assert [disk.errors for disk in reader.disks.all] == [0, 1]
        assert (reader.errors, reader.retries) == (1, 1)
    with pytest.raises(CorruptBlock, match=rf"{path}\+"):
        verify_store(store)

    def fail(fd: int, offset: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink() == path and offset >= 4 * PAGE_BYTES:
            raise OSError(errno.EIO, "Input/output error", f"{path}+{offset}")

    watch_reads(monkeypatch, fail)
    late = everything[8:]
    with (
        BlockReader([file], memory, g.slot_bytes, 2) as reader,
        pytest.raises(OSError, match=rf"Input/output error: '{path}\+\d+'"),
    ):
        reader.read(0, late, late)
    os.truncate(path, path.stat().st_size - PAGE_BYTES)
    with pytest.raises(CorruptBlock, match=f"{path}: .* bytes, expected .* truncated"):
        open_store(store)


def test_a_block_that_says_something_else_is_named_with_its_disk(store: Path, tmp_path: Path):
    """Its pages are as they were written; blocks of several disks are checked at once."""
    dealt = deal_store(store, disks(tmp_path), nothing)
    file = of_rows(dealt)
    g = file.geometry

    class Check:
        def check(self, block: int, data: np.ndarray, size: int, where: str) -> None:
            for i in range(data.size // size):
                if block + i == 3:
                    raise CorruptBlock(f"{where}: block {block + i}")

    file = replace(file, check=Check())  # type: ignore[arg-type]
    expected = f"^{file.shards[1]}: block 3"  # units of two blocks: 2 and 3 are on disk 1
    with pytest.raises(CorruptBlock, match=expected):
        list(scan_blocks(file))
    memory = aligned_buffer(8 * g.slot_bytes)
    with BlockReader([file], memory, g.slot_bytes, 1) as reader:
        runs = np.array([[0, 0, 8 * g.pages_per_block]], np.int64)
        with pytest.raises(CorruptBlock, match=expected):
            reader.fetch(0, runs, np.zeros(1, np.int64)).wait()


def test_a_folder_of_the_store_without_direct_reads_is_seen(
    whole: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An array that was added later lies in the store, on another file system than the disks."""
    files = [of_rows(deal_store(store, disks(tmp_path), nothing)), of_rows(open_store(whole))]

    def probe(path: Path) -> str:
        return "buffered: it says so" if path.is_relative_to(whole) else "O_DIRECT"

    monkeypatch.setattr("blockstore.io.reader.probe_direct", probe)
    with BlockReader(files, aligned_buffer(PAGE_BYTES), PAGE_BYTES, 1) as reader:
        assert reader.mode == "buffered: it says so, 2 disks"


def test_what_cannot_be_removed_stays_on_record(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A dealing fails, and so does cleaning up after it: the next run removes the rest."""

    def fail(*_args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(make_stripes, "flush_tree", fail)
        patch.setattr(make_stripes, "check_path", fail)
        with pytest.raises(OSError, match="Input/output error"):
            deal_store(store, disks(tmp_path), nothing)
    left = list(tmp_path.glob("disk*/graph/*"))
    assert len(left) == 2
    made = deal_store(store, disks(tmp_path), nothing)
    assert made.stripes is not None
    assert sorted(tmp_path.glob("disk*/graph/*")) == sorted(made.stripes.parts())


def test_a_disk_that_is_slower_than_the_others_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Three disks are read in turn, 64 KiB each; a window is four turns."""
    now = [0]
    monkeypatch.setattr(concurrency, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr("blockstore.io.disks._WINDOW_BYTES", 12 * 16 * PAGE_BYTES)
    some, none = np.array([[0, 0, 16, 0]], np.int64), np.empty((0, 4), np.int64)

    def turns(count: int, *costs: int) -> list[int]:
        for disk, cost in list(enumerate(costs)) * count:

            def read(_pieces: np.ndarray, _queue: object, ns: int = cost) -> int:
                now[0] += ns
                return 1

            three.read([some if i == disk else none for i in range(3)], [read] * 3)
        return [three.counters()[f"disk:slow:/{name}"] for name in "abc"]

    with (
        Disks(["/a", "/b", "/c"], 1, True) as three,
        caplog.at_level(logging.WARNING),
    ):
        assert turns(12, 100, 140, 110) == [0, 0, 0]
        assert turns(4, 100, 200, 110) == [0, 0, 0]  # it may be by chance
        assert turns(4, 100, 140, 110) == [0, 0, 0]
        assert not caplog.messages
        assert turns(8, 1000, 2000, 1100) == [0, 1, 0]
        (line,) = caplog.messages
        assert line.startswith("/b: slow disk: ")
        assert "\n" not in line
        assert turns(8, 1000, 2000, 1100) == [0, 1, 0]
        assert turns(4, 100, 100, 100) == [0, 0, 0]
        assert turns(8, 0, 0, 100) == [0, 0, 0]  # no others' time to compare with
        assert len(caplog.messages) == 1
    assert three.counters()["disk:active_ns:/b"] == 12 * 140 + 4 * 340 + 16 * 2000 + 4 * 100


# -- commands -------------------------------------------------------------------------------------


def test_commands_say_where_blocks_are(store: Path, tmp_path: Path):
    folders = disks(tmp_path)
    said = good("stripe", store, *folders)
    assert f"in {folders[0]}, {folders[1]}" in said
    assert f"in {folders[0]}, {folders[1]}" in good("info", store)
    facts = msgspec.json.decode(good("info", store, "--json"))
    assert facts["stripes"] == [str(folder) for folder in folders]
    assert facts["disk_bytes"] > sum(facts["array_bytes"].values())
    assert f"in {folders[0]}, {folders[1]}" in good("verify", store)
    assert "blocks are in it" in good("stripe", store, "--gather")


def test_an_ingest_deals_what_it_has_made(tmp_path: Path):
    words = "--nodes 900 --degree 6 --features 64 --classes 3 --train 0.5 --seed 1"
    good("generate", tmp_path / "graph", *words.split())
    folders = disks(tmp_path)
    given_folders = [word for folder in folders for word in ("--stripe", folder)]
    common = ("ingest", tmp_path / "graph")
    good(*common, tmp_path / "one", "--block-size", "4K")
    good(*common, tmp_path / "two", "--block-size", "4K", *given_folders)
    one, two = open_store(tmp_path / "one"), open_store(tmp_path / "two")
    assert two.stripes is not None
    assert two.manifest == one.manifest
    verify_store(tmp_path / "two")
    line = refused(*common, tmp_path / "three", "--stripe", tmp_path / "three" / "a")
    assert "is in the store" in line
    assert not (tmp_path / "three").exists()
    line = refused(
        *common, "s3://bucket/x", "--work", tmp_path / "work", "--stripe", tmp_path / "a"
    )
    assert "a URL as the store" in line
    assert (folders[0] / two.stripes.id / STRIPE).exists()
