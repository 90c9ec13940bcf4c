"""Every bench, on a tiny graph."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.daemons import ROOT
from tools.bench import (
    adapters,
    csc,
    disk,
    gpu,
    handover,
    hops,
    hyperbatch,
    ingest,
    kernels,
    loaders,
    remote,
    spmm,
    trainers,
)
from tools.bench.__main__ import BENCHES
from tools.bench.harness import Skipped
from tools.bench.setup import GraphSize, make_graph, make_store, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where benches keep graphs and stores."""
    return tmp_path_factory.mktemp("bench")


def by_peer(lines):
    return {line["peer"]: line for line in lines}


TINY = ["--nodes", "3000", "--degree", "8", "--features", "16"]


def test_loaders(folder):
    sizes = ["--seeds", "300", "--peer-seeds", "200", "--batch-size", "50", "--fanouts", "3", "2"]
    peers = ["--pyg-workers", "0", "--mapped-workers", "0", "--mem", "64M", "--rounds", "2"]
    lines = by_peer(loaders.main(["--folder", str(folder), *TINY, *sizes, *peers]))
    assert lines.keys() == {"ours, auto workers", "PyG, 0 workers", "mapped, 0 workers"}
    for line in lines.values():
        assert "skipped" in line or line["seeds_per_s"]["min"] > 0
        assert "skipped" in line or line["peak_bytes"] > 0
    assert lines["ours, auto workers"]["cache"] == "warm"
    assert ("skipped" in lines["PyG, 0 workers"]) is (loaders.pyg_sampler() == "none")


def test_adapters(folder):
    store = make_store(folder, adapters.make_mag(folder, GraphSize(300, 4, 8, 4)))
    options = {"num_neighbors": (3, 2), "batch_size": 20}
    with adapters.open_peer(store, folder, "paper", options) as run:
        figures = run()
    for name in adapters.adapters_of(several=True):
        share = figures[f"{name}_us"] / figures["batch_us"]
        assert 0 < figures[f"{name}_percent"] == pytest.approx(100 * share)


def test_too_few_seeds_are_no_task(tmp_path):
    np.save(tmp_path / "train_idx.npy", np.arange(300))
    task = loaders.Task(tmp_path, (3,), 10, 300)
    assert task.seeds().size == 300
    with pytest.raises(Skipped, match="has 300 training nodes, 301 are asked for"):
        task._replace(num_seeds=301).seeds()


def test_disk(folder, tmp_path):
    out = tmp_path / "results.jsonl"
    sizes = ["--size", "1M", "--block-size", "64K", "--arena", "512K", "--rounds", "2"]
    lines = disk.main(["--folder", str(folder), "--out", str(out), *sizes])
    ours = by_peer(lines)["ours, verified"]
    assert "skipped" in ours or ours["share_of_limit"]["min"] > 0
    assert "skipped" in ours or ours["bytes_read"]["min"] >= 1 << 20
    assert not (folder / "disk.bin").exists()
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines


def test_remote(folder):
    sizes = ("--nodes", "300", "--width", "8", "--batch-size", "20", "--ways", "tcp, keys")
    (line,) = remote.main(["--folder", str(folder), *sizes, "--think-ms", "1", "--rounds", "1"])
    assert line["batches_s"]["median"] > 0
    assert line["bytes_s"]["median"] > line["batches_s"]["median"] * 20 * 8 * 4


def test_handover(folder):
    sizes = ["--nodes", "3000", "--batch-size", "10", "--fanouts", "3", "2"]
    (line,) = handover.main(["--folder", str(folder), *sizes, "--think-ms", "1", "--rounds", "1"])
    assert 0 < line["wait_p50_us"]["median"] <= line["beyond_copy_p50_us"]["median"]
    assert line["copy_and_gather_p50_us"]["median"] > 0
    assert 0 <= line["not_ready_share"]["median"] < 1


@pytest.fixture(scope="module")
def trainers_task(folder):
    """Of benches of many trainers, at a size that says nothing of speed."""
    store = make_store(folder, make_graph(folder, GraphSize(3000, 8, 16)), "64M")
    return trainers.Task(store, folder, "32M", 1, (3, 2), 100, 0.5, 0.0, 2)


def test_a_stopped_consumer_takes_nothing_and_others_go_on(trainers_task):
    with trainers.open_stopped(trainers_task, "own", (0, 1)) as run:
        figures = run()
    assert min(figures.values()) > 0
    parts = (figures["free_per_s"] + figures["after_per_s"]) / 2
    assert figures["kept"] == pytest.approx(figures["beside_stopped_per_s"] / parts)


def test_trainers_of_different_plans_all_get_something(trainers_task):
    with trainers.open_fair(trainers_task) as run:
        figures = run()
    assert figures["sessions"] == 2
    assert 0 < figures["least_of_mean"] <= 1 <= figures["most_of_mean"]


def test_ingest(folder):
    words = ["--folder", str(folder), *TINY, "--mem", "64M", "--rounds", "1", "--limit-size", "8M"]
    ours, fio, copy = ingest.main([*words, "--undirected"])
    assert ours["options"] == ["--mem", "64M", "--order", "bfs", "--undirected"]
    assert ours["seconds"]["median"] > 0
    assert {"count_edges_s", "order_nodes_s"} <= ours.keys()
    if "skipped" not in fio:
        expected = ours["GB_per_s"]["median"] / fio["GB_per_s"]["median"]
        assert ours["share_of_limit"]["median"] == pytest.approx(expected, rel=1e-3)
    assert copy["source_GB_per_s"]["median"] > 0
    left = [list(folder.glob(f"{name}-*")) for name in ("ingest", "copy", "limit")]
    assert left == [[], [], []]


def test_csc(folder):
    words = ["--nodes", "3000", "--degree", "8", "--mem", "64M", "--rounds", "2"]
    before = set(folder.glob("csc-*"))  # of other benches
    ours, scipy = csc.main(["--folder", str(folder), *words])
    assert ours["edges"] == scipy["edges"] >= 20_000
    assert 0 < ours["seconds"]["min"] < ours["command_s"]["min"]
    assert ours["over_scipy"]["min"] > 0
    assert set(folder.glob("csc-*")) <= before


def test_hyperbatch(folder, tmp_path):
    graph = make_graph(folder, GraphSize(3000, 8, 16))
    store = make_store(folder, graph, "64M")
    words = [
        "--folder", str(folder), "--graph", str(graph), "--stores", str(store), "--limits", "2G",
        "--mem", "32M", "--batch-size", "20", "--fanouts", "3", "2", "--plans", "hyperbatch",
        "--sizes", "4", "--steps", "3", "--skipped", "2", "--peer-steps", "2",
        "--peer-workers", "1", "--rounds", "1", "--out", str(tmp_path / "lines"),
    ]  # fmt: skip
    lines = hyperbatch.main(words)
    assert [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()] == lines
    ours, mapped = lines
    assert (ours["size"], ours["kills"], ours["order"]) == (4, 0, "bfs")
    assert ours["seeds_per_s"]["min"] > 0
    assert ours["bytes_written"]["max"] == 0
    assert ours["over_bound"]["min"] > 0
    assert mapped["case"] == "mapped"
    assert "torch-sparse" in mapped.get("failed", "") or mapped["seeds_per_s"]["min"] > 0


def test_a_store_of_the_peer_holds_the_same_graph(folder, tmp_path):
    graph = make_graph(folder, GraphSize(3000, 8, 16))
    csc = hyperbatch.make_csc(make_store(folder, graph, "64M"), tmp_path)
    indptr, indices = np.load(csc / "indptr.npy"), np.load(csc / "indices.npy")
    dst = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    expected = np.load(graph / "edge_index.npy").astype(np.int64)
    assert sorted(zip(indices, dst, strict=True)) == sorted(zip(*expected, strict=True))


def test_kernels(folder):
    sizes = ["--frontier", "500", "--fanout", "4", "--threads", "1", "2", "--rounds", "1"]
    lines = kernels.main(["--folder", str(folder), *TINY, *sizes])
    assert [line["peer"] for line in lines] == ["1 threads", "2 threads"]
    for name in ("sample_M_edges_per_s", "renumber_M_ids_per_s", "gather_share_of_copy"):
        assert all(line[name]["min"] > 0 for line in lines)


def test_spmm(folder):
    sizes = ["--widths", "16", "8", "--threads", "2", "--rounds", "1"]
    lines = by_peer(spmm.main(["--folder", str(folder), *TINY, *sizes]))
    ours = ["ours, 16 columns at a time", "ours, 8 columns at a time"]
    assert list(lines) == [*ours, spmm.IN_ORDER, spmm.AT_RANDOM, spmm.TORCH]
    for name, line in lines.items():
        assert line["seconds"]["min"] > 0
        assert ("times_torch" in line) is (name != spmm.TORCH)


def test_the_command_lists_its_benches():
    command = [sys.executable, "-m", "tools.bench", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{{{','.join(BENCHES)}}}" in done.stderr


def test_hops(folder):
    sizes = ["--rows", "3000", "--width", "8", "--hops", "1", "--batch-size", "250"]
    options = ["--budget", "20M", "--rounds", "1", "--cold-batches", "2", "--only", "cold"]
    lines = by_peer(hops.main(["--folder", str(folder), *sizes, *options]))
    assert lines.keys() > {"disk limit", *hops.COLD}
    for line in lines.values():
        assert line["cache"] == "cold, 20M"
        assert "skipped" in line or line["GB_per_s"]["min"] > 0


def test_gpu_by_the_same_steps_on_the_host(folder):
    store = make_store(folder, make_graph(folder, GraphSize(3000, 8, 16)), "64M")
    with serving(store, folder, "64M") as endpoint:
        task = gpu.Task(endpoint, "cpu", (3, 2), 20, 8, 16, 2)
        with gpu.open_mode(task, "cached") as run:
            figures = run()
    assert 0 <= figures["wait_share"] < 1
    assert figures["batches_gb_s"] > 0
    assert figures["link_gb_s"] > 0
    assert figures["cached_rows"] > 0


def test_no_gpu_is_said_in_a_line(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 3
    assert capsys.readouterr().err == (
        "gpu: torch finds no CUDA device here; nothing was measured\n"
    )
    done = subprocess.run(
        [ROOT / "tools" / "gpu_check.sh", "--python", sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr
