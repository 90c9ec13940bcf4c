"""Benches of what trainers see, on a tiny graph."""

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("torch")

from blockstore.owners import write_owners
from blockstore.store import open_store
from tests.daemons import ROOT
from tests.processes import run_main
from tests.tools.tiny import TINY, by_side
from tools.bench import epochs, gpu, objects, peers, ranks, trainers
from tools.bench.figure import Chart, Series, draw
from tools.bench.harness import BENCHES, run
from tools.bench.setup import command, make_graph, make_store, serving, total_bytes


def test_loaders(folder):
    sizes = ["--seeds", "300", "--peer-seeds", "200", "--batch-size", "50", "--fanouts", "3", "2"]
    peers = ["--pyg-workers", "0", "--mem", "64M", "--rounds", "1"]
    lines = by_side(run("loaders", ["--folder", str(folder), *TINY, *sizes, *peers]))
    assert lines.keys() == {"ours, 0 workers", "PyG, 0 workers"}
    for line in lines.values():
        assert "skipped" in line or line["seeds_per_s"]["min"] > 0
        assert "skipped" in line or line["peak_bytes"] > 0
    assert lines["ours, 0 workers"]["cache"] == "warm"
    assert ("skipped" in lines["PyG, 0 workers"]) is (epochs.pyg_sampler() == "none")


def test_too_few_seeds_are_no_task(tmp_path):
    np.save(tmp_path / "train_idx.npy", np.arange(300))
    assert epochs.seeds_of(tmp_path, 300).size == 300
    with pytest.raises(ValueError, match="has 300 training nodes, 301 are asked for"):
        epochs.seeds_of(tmp_path, 301)


@pytest.mark.long
def test_handover(folder):
    sizes = ["--nodes", "3000", "--features", "8", "--batch-size", "10", "--fanouts", "3", "2"]
    words = ["--folder", str(folder), *sizes, "--think-ms", "1", "--rounds", "1"]
    local, keys = run("handover", [*words, "--ways", "local", "tcp, keys"])
    for line in (local, keys):
        assert 0 < line["wait_p50_us"]["median"] <= line["wait_p99_us"]["median"]
        assert line["GB_per_s"]["median"] > line["seeds_per_s"]["median"] * 8 * 4 / 1e9


@pytest.fixture(scope="module")
def trainers_task(folder):
    """Of benches of many trainers, at a size that says nothing of speed."""
    return trainers.TrainersOptions(
        folder, nodes=3000, degree=8, features=16, mem="32M", workers=1, fanouts=(3, 2),
        batch_size=100, seconds=0.5, think_ms=0, consumers=(2, 2, 2),
    )  # fmt: skip


def test_a_stopped_consumer_takes_nothing_and_others_go_on(trainers_task):
    with contextmanager(trainers.open_stopped)(trainers_task, "own", (0, 1)) as one_round:
        figures = one_round()
    assert min(figures.values()) > 0
    parts = (figures["free_per_s"] + figures["after_per_s"]) / 2
    assert figures["kept"] == pytest.approx(figures["beside_stopped_per_s"] / parts)


def test_trainers_of_different_plans_all_get_something(trainers_task):
    figures = trainers.run_fair(trainers_task)
    assert figures["sessions"] == 2
    assert 0 < figures["least_of_mean"] <= 1 <= figures["most_of_mean"]


def test_trainers_together_read_each_block_once_if_all_has_room(trainers_task):
    given = replace(trainers_task, shared_mem="32M")
    kinds = {"alone": [given.request()], **trainers.shared_requests(given, 2)}
    found = {kind: trainers.run_shared(given, requests) for kind, requests in kinds.items()}
    assert min(figures["batches_per_s"] for figures in found.values()) > 0
    stored = total_bytes(given.store())
    assert all(0 < figures["daemon_bytes"] <= stored for figures in found.values())
    assert {request.batch_size for request in kinds["one job"]} == {2 * given.batch_size}


def test_owners_share_the_work_of_one_process(folder):
    given = ranks.SplitOptions(
        folder, nodes=3000, degree=8, features=16, mem="32M", trainers=2, fanouts=(3, 2),
        batch_size=50, steps=2, hidden=8,
    )  # fmt: skip
    store = given.store()
    owner = np.random.default_rng(0).integers(0, 2, 3000)
    write_owners(open_store(store), "two", owner, 2, {})
    ways = {"one": ("", 1), "ranks": ("", 2), "owners": ("two", 2)}
    found = {way: ranks.run_trainers(given, store, *of) for way, of in ways.items()}
    for figure in ("rows", "edges"):
        assert found["owners"][figure] == found["one"][figure] < found["ranks"][figure]
    sent = [found[way]["exchanged_bytes"] for way in ways]
    assert sent[:2] == [0, 0]
    assert sent[2] > 0


def test_rows_of_large_batches_come_once_and_shared_draws_are_sampled_once(folder):
    given = ranks.LargeOptions(
        folder, nodes=3000, degree=8, features=16, mem="32M", fanouts=(5, 5), batch_size=50
    )
    ways = {"one": ("", 1), "own": ("own", 4), "shared": ("shared", 4), "cache": ("cache", 0)}
    found = {way: ranks.read_epoch(given, given.store(), *of) for way, of in ways.items()}
    one, own, shared, cache = found.values()
    assert shared["rows"] < own["rows"] < one["rows"]
    assert 0.5 * one["rows"] < cache["rows"] < 0.9 * one["rows"]  # a tenth of the nodes is there
    assert cache["sampled"] == cache["edges"] == one["edges"]
    assert shared["sampled"] < own["sampled"] == one["sampled"] == one["edges"] == own["edges"]
    assert own["mb"] == pytest.approx(own["rows"] * one["mb"] / one["rows"])


@pytest.mark.parametrize("draws", ["own", "shared"])
def test_larger_batches_bring_fewer_rows_a_step(folder, draws):
    given = ranks.LargeOptions(
        folder, nodes=3000, degree=8, features=16, mem="32M", fanouts=(5, 5), batch_size=4
    )
    rows = [ranks.read_epoch(given, given.store(), draws, k)["rows"] for k in (4, 16, 64)]
    assert rows == sorted(set(rows), reverse=True)


def test_partitions_bring_what_is_sampled_to_as_many_steps_of_every_rank(folder):
    given = ranks.LargeOptions(
        folder, nodes=3000, degree=8, features=16, mem="32M", fanouts=(5, 5), batch_size=50,
        ranks=(1, 2), large_batches=(4,),
    )  # fmt: skip
    parts = folder / "partitioned"
    command("preprocess", "repartition", str(given.store()), str(parts), "--partitions", "16")
    (plan,) = ranks.large(replace(given, stores=(parts,)))
    names = [f"{way}, {count} ranks" for count in (1, 2) for way in
             ("one at a time, 1", "cache, 0", "own, 4", "shared, 4", "partitions, 0")]  # fmt: skip
    assert [side.name for side in plan.sides] == names
    found = {s.name: s.work(*s.arguments) for s in plan.sides if s.name[:3] in ("one", "par")}
    one, two = (found[f"partitions, 0, {count} ranks"] for count in (1, 2))
    plain = found["one at a time, 1, 1 ranks"]
    assert one["sampled"] < plain["sampled"] == plain["edges"]
    row_bytes = 1e6 * plain["mb"] / plain["rows"]
    for figures in (one, two):
        assert 0 < figures["rows"] < figures["whole_rows"]
        assert 0 < figures["pulled"] < figures["whole_pulled"]
        num_bytes = row_bytes * figures["rows"] + 4 * given.hidden * figures["pulled"]
        assert figures["mb"] == pytest.approx(num_bytes / 1e6)
    assert one["mb_rank"] == one["mb"]
    assert two["mb"] / 2 <= two["mb_rank"] < two["mb"]


@pytest.mark.long
def test_placements_share_seeds_edges_and_rows_as_they_say(folder):
    given = ranks.PlacementOptions(
        folder, nodes=3000, degree=8, features=16, mem="32M", fanouts=(3, 2), batch_size=20,
        steps=2, cache=0.3, maps=("three",),
    )  # fmt: skip
    store, owner = given.store(), np.random.default_rng(2).integers(0, 3, 3000)
    write_owners(open_store(store), "three", owner, 3, {})
    (plan,) = ranks.placement(given)
    assert [side.name for side in plan.sides] == [
        "data parallel", "micrographs", "merged by server to 2", "home", "merged by model to 2",
        "merged by model to 1",
    ]  # fmt: skip
    found = {side.name: side.work(*side.arguments) for side in plan.sides}
    parallel, micrographs, _, home, *merged = found.values()
    for figures in found.values():
        assert 0 < figures["missed"] < figures["fetched"] <= figures["remote"]
        assert figures["distinct"] <= figures["wanted"]
    assert home["wanted"] == home["distinct"] == micrographs["distinct"] < micrographs["wanted"]
    assert home["edges"] < micrographs["edges"]
    assert merged[-1]["edges"] == parallel["edges"]


@pytest.mark.long
def test_rows_of_a_peer_and_a_plain_copy(folder):
    given = peers.PeersOptions(folder, nodes=40_000, features=32, degree=2)
    (plan,) = peers.peers(given)
    assert [ratio[1:] for ratio in plan.ratios] == [
        (peers.ROWS, "GB_per_s", plain) for plain in (peers.PLAIN, peers.TUNED)
    ]
    for side in plan.sides:
        with contextmanager(side.work)(*side.arguments) as one_round:
            figures = [one_round() for _ in range(2)]
        assert min(f["GB_per_s"] for f in figures) > 0
        if side.name == peers.ROWS:  # 8192 rows of 128 bytes at once; block 2 is in both parts
            assert [f["requests"] for f in figures] == [2, 4]


def test_objects_without_obstore_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(objects, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match=r'none: pip install "blockstore\[objects\]"$'):
        run("objects", ["--folder", str(tmp_path)])


def test_objects_into_a_cache_and_a_plain_loop(folder):
    pytest.importorskip("obstore")
    given = objects.ObjectsOptions(
        folder, nodes=20_000, features=64, degree=2, latency=0.002, rate=0
    )
    with contextmanager(objects.objects)(given) as plan:
        assert [ratio[1:] for ratio in plan.ratios] == [(objects.CACHED, "GB_per_s", objects.PLAIN)]
        for side in plan.sides:
            with contextmanager(side.work)(*side.arguments) as one_round:
                figures = [one_round() for _ in range(2)]
            assert min(f["GB_per_s"] for f in figures) > 0


def test_the_command_lists_its_benches(capsys):
    assert run_main("tools.bench", "speed") == 2
    assert f"{{{','.join(BENCHES)}}}" in capsys.readouterr().err


def test_gpu_by_the_same_steps_on_the_host(folder):
    given = gpu.GpuOptions(
        folder, nodes=3000, degree=8, features=16, device="cpu", fanouts=(3, 2), batch_size=20,
        hidden=8, depth=2,
    )  # fmt: skip
    with (
        serving(given.store(), folder, "64M") as endpoint,
        contextmanager(gpu.open_mode)(given, endpoint, "cached") as one_round,
    ):
        figures = one_round()
    assert 0 <= figures["wait_share"] < 1
    assert figures["batches_gb_s"] > 0
    assert figures["link_gb_s"] > 0
    assert figures["cached_rows"] > 0


def test_no_gpu_is_said_in_a_line(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        run("gpu", [])
    assert ended.value.code == 3
    said = "gpu: torch finds no CUDA device here; nothing was measured\n"
    assert capsys.readouterr().err.endswith(said)
    done = subprocess.run(
        [ROOT / "tools" / "gpu_check.sh", "--python", sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr


@pytest.mark.long
def test_macro(folder):
    words = ["--folder", str(folder), *TINY, "--batch-size", "50", "--fanouts", "3", "2"]
    words += ["--hidden", "8", "--mem", "64M", "--whole", "64M", "--rounds", "1"]
    lines = by_side(run("macro", words))
    assert len(lines) == 6
    once, twice = (lines[f"1/8, reuse {n}, loading"] for n in (1, 2))
    assert once["steps"]["min"] < twice["steps"]["min"]


@pytest.mark.long
def test_budgets_are_drawn(folder):
    store = make_store(folder, make_graph(folder, 3000, 8, 16))
    words = ["--stores", str(store), "--mem", "24M", "64M", "--steps", "2", "0", "--sizes", "2"]
    words += ["--sizes-mem", "24M", "--sizes-steps", "3", "--fanouts", "3", "2"]
    lines = run("budgets", [*words, "--batch-size", "50", "--figures", str(folder / "pictures")])
    found = by_side(lines)
    assert found.keys() == {"24M", "64M", "H=2"}
    measured = [line for line in found.values() if "skipped" not in line]
    for line in measured:
        assert line["seeds_per_s"]["min"] > 0
        assert line["KB_per_seed"]["min"] > 0
    pictures = {p.name.split("-")[1] for p in (folder / "pictures").glob("memory-*.svg")}
    assert pictures == ({"rate", "bytes", "groups"} if measured else set())
    for picture in (folder / "pictures").glob("*.svg"):
        ElementTree.parse(picture)


def test_a_chart_has_every_point_and_limit():
    chart = Chart("A & B", "x", "y", (Series("one", [(1.0, 3.0), (8.0, 300.0)]),), (("top", 7.0),))
    root = ElementTree.fromstring(draw(chart))
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == 3  # two points, and one beside the name
    places = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in circles[:2]]
    assert places[0][0] < places[1][0]
    assert places[0][1] > places[1][1]
    assert "top" in [e.text for e in root.iter() if e.tag.endswith("text")]
    with pytest.raises(ValueError, match="no point"):
        draw(chart._replace(series=()))
