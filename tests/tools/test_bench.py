"""Benches of what trainers see, on a tiny graph."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.daemons import ROOT
from tests.tools.tiny import TINY, by_peer
from tools.bench import adapters, gpu, handover, loaders, remote, trainers
from tools.bench.__main__ import BENCHES
from tools.bench.harness import Skipped
from tools.bench.setup import GraphSize, make_graph, make_store, serving


def test_loaders(folder):
    sizes = ["--seeds", "300", "--peer-seeds", "200", "--batch-size", "50", "--fanouts", "3", "2"]
    peers = ["--pyg-workers", "0", "--mapped-workers", "0", "--mem", "64M", "--rounds", "1"]
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


def test_the_command_lists_its_benches():
    command = [sys.executable, "-m", "tools.bench", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{{{','.join(BENCHES)}}}" in done.stderr


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
