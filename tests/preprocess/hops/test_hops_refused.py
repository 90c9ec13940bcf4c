"""Hops that cannot be: each refusal says what was found and expected, and changes no store."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockstore.errors import OutOfSpace
from preprocess.errors import BadInput
from preprocess.hops.hops import make_hops
from preprocess.hops.plan import HopsRequest
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_resume import tree

OPTIONS = IngestOptions(block_bytes=4096, allow_nan=True, order="source")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For refusals: nothing may change in it."""
    path = tmp_path_factory.mktemp("hops") / "store"
    rng = np.random.default_rng(0)
    x, nan, big = (rng.random((50, 3)).astype(np.float32) for _ in range(3))
    nan[7, 1], big[3, 2] = np.nan, 1e6
    y = np.zeros(50, np.int64)
    y[40:] = -1
    graph = Graph().add_type(
        "n", 50, x=x, nan=nan, big=big, y=y, train=np.arange(30), valid=np.arange(45, 50)
    )
    graph.add_relation("n", "to", "n", rng.integers(0, 50, (90, 2)))
    graph.add_type("bare", 9)
    graph.add_relation("bare", "to", "bare", [(1, 2)])
    graph.add_type("alone", 9, x=x[:9])
    graph.add_type("plain", 9, x=x[:9], z=x[:9])
    graph.add_relation("plain", "likes", "plain", [(1, 2)])
    graph.add_relation("plain", "knows", "plain", [(1, 2)])
    ingest(graph, path, OPTIONS, QUIET)
    make_hops(path, HopsRequest(("row",), node_type="n", feature="x", splits=("train",)), QUIET)
    return path


GOOD = HopsRequest(("sym",), node_type="n", feature="x", splits=("train",))
FREE = replace(GOOD, rows="all", splits=())
PLAIN = HopsRequest(node_type="plain", rows="all", relation="knows", feature="x")
REFUSED = [
    (replace(GOOD, operators=("row", "row")), "--operator: found one twice"),
    (replace(GOOD, hops=0), "--hops: found 0, expected 1 to 64"),
    (replace(GOOD, seed=-1), "--seed: found -1"),
    (replace(GOOD, hop_alpha=1.0), "--alpha: found 1.0, expected 0.005 to 1"),
    (replace(GOOD, t=0.0), "--t: found 0.0, expected more than 0, at most 20"),
    (replace(GOOD, t=float("nan")), "--t: found nan"),
    (replace(GOOD, node_type=""), "found several types: n, plain, expected --type"),
    (replace(GOOD, node_type="m"), "--type: found type 'm', expected one of n, plain"),
    (replace(GOOD, node_type="bare"), "found type 'bare' without features"),
    (replace(GOOD, node_type="alone"), "found type 'alone' without a relation with itself"),
    (replace(PLAIN, relation=""), "--relation: found 2 relations of plain with itself, expected "
     "one of likes, knows"),
    (replace(PLAIN, relation="hates"), "--relation: found relation 'hates', expected one of likes"),
    (replace(PLAIN, feature="y"), "--feature: found feature 'y', expected one of x, z of plain"),
    (replace(PLAIN, weighted=True), "--weighted: found relation knows without weights"),
    (replace(PLAIN, rows="labelled"), "type plain: found no splits, expected splits, whose rows are"
     " kept; --rows all keeps every node"),
    (replace(GOOD, splits=("dev",)), "--split: found split 'dev', expected one of train, valid"),
    (replace(FREE, splits=("train",)), "--split: found train, expected none with --rows all"),
    (replace(GOOD, splits=("valid",)), "split 'valid' of n: found no label among its 5 nodes"),
    (replace(GOOD, splits=()), "found train with other hops than valid, expected the same hops"),
    (replace(GOOD, seed=4), "train: --seed: found 4, expected 0, as those that are there"),
    (replace(GOOD, feature="big"), "train: --feature: found big, expected x"),
    (replace(GOOD, dtype="int8"), "train: --dtype: found int8, expected float32"),
    (replace(GOOD, operators=("row",)), "found 2 hops of row+loops already"),
    (replace(FREE, feature="nan"), "nodes/n/features/nan[7, 1]: found nan, expected finite"),
    (replace(FREE, feature="big", dtype="float16"), "hop 0[18, 2]: found 1e+06, expected less than"
     " 65520 for float16; --dtype bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_is_refused_leaves_the_store_as_it_was(store: Path, asked, message: str):
    before = tree(store)
    with pytest.raises(BadInput) as caught:
        make_hops(store, asked, QUIET)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert tree(store) == before
    assert [p.name for p in store.parent.iterdir()] == ["store"]


def test_no_room_is_said_at_once(store: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(store)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfSpace, match="found 1000B free, expected"):
        make_hops(store, FREE, QUIET)
    assert [p.name for p in store.parent.iterdir()] == ["store"]
