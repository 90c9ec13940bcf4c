"""Benches of what lies below trainers, on a tiny graph."""

import importlib.util
import json
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

from tests.tools.tiny import TINY, by_side
from tools.bench import hops, stripes
from tools.bench.harness import run
from tools.bench.setup import make_graph, make_store
from tools.bench.stripes import LoopDisks


def test_disk(folder, tmp_path):
    out = tmp_path / "results.jsonl"
    sizes = ["--size", "1M", "--block-size", "64K", "--arena", "512K", "--rounds", "2"]
    sizes += ["--pages", "300"]
    lines = run("disk", ["--folder", str(folder), "--out", str(out), *sizes])
    ours = by_side(lines)["ours, verified"]
    assert "skipped" in ours or ours["share_of_limit"]["min"] > 0
    assert "skipped" in ours or ours["bytes_read"]["min"] >= 1 << 20
    pages = by_side(lines)["ours, pages verified"]
    assert "skipped" in pages or pages["share_of_limit"]["min"] > 0
    assert not (folder / "disk.bin").exists()
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines


@pytest.mark.long
def test_stripes(folder, monkeypatch):
    """On folders of one disk, as not everybody may make loop devices."""

    @contextmanager
    def folders(parent, count, size, rate):
        assert (count, rate) == (2, 50 << 20)
        assert size > 8 << 20
        yield LoopDisks(tuple(parent / f"disk{i}" for i in range(2)), group)

    group = folder / "group"
    group.mkdir()
    monkeypatch.setattr(stripes, "loop_disks", folders)
    sizes = ["--size", "4M", "--block-size", "64K", "--rounds", "1", "--pages", "300"]
    store = make_store(folder, make_graph(folder, 3000, 8, 16))
    more = ["--store", str(store), "--plans", "minibatch", "--mem", "64M", "--batch-size", "50"]
    found = run("stripes", ["--folder", str(folder), *sizes, *more])
    lines, epochs = by_side(found[:2]), by_side(found[2:])
    assert lines.keys() == epochs.keys() == {"1 disk", "2 disks"}
    two = lines["2 disks"]
    assert "skipped" in two or two["blocks_of_one"]["min"] > 0
    assert "skipped" in two or two["pages_of_one"]["min"] > 0
    one, both = (epochs[name]["batches"]["median"] for name in ("1 disk", "2 disks"))
    assert one == both > 0
    assert not list(folder.glob("store-of*"))
    assert (folder / "disk0/of2/bench/disk.bin").stat().st_size == 2 << 20
    assert (group / "cgroup.procs").read_text().isdigit()


@pytest.mark.long
def test_ingest(folder):
    words = ["--folder", str(folder), *TINY, "--mem", "64M", "--rounds", "1"]
    ours, copy = run("ingest", [*words, "--undirected"])
    assert (ours["mem"], ours["order"], ours["undirected"]) == ("64M", "degree", True)
    assert ours["seconds"]["median"] > 0
    assert {"count_edges_s", "order_nodes_s"} <= ours.keys()
    expected = ours["seconds"]["median"] / copy["seconds"]["median"]
    assert ours["times_copy"]["median"] == pytest.approx(expected, rel=1e-3)
    assert copy["source_GB_per_s"]["median"] > 0
    assert [list(folder.glob(f"{name}-*")) for name in ("ingest", "copy")] == [[], []]


def test_partition(folder):
    words = ["--folder", str(folder), *TINY, "--k", "8", "--passes", "2", "--mem", "512M"]
    lines = by_side(run("partition", [*words, "--methods", "gap", "random", "metis"]))
    assert lines["gap"]["kept_8"]["min"] > lines["random"]["kept_8"]["min"]
    assert lines["gap"]["partitions"] == 8
    assert lines["gap"]["partition_nodes_s"]["min"] > 0
    if importlib.util.find_spec("pymetis") is None:
        assert "pip install" in lines["metis"]["skipped"]
    else:
        assert lines["gap"]["kept_8_of_metis"]["min"] > 0


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
    graph = make_graph(folder, 3000, 8, 16)
    store = make_store(folder, graph, "64M")
    words = [
        "--folder", str(folder), "--stores", str(store), "--limits", "2G", "--mem", "32M",
        "--batch-size", "20", "--fanouts", "3", "2", "--plans", "hyperbatch", "--sizes", "4",
        "--steps", "3", "--before", "2", "--rounds", "1", "--out", str(tmp_path / "lines"),
    ]  # fmt: skip
    lines = run("hyperbatch", words)
    assert [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()] == lines
    (ours,) = lines
    assert (ours["size"], ours["limit"], ours["order"]) == (4, "2G", "degree")
    assert "control group" in ours.get("skipped", "") or ours["over_bound"]["min"] > 0


def test_hops(folder):
    sizes = ["--rows", "3000", "--width", "8", "--hops", "1", "--batch-size", "250"]
    options = ["--budget", "64M", "--rounds", "1", "--cold-batches", "2", "--only", "cold"]
    lines = by_side(run("hops", ["--folder", str(folder), *sizes, *options]))
    assert lines.keys() > {hops.LIMIT, hops.COPIED, hops.VIEWS}
    for line in lines.values():
        assert line["cache"] == "cold, 64M"
        assert "skipped" in line or line["GB_per_s"]["min"] > 0
