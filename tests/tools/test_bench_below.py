"""Benches of what lies below trainers, on a tiny graph."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.tools.tiny import TINY, by_side
from tools.bench import hops, spmm
from tools.bench.harness import run
from tools.bench.setup import GraphSize, make_csc, make_graph, make_store


def test_disk(folder, tmp_path):
    out = tmp_path / "results.jsonl"
    sizes = ["--size", "1M", "--block-size", "64K", "--arena", "512K", "--rounds", "2"]
    lines = run("disk", ["--folder", str(folder), "--out", str(out), *sizes])
    ours = by_side(lines)["ours, verified"]
    assert "skipped" in ours or ours["share_of_limit"]["min"] > 0
    assert "skipped" in ours or ours["bytes_read"]["min"] >= 1 << 20
    assert not (folder / "disk.bin").exists()
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines


@pytest.mark.long
def test_ingest(folder):
    words = ["--folder", str(folder), *TINY, "--mem", "64M", "--rounds", "1", "--limit-size", "8M"]
    ours, fio, copy = run("ingest", [*words, "--undirected"])
    assert (ours["mem"], ours["order"], ours["undirected"]) == ("64M", "bfs", True)
    assert ours["seconds"]["median"] > 0
    assert {"count_edges_s", "order_nodes_s"} <= ours.keys()
    if "skipped" not in fio:
        expected = ours["GB_per_s"]["median"] / fio["GB_per_s"]["median"]
        assert ours["share_of_limit"]["median"] == pytest.approx(expected, rel=1e-3)
    assert copy["source_GB_per_s"]["median"] > 0
    left = [list(folder.glob(f"{name}-*")) for name in ("ingest", "copy", "limit")]
    assert left == [[], [], []]


@pytest.mark.long
def test_csc(folder):
    words = ["--nodes", "3000", "--degree", "8", "--mem", "64M", "--rounds", "1"]
    before = set(folder.glob("csc-*"))  # of other benches
    ours, scipy = run("csc", ["--folder", str(folder), *words])
    assert ours["edges"] == scipy["edges"] >= 20_000
    assert 0 < ours["seconds"]["min"] < ours["command_s"]["min"]
    assert ours["over_scipy"]["min"] > 0
    assert set(folder.glob("csc-*")) <= before


@pytest.mark.long
def test_hyperbatch(folder, tmp_path):
    graph = make_graph(folder, GraphSize(3000, 8, 16))
    store = make_store(folder, graph, "64M")
    words = [
        "--folder", str(folder), "--graph", str(graph), "--stores", str(store), "--limits", "2G",
        "--mem", "32M", "--batch-size", "20", "--fanouts", "3", "2", "--plans", "hyperbatch",
        "--sizes", "4", "--steps", "3", "--before", "2", "--peer-steps", "2",
        "--peer-workers", "1", "--rounds", "1", "--out", str(tmp_path / "lines"),
    ]  # fmt: skip
    lines = run("hyperbatch", words)
    assert [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()] == lines
    ours, mapped = lines
    assert (ours["size"], ours["kills"]["max"], ours["order"]) == (4, 0, "bfs")
    assert ours["seeds_per_s"]["min"] > 0
    assert ours["bytes_written"]["max"] == 0
    assert ours["over_bound"]["min"] > 0
    assert mapped["case"] == "mapped"
    assert "torch-sparse" in mapped.get("skipped", "") or mapped["seeds_per_s"]["min"] > 0


def test_a_store_of_the_peer_holds_the_same_graph(folder, tmp_path):
    graph = make_graph(folder, GraphSize(3000, 8, 16))
    csc = make_csc(make_store(folder, graph, "64M"), tmp_path)
    indptr, indices = np.load(csc / "indptr.npy"), np.load(csc / "indices.npy")
    dst = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    expected = np.load(graph / "edge_index.npy").astype(np.int64)
    assert sorted(zip(indices, dst, strict=True)) == sorted(zip(*expected, strict=True))


def test_kernels(folder):
    sizes = ["--frontier", "500", "--fanout", "4", "--threads", "1", "2", "--rounds", "1"]
    lines = run("kernels", ["--folder", str(folder), *TINY, *sizes])
    assert [line["side"] for line in lines] == ["1 threads", "2 threads"]
    for name in ("sample_M_edges_per_s", "renumber_M_ids_per_s", "gather_share_of_copy"):
        assert all(line[name]["min"] > 0 for line in lines)


def test_spmm(folder):
    sizes = ["--widths", "16", "--threads", "2", "--rounds", "1"]
    lines = by_side(run("spmm", ["--folder", str(folder), *TINY, *sizes]))
    assert list(lines) == ["ours, 16 columns at a time", spmm.IN_ORDER, spmm.AT_RANDOM, spmm.TORCH]
    for name, line in lines.items():
        assert line["seconds"]["min"] > 0
        assert ("times_torch" in line) is (name != spmm.TORCH)


def test_hops(folder):
    sizes = ["--rows", "3000", "--width", "8", "--hops", "1", "--batch-size", "250"]
    options = ["--budget", "64M", "--rounds", "1", "--cold-batches", "2", "--only", "cold"]
    lines = by_side(run("hops", ["--folder", str(folder), *sizes, *options]))
    assert lines.keys() > {hops.LIMIT, hops.COPIED, hops.VIEWS}
    for line in lines.values():
        assert line["cache"] == "cold, 64M"
        assert "skipped" in line or line["GB_per_s"]["min"] > 0
