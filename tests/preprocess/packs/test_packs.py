"""Packs against plain Python; runs that end anywhere; what is refused."""

import random
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from blockstore.errors import BudgetTooSmall, OutOfSpace, StoreBusy, StoreError, StoreExists
from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.lock import lock_folder
from blockstore.store import open_store, read_rows
from loaderd.api.errors import Refused
from loaderd.memory.blob import joined
from loaderd.memory.ledger import served_rows
from loaderd.sampling.hyperbatch.regions import rows_by_type
from loaderd.sampling.packed import format as packed
from loaderd.sampling.packed.format import Pack, PackIndex, read_pack, read_record
from loaderd.sampling.structure import Structure, StructureArrays
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.packs.command import verify_packs
from preprocess.packs.packs import PackResult
from preprocess.pipeline.work import WorkFolder, work_path
from preprocess.sources.layouts import open_source
from tests.golden_cases import write_hetero
from tests.loaderd.packing import pack
from tests.preprocess.kills import run_and_kill
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_commands import good, refused
from tests.preprocess.test_resume import tree

OPTIONS: dict[str, Any] = {
    "num_neighbors": (4, 3), "batch_size": 60, "seed": 3, "input_type": "paper",
}  # fmt: skip
WORDS = (
    "--num-neighbors", "4,3", "--batch-size", "60", "--seed", "3", "--seed-type", "paper",
    "--hot", "8K", "--group", "6K",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three types in blocks of 4 KiB."""
    folder = tmp_path_factory.mktemp("packs")
    write_hetero(folder / "graph")
    source = open_source(folder / "graph").source
    ingest(source, folder / "store", IngestOptions(block_bytes=4096), QUIET)
    return folder / "store"


class Whole(NamedTuple):
    """A copy of `made`, and its pack, made at once."""

    store: Path
    result: PackResult
    files: dict[str, str]


@pytest.fixture(scope="module")
def whole(made: Path) -> Whole:
    path = Path(shutil.copytree(made, made.with_name("whole") / "store"))
    result = pack(path, OPTIONS, hot=8 << 10, group=6 << 10)
    return Whole(path, result, tree(result.path))


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def read_pages(folder: Path, made: Pack, path: str) -> np.ndarray:
    """An array of a pack, as its shard holds it."""
    array = next(a for a in made.arrays() if a.path == path)
    geometry = row_geometry(array, made.block_bytes)
    shard = folder / path / "c" / "0" / "/".join("0" * len(array.row_shape))
    return np.fromfile(shard, np.uint8, geometry.num_blocks * geometry.slot_bytes)


def batches_of(folder: Path, made: Pack, epoch: int) -> list[Any]:
    """(structure, arrays, places) of each batch."""
    found, at, place_at = [], 0, 0
    own = made.epochs[epoch]
    records = read_pages(folder, made, own.structure.path)
    places = read_pages(folder, made, own.places.path).view(np.uint32)
    for pages, nodes in zip(own.pages, own.nodes, strict=True):
        record = records[at * PAGE_BYTES : (at + pages) * PAGE_BYTES]
        structure, arrays = read_record(record, made.dtypes)
        found.append((structure, arrays, places[place_at : place_at + nodes]))
        at += pages
        place_at += -(-4 * nodes // PAGE_BYTES) * PAGE_BYTES // 4
    return found


def rows_at(raw: np.ndarray, geometry: Any, width: int, first: int, count: int) -> list[bytes]:
    """Rows from a block on, as they lie."""
    found = []
    for row in range(count):
        block, within = divmod(row, geometry.rows_per_block)
        at = (first + block) * geometry.slot_bytes + within * width
        found.append(raw[at : at + width].tobytes())
    return found


def test_every_node_of_every_batch_finds_its_rows(whole: Whole):
    result = whole.result
    made, opened = result.pack, open_store(whole.store)
    served = served_rows(opened.manifest)
    types = rows_by_type(served)
    assert len(made.hot) == len(types) == 3
    assert sum(made.hot) > 50
    for epoch, own in enumerate(made.epochs):
        assert len(own.groups) > 2
        batches = batches_of(result.path, made, epoch)
        for number, t in enumerate(types):
            for i in t.served:
                array, rows = own.rows[i], read_rows(opened, served[i].array)
                geometry = row_geometry(array, made.block_bytes)
                raw = read_pages(result.path, made, array.path)
                hot = rows_at(
                    read_pages(result.path, made, made.hot_rows[i].path), geometry,
                    array.row_bytes, 0, made.hot[number],
                )  # fmt: skip
                block, at = 0, 0
                for group in own.groups:
                    cold = rows_at(raw, geometry, array.row_bytes, block, group.rows[number])
                    held = {sum(made.hot[:number]) + k: row for k, row in enumerate(hot)}
                    base = sum(made.hot) + sum(group.rows[:number])
                    held |= {base + k: row for k, row in enumerate(cold)}
                    for _, arrays, places in batches[at : at + group.batches]:
                        nodes = arrays.nodes[0].astype(np.int64)
                        mine = (nodes >= t.first) & (nodes < t.first + t.num_nodes)
                        for node, place in zip(nodes[mine], places[mine], strict=True):
                            assert held[int(place)] == rows[node - t.first].tobytes()
                        assert not any(int(place) in held for place in places[~mine])
                    block += -(-group.rows[number] // geometry.rows_per_block)
                    at += group.batches
                assert at == len(batches)
                assert block == geometry.num_blocks


def test_a_record_is_what_was_sampled():
    pieces = [np.arange(n, dtype=np.uint32) for n in (5, 3, 7, 9, 0)]
    arrays = StructureArrays(
        (pieces[0], pieces[1]), joined([pieces[2]]), joined([pieces[3]]), joined([], np.uint64),
        joined([np.arange(2)]), joined([pieces[4]]), joined([pieces[4]]),
        joined([np.empty(0, np.int64)]),
    )  # fmt: skip
    structure = Structure((2, 4, 2), ((3, 1), (4, 1)), 8, 9, (2, 4), 2, 0)
    dtypes = packed.array_dtypes("uint32", "uint32")
    record = packed.make_record(structure, arrays, dtypes)
    memory = np.full(packed.num_pages(record.num_bytes) * PAGE_BYTES, 7, np.uint8)
    packed.write_record(record, memory)
    assert not memory[record.num_bytes :].any()
    found, back = read_record(memory, dtypes)
    assert found == structure
    assert back.nodes[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    for array, one in zip(arrays[1:], back[1:], strict=True):
        values = [np.empty(w.size, w.dtype) for w in (array, one)]
        for w, out in zip((array, one), values, strict=True):
            w.write(0, out)
        assert values[0].tolist() == values[1].tolist()


def test_a_pack_is_found_by_its_batches(whole: Whole):
    made = whole.result.pack
    for cycle, epoch, there in ((0, 1, True), (0, 2, False), (2, 5, True), (3, 2, False)):
        resolved = msgspec.structs.replace(made.resolved, cycle=cycle)
        assert made.serves(resolved, epoch) == there
    index = PackIndex(made, made.resolved)
    assert index.pack is made


_FINISH = WorkFolder.finish


def finish_and_stop(*arguments: Any) -> None:
    """`WorkFolder.finish`, after which the run ends."""
    _FINISH(*arguments)
    raise KeyboardInterrupt


def test_a_run_goes_on_after_every_stage(
    store: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
):
    stages, expected = whole.result.stages, whole.files
    target = store.with_name("store.packs") / whole.result.path.name
    for _ in stages[1:]:  # each run does one stage more, with what those before it left
        with monkeypatch.context() as patch:
            patch.setattr(WorkFolder, "finish", finish_and_stop)
            with pytest.raises(KeyboardInterrupt):
                pack(store, OPTIONS, hot=8 << 10, group=6 << 10)
        assert not target.exists()
    result = pack(store, OPTIONS, hot=8 << 10, group=6 << 10)
    assert result.path == target
    assert sum(s.resumed for s in result.stages) == len(stages) - 1
    assert tree(target) == expected
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_four_kills_at_any_moment_change_nothing(store: Path, whole: Whole):
    begun = time.monotonic()  # `whole` may have loaded or compiled kernels
    target, expected = pack(store, OPTIONS, hot=8 << 10, group=6 << 10).path, whole.files
    whole_s = time.monotonic() - begun
    assert tree(target) == expected
    shutil.rmtree(target)
    moments, kills = random.Random(7), 0
    run = partial(pack, store, OPTIONS, hot=8 << 10, group=6 << 10)
    for _ in range(100):
        ended = run_and_kill(run, moments.uniform(whole_s * 0.2, whole_s))
        kills += not ended
        if target.exists():
            assert tree(target) == expected
            shutil.rmtree(target)
        if kills == 4:
            break
    assert kills == 4
    run()
    assert tree(target) == expected


def test_a_disk_without_room_is_said_before_anything_is_written(
    store: Path, monkeypatch: pytest.MonkeyPatch
):
    before, full = tree(store.parent), shutil.disk_usage(store)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OutOfSpace, match=r"found 48.8K free, expected .* for the result"):
        pack(store, OPTIONS)
    assert tree(store.parent) == before
    assert [p.name for p in store.parent.iterdir()] == ["store"]


def test_too_little_memory_names_what_would_do(store: Path):
    for mem in (30_000, 300_000):
        with pytest.raises((BudgetTooSmall, Refused), match=r"give at least --mem|with at least"):
            pack(store, OPTIONS, mem=mem)
    assert [p.name for p in store.parent.iterdir()] == ["store"]


def test_a_pack_that_is_there_stays(whole: Whole):
    with pytest.raises(StoreExists, match=r"exists already; remove it"):
        pack(whole.store, OPTIONS, hot=8 << 10, group=6 << 10)
    assert tree(whole.result.path) == whole.files


def test_another_run_is_waited_for_by_nobody(store: Path, whole: Whole):
    path = store.with_name("store.packs") / whole.result.path.name
    path.parent.mkdir()
    lock = lock_folder(work_path(path), path, "writing")
    with pytest.raises(StoreBusy):
        pack(store, OPTIONS, hot=8 << 10, group=6 << 10)
    assert lock


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_neighbors": (4, 0)}, "fanout 0 at hop 1"),
        ({"split": "nope"}, "nope"),
        ({"input_type": "venue"}, "seed type 'venue' is not in the store"),
        ({"replace": True, "num_neighbors": (-1, 2)}, "expected no fanout -1"),
        ({"return_e_id": True}, "the store has no edge ids"),
        ({"world_size": 70}, "must be at least world_size 70"),
        ({"frontier": "wide"}, "expected new or layer"),
    ],
)
def test_what_a_session_is_refused_a_pack_is(store: Path, change: dict[str, Any], message: str):
    with pytest.raises(Refused, match=message):
        pack(store, OPTIONS | change)


def test_the_command_packs_and_says_so(store: Path):
    text = good("pack", store, *WORDS, "--mem", "64M", "--dry-run")
    for words in ("1 of 9 batches, 500 seeds", "KB a seed", "are free", "sessions keep", "pays"):
        assert words in text, text
    assert [p.name for p in store.parent.iterdir()] == ["store"]
    facts = msgspec.json.decode(good("pack", store, *WORDS, "--mem", "64M", "--dry-run", "--json"))
    assert (facts["batches"], facts["seeds"], facts["fits_disk"]) == (9, 500, True)
    text = good("pack", store, *WORDS, "--mem", "64M")
    (path,) = store.with_name("store.packs").iterdir()
    assert f"{path}: 1 epochs of 9 batches" in text
    assert read_pack(path).world_size == 1
    written = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert 0.5 * written < facts["result_bytes"] < 1.5 * written


def test_info_and_verify_name_packs(store: Path):
    result = pack(store, OPTIONS, 1, hot=8 << 10, group=6 << 10)
    assert "1 epochs of split:train, fanouts 4,4,4,4;3,3,3,3" in good("info", store)
    assert f"{result.path}: good: " in good("verify", store)
    for number, path in enumerate(sorted(p for p in result.path.rglob("*") if p.is_file())):
        raw = path.read_bytes()
        at = (0, len(raw) // 2, len(raw) - 1)[number % 3]
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(StoreError, match=re.escape(str(path))):  # as the command does, which
            list(verify_packs(store))  # reads all of the store before
        if number == 0:
            assert str(path) in refused("verify", store)
        path.write_bytes(raw)
    (result.path / "pack.json").write_text("{}")
    assert f"{result.path / 'pack.json'}: " in good("info", store)


def test_the_command_refuses_in_one_line(store: Path):
    assert "expected numbers such as" in refused("pack", store, "--num-neighbors", "a,b")
    assert "expected neighbor or labor" in refused("pack", store, "--sampler", "best")
    assert "say --sampler labor" in refused("pack", store, "--batch-dependency", "3")
    assert "the store has" in refused("pack", store, *WORDS, "--fanout", "a__b__c=3,2")
    assert "no zarr.json" in refused("pack", store.parent, *WORDS)
