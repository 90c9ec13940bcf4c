"""Packed epochs are served as they would be sampled: the same bits, and nothing else is read."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.format import PAGE_BYTES, row_geometry
from blockstore.store import open_store
from clients.torch import HeteroDataset, NeighborDataset
from loaderd.api.errors import BatchFailed, Refused
from loaderd.sampling.hyperbatch.together import BlockSampler
from loaderd.sampling.packed.format import Pack, place_pages
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.generate import GraphRecipe, generate
from preprocess.sources.layouts import open_source
from preprocess.sources.plain import PlainSource
from tests.golden_cases import write_hetero, write_plain
from tests.loaderd.packing import areas_of_groups, counters, digests, is_packed, pack
from tests.loaderd.threaded import serving
from tests.preprocess.quiet import QUIET

SMALL: dict[str, Any] = {"num_neighbors": (6, 4, 3), "batch_size": 150, "seed": 3}
LARGE = {"num_neighbors": (6, 4, 3), "batch_size": 200, "seed": 5, "split": "valid"}  # of `large`
TYPED = SMALL | {"num_neighbors": (4, 3), "input_type": "paper"}
BY_RELATION = {
    ("author", "writes", "paper"): (3, 2), ("paper", "cites", "paper"): (4, 0),
    ("paper", "has", "term"): (0, 0), ("term", "of", "paper"): (2, 1),
}  # fmt: skip
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "new": (NeighborDataset, SMALL | {"return_e_id": True}),
    "layer": (NeighborDataset, SMALL | {"frontier": "layer"}),
    "all-neighbors": (NeighborDataset, SMALL | {"num_neighbors": (-1, 3)}),
    "replace": (NeighborDataset, SMALL | {"replace": True}),
    "weighted": (NeighborDataset, SMALL | {"weighted": True, "return_e_id": True}),
    "labor": (NeighborDataset, SMALL | {"sampler": "labor", "batch_dependency": 3}),
    "labor-layer": (
        NeighborDataset,
        SMALL | {"sampler": "labor", "frontier": "layer", "layer_dependency": True},
    ),
    "all-in-order": (NeighborDataset, SMALL | {"split": "all", "shuffle": False}),
    "rank-1-of-3": (NeighborDataset, SMALL | {"rank": 1, "world_size": 3}),
    "hetero": (HeteroDataset, TYPED | {"return_e_id": True}),
    "hetero-layer": (HeteroDataset, TYPED | {"frontier": "layer"}),
    "hetero-labor": (HeteroDataset, TYPED | {"sampler": "labor"}),
    "hetero-by-relation": (
        HeteroDataset,
        TYPED | {"num_neighbors": BY_RELATION, "return_e_id": True},
    ),
}
SIMILAR = ("replace", "labor-layer", "all-in-order", "hetero", "hetero-layer", "hetero-labor")
PLANS = ("minibatch", "hyperbatch")
# they read with both plans, and have two epochs packed; the others one, plans in turn
BOTH = ("new", "hetero-by-relation")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[type, Path]:
    """Stores in blocks of 4 KiB, by the dataset that takes them."""
    folder, found = tmp_path_factory.mktemp("packed"), {}
    options = IngestOptions(block_bytes=4096, edge_ids=True)
    for dataset, write in ((NeighborDataset, write_plain), (HeteroDataset, write_hetero)):
        write(folder / write.__name__)
        opened = open_source(folder / write.__name__)
        found[dataset] = folder / f"{write.__name__}.store"
        ingest(opened.source, found[dataset], options, QUIET)
    return found


@pytest.fixture
def copied(stores: dict[type, Path], tmp_path: Path) -> Path:
    """The store of one type, with nothing beside it."""
    shutil.copytree(stores[NeighborDataset], tmp_path / "store")
    return tmp_path / "store"


def plans_of_cases() -> Iterator[Any]:
    """(case, plans of those who read its pack)."""
    for i, name in enumerate(CASES):
        plans = PLANS if name in BOTH else (PLANS[i % 2],)
        marks = [pytest.mark.long] if name in SIMILAR else []
        yield pytest.param(name, plans, marks=marks, id=name)
        if name not in BOTH:
            other = PLANS[1 - i % 2]
            yield pytest.param(name, (other,), marks=pytest.mark.long, id=f"{name}-{other}")


@pytest.mark.parametrize(("name", "plans"), [*plans_of_cases()])
def test_a_packed_epoch_is_the_sampled_one(
    name: str, plans: tuple[str, ...], stores: dict[type, Path], tmp_path: Path
):
    dataset, options = CASES[name]
    packed = 2 if name in BOTH else 1
    store = tmp_path / "store"
    shutil.copytree(stores[dataset], store)
    with serving(store, tmp_path) as (endpoint, streams):
        data = dataset(endpoint, plan="minibatch", **options)
        expected = [digests(data, epoch) for epoch in range(packed + 1)]
        assert not is_packed(streams)
        data.close()
    result = pack(store, options, packed)
    assert all(len(epoch.groups) > 1 for epoch in result.pack.epochs)
    with serving(store, tmp_path) as (endpoint, streams):
        for plan in plans:
            data = dataset(endpoint, plan=plan, **options)
            for epoch in range(packed):
                assert digests(data, epoch) == expected[epoch]
                assert is_packed(streams)
            assert digests(data, packed) == expected[packed]  # not packed: another stream
            assert not is_packed(streams)
            data.close()


@pytest.fixture(scope="module")
def packed(stores: dict[type, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pack]:
    """A store with a pack of two epochs of `SMALL`, for those who only read it."""
    store = tmp_path_factory.mktemp("packed") / "store"
    shutil.copytree(stores[NeighborDataset], store)
    return store, pack(store, SMALL).pack


def test_a_cycle_repeats_packed_epochs_and_those_that_are_not(
    stores: dict[type, Path], packed: tuple[Path, Pack], tmp_path: Path
):
    options = SMALL | {"plan": "minibatch"}
    with serving(stores[NeighborDataset], tmp_path) as (endpoint, _):
        plain, cycle = (NeighborDataset(endpoint, cycle=c, **options) for c in (0, 2))
        epochs = [digests(plain, epoch) for epoch in range(3)]
        assert len({e[0] for e in epochs}) == 3
        expected = [digests(cycle, epoch) for epoch in range(4)]
        assert expected == [*epochs[:2], *epochs[:2]]
        plain.close()
        cycle.close()
    with serving(packed[0], tmp_path) as (endpoint, streams):
        data = NeighborDataset(endpoint, cycle=2, **options)
        assert [digests(data, epoch) for epoch in range(4)] == expected
        assert is_packed(streams)
        data.close()


def test_runs_are_left_and_begun_anywhere(copied: Path, tmp_path: Path):
    options = SMALL | {"plan": "hyperbatch", "batch_size": 60}
    result = pack(copied, options)
    assert len(result.pack.epochs[0].groups) > 4
    with serving(copied, tmp_path) as (endpoint, streams):
        data = NeighborDataset(endpoint, **options)
        whole = [digests(data, epoch) for epoch in range(2)]
        for epoch, first in ((0, 7), (1, 3), (0, 1), (1, 14), (1, 0)):
            assert digests(data, epoch, first) == whole[epoch][first:]
        for count in (1, 5, 0, 9):  # left in the middle
            data.set_epoch(1)
            list(itertools.islice(iter(data), count))
        data.set_epoch(0)
        assert digests(data, 0) == whole[0]
        assert is_packed(streams)
        data.close()


def read_by_an_epoch(pack: Pack, epoch: int) -> int:
    """Bytes of the pages that hold what its batches want."""
    own = pack.epochs[epoch]
    pages = sum(own.pages) + sum(map(place_pages, own.nodes))
    for array in own.rows:
        per = row_geometry(array, pack.block_bytes).rows_per_block
        for group in own.groups:
            (rows,) = group.rows
            full, rest = divmod(rows, per)
            pages += full * -(-per * array.row_bytes // PAGE_BYTES)
            pages += -(-rest * array.row_bytes // PAGE_BYTES)
    return pages * PAGE_BYTES


def test_an_epoch_reads_its_part_of_the_pack_and_nothing_else(
    packed: tuple[Path, Pack], tmp_path: Path
):
    options = SMALL | {"plan": "minibatch"}
    store, made = packed
    with serving(store, tmp_path) as (endpoint, streams):
        data, seen = NeighborDataset(endpoint, **options), []
        for epoch in (0, 1, 0):
            before = counters(streams)["bytes_read"]
            digests(data, epoch)
            seen.append(counters(streams)["bytes_read"] - before)
        data.close()
        after = counters(streams)
    hot = 0
    for array in made.hot_rows:
        per = row_geometry(array, made.block_bytes).rows_per_block
        full, rest = divmod(made.hot[0], per)
        hot += full * -(-per * array.row_bytes // PAGE_BYTES) * PAGE_BYTES
        hot += -(-rest * array.row_bytes // PAGE_BYTES) * PAGE_BYTES
    first, second = (read_by_an_epoch(made, epoch) for epoch in (0, 1))
    assert seen == [first + hot, second, first]
    assert after["bytes_written"] == 0
    assert after["bytes_read"] >= sum(seen)  # those of a session that has ended count, too


def test_what_was_taken_is_given_back(packed: tuple[Path, Pack], tmp_path: Path):
    options = SMALL | {"plan": "minibatch"}
    with serving(packed[0], tmp_path) as (endpoint, streams):
        before = streams.status()[0]
        for _ in range(3):
            data = NeighborDataset(endpoint, **options)
            digests(data, 0)
            list(itertools.islice(iter(data), 2))  # groups are on their way
            data.close()
        for _ in range(1000):
            if streams.status()[0] == before:
                break
        assert streams.status()[0] == before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of 5 MB and rows of 4 MB in blocks of 16 KiB."""
    folder = tmp_path_factory.mktemp("large")
    generate(folder / "graph", GraphRecipe(20_000, 64, 50, 8, 0.1, 0.05, 0.1, 0, 1.0), QUIET)
    ingest(
        PlainSource(folder / "graph"), folder / "store", IngestOptions(block_bytes=16 << 10), QUIET
    )
    return folder / "store"


@pytest.fixture(scope="module")
def expected(large: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Digests of two epochs of `LARGE`, without a pack and with room for all."""
    with serving(large, tmp_path_factory.mktemp("expected"), 64 << 20) as (endpoint, _):
        data = NeighborDataset(endpoint, **LARGE)
        found = [digests(data, epoch) for epoch in range(2)]
        data.close()
    return found


def test_auto_reads_a_pack_where_not_all_is_in_memory(
    large: Path, expected: list[list[str]], tmp_path: Path
):
    options = LARGE
    pack(large, options, 1, hot=400_000, group=200_000)
    for mem, packed in ((64 << 20, False), (8 << 20, True)):
        with serving(large, tmp_path, mem) as (endpoint, streams):
            data = NeighborDataset(endpoint, **options)
            assert digests(data, 0) == expected[0]
            assert is_packed(streams) == packed
            assert digests(data, 1) == expected[1]
            assert not is_packed(streams)
            data.close()
    shutil.rmtree(large.with_name("store.packs"))


def test_the_bytes_of_a_pack_do_not_depend_on_memory_or_threads(
    large: Path, monkeypatch: pytest.MonkeyPatch
):
    options = LARGE
    found, folder, together = [], large.with_name("store.packs"), []
    sample = BlockSampler.sample

    def sample_and_note(self: BlockSampler, units: Any, *arguments: Any) -> Any:
        together.append(len(units))
        return sample(self, units, *arguments)

    monkeypatch.setattr(BlockSampler, "sample", sample_and_note)
    for mem, threads in ((64 << 20, 1), (5 << 20, 2), (64 << 20, 3)):
        result = pack(large, options, 1, 400_000, 100_000, mem, threads)
        found.append({str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
        assert result.seeds == 1000
        assert len(result.pack.epochs[0].groups) > 1
        shutil.rmtree(folder)
        assert bool(together) == (mem < 64 << 20 or threads == 3)
    assert found[0] == found[1] == found[2]


def test_a_pack_that_has_no_room_is_left_out(large: Path, tmp_path: Path, caplog: Any):
    options = LARGE | {"plan": "minibatch"}
    pack(large, options, 1, hot=4 << 20, group=1 << 20)
    with serving(large, tmp_path, 5 << 20) as (endpoint, streams):
        data = NeighborDataset(endpoint, **options)
        assert len(digests(data, 0)) == 5
        assert not is_packed(streams)
        data.close()
    shutil.rmtree(large.with_name("store.packs"))
    (record,) = [r for r in caplog.records if r.message == "pack not used"]
    assert "of the arena" in record.fields["reason"]


def test_one_group_at_a_time_serves_a_pack_in_little_memory(
    large: Path, expected: list[list[str]], tmp_path: Path
):
    """If two groups have no room together, the next one is read after the last was released."""
    options = LARGE | {"plan": "minibatch"}
    pack(large, options, 1, hot=400_000, group=1 << 20)
    found = set()
    for mem in range(7 << 20, 3 << 20, -(1 << 18)):
        with serving(large, tmp_path, mem) as (endpoint, streams):
            data = NeighborDataset(endpoint, **options)
            try:
                assert digests(data, 0) == expected[0]
                found.add(areas_of_groups(streams))
            except Refused:  # nor is there room without the pack
                break
            finally:
                data.close()
    shutil.rmtree(large.with_name("store.packs"))
    assert {1, 2} <= found


def test_sessions_of_other_parameters_do_not_see_the_pack(
    packed: tuple[Path, Pack], tmp_path: Path
):
    with serving(packed[0], tmp_path) as (endpoint, streams):
        for other in (
            {"seed": 4}, {"batch_size": 149}, {"split": "valid"}, {"num_neighbors": (6, 4)},
            {"return_e_id": True}, {"world_size": 2}, {"edge_features": True},
            {"input_nodes": np.arange(300)},
        ):  # fmt: skip
            data = NeighborDataset(endpoint, **(SMALL | {"plan": "minibatch"} | other))
            next(iter(data))
            assert not is_packed(streams)
            data.close()


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 4
    path.write_bytes(raw)


def tried(data: Any) -> tuple[list[str], str]:
    """The digests of epoch 0, or what the error says."""
    try:
        return digests(data, 0), ""
    except BatchFailed as error:
        return [], str(error)


def test_a_flipped_bit_of_any_file_is_named(copied: Path, tmp_path: Path, caplog: Any):
    options = SMALL | {"plan": "minibatch", "split": "valid"}
    made = pack(copied, options, 1)
    assert len(made.pack.epochs[0].groups) > 1
    folder, whole = made.path, tmp_path / "whole"
    with serving(copied, tmp_path) as (endpoint, _):
        data = NeighborDataset(endpoint, **options)
        expected = digests(data, 0)
        data.close()
    shutil.copytree(folder, whole)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    seen = {"failed": 0, "left out": 0}
    for name in files:
        caplog.clear()
        flip(folder / name, 100 if (folder / name).stat().st_size > 100 else 0)
        with serving(copied, tmp_path) as (endpoint, streams):
            data = NeighborDataset(endpoint, **options)
            found, said = tried(data)
            if said:
                assert f"{folder / name}+" in said
                seen["failed"] += 1
            else:
                assert found == expected
                assert not is_packed(streams)
                reasons = [r.fields["reason"] for r in caplog.records if "pack not" in r.message]
                assert any(str(folder / name) in reason for reason in reasons), (name, reasons)
                seen["left out"] += 1
            data.close()
        shutil.copyfile(whole / name, folder / name)
    assert seen["failed"] >= 6  # structure, places, rows of two arrays, hot rows of two
    assert seen["left out"] >= 12
    assert open_store(copied)
