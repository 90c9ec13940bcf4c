"""Hops made by the ingest itself: the bytes of both commands, kills, estimates, refusals."""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockstore.errors import BudgetTooSmall
from blockstore.store import open_store
from blockstore.verify import verify_store
from preprocess.cli.dryrun import dry_run, dry_run_text
from preprocess.cli.summary import summarise_ingest, summary_text
from preprocess.errors import BadInput
from preprocess.hops import hops as hops_module
from preprocess.hops.hops import make_hops
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import HopsRequest, IngestOptions
from preprocess.sources.plain import PlainSource
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_resume import tree

ASKED = HopsRequest(("sym", "ppr"), hops=2, hop_alpha=0.7)
PLAIN = IngestOptions(block_bytes=4096)
OPTIONS = replace(PLAIN, hops=ASKED)


@pytest.fixture(scope="module")
def both(
    small_graph: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], dict[str, str]]:
    """A store file by file: without hops, then with those that the other command makes."""
    path = tmp_path_factory.mktemp("apart") / "store"
    ingest(PlainSource(small_graph), path, PLAIN, QUIET)
    bare = tree(path)
    make_hops(path, ASKED, QUIET)
    return bare, tree(path)


@pytest.fixture(scope="module")
def plain(both: tuple[dict[str, str], dict[str, str]]) -> dict[str, str]:
    """What a store without hops is, file by file."""
    return both[0]


@pytest.fixture(scope="module")
def apart(both: tuple[dict[str, str], dict[str, str]]) -> dict[str, str]:
    """What the two commands make, file by file."""
    return both[1]


def test_the_bytes_are_those_of_both_commands(
    small_graph: Path, tmp_path: Path, apart: dict[str, str]
):
    source, path = PlainSource(small_graph), tmp_path / "once"
    result = ingest(source, path, OPTIONS, QUIET)
    assert tree(path) == apart
    assert result.manifest == open_store(path).manifest
    verify_store(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["once"]
    planned = dry_run(source, path, OPTIONS)
    assert [s.name for s in planned.plan.stages] == [s.name for s in result.stages]
    assert "2 of sym+loops, ppr:0.7+loops, of node" in dry_run_text(planned)
    text = summary_text(summarise_ingest(source, path, result, QUIET))
    assert "hops        train: float32 " in text
    assert "sym+loops, 2 hops; ppr:0.7+loops, 2 hops" in text


@pytest.mark.parametrize(
    "stage", [pytest.param("_choose", marks=pytest.mark.long), "_keep", "commit"]
)
def test_a_stopped_one_goes_on_in_its_propagation(
    small_graph: Path,
    tmp_path: Path,
    apart: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
):
    """In a child that ends without a word: before that function, or right behind the last byte."""
    path, owner = tmp_path / "once", hops_module.HopStages
    owner = {"_keep": hops_module.HopsRun, "commit": hops_module.StoreExtender}.get(stage, owner)
    whole = getattr(owner, stage)

    def cut_off(*args):
        if stage == "commit":
            whole(*args)
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(owner, stage, cut_off)
        try:
            ingest(PlainSource(small_graph), path, OPTIONS, QUIET)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not path.exists()
    result = ingest(PlainSource(small_graph), path, OPTIONS, QUIET)
    assert tree(path) == apart
    resumed = [s.name for s in result.stages if s.resumed]
    assert "order nodes" in resumed
    assert ("hops: rows" in resumed) == (stage == "_keep")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["once"]


def test_what_cannot_be_is_said_before_anything_is_written(small_graph: Path, tmp_path: Path):
    source, path = PlainSource(small_graph), tmp_path / "once"
    for options, message in (
        (replace(OPTIONS, hops=replace(ASKED, hop_alpha=2.0)), "hops: --alpha: found 2.0"),
        (replace(OPTIONS, hops=replace(ASKED, weighted=True)), "without weights"),
        (replace(OPTIONS, hops=replace(ASKED, node_type="author")), "found type 'author'"),
        (replace(OPTIONS, allow_nan=True), "--hops: found --allow-nan beside it"),
    ):
        with pytest.raises(BadInput, match=message):
            ingest(source, path, options, QUIET)
        with pytest.raises(BadInput, match=message):
            dry_run(source, path, options)
    assert sorted(p.name for p in tmp_path.iterdir()) == []


def test_where_hops_cannot_be_made_the_store_is_there(
    small_graph: Path, tmp_path: Path, plain: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_):
        raise BadInput("no")

    monkeypatch.setattr(hops_module.HopsRun, "_keep", refuse)
    with pytest.raises(BadInput, match=r"no; .*once is there, without hops"):
        ingest(PlainSource(small_graph), tmp_path / "once", OPTIONS, QUIET)
    assert tree(tmp_path / "once") == plain
    assert sorted(p.name for p in tmp_path.iterdir()) == ["once"]


def test_the_memory_that_is_named_is_enough_for_the_hops_too(tmp_path: Path):
    """Those of the ingest and of its hops are compared before anything is read."""
    graph = Graph().add_type("n", 200_000, x=np.ones((200_000, 2), np.float32))
    graph.add_relation("n", "to", "n", np.arange(400_000).reshape(-1, 2) % 200_000)
    options = IngestOptions(
        block_bytes=4096, mem_bytes=1 << 20, order="source",
        hops=HopsRequest(("row",), node_type="n", feature="x", rows="all"),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall) as caught:
        ingest(graph, tmp_path / "store", options, QUIET)
    found = re.search(r"expected at least --mem (\d+)M", str(caught.value))
    assert found is not None
    named = int(found[1])
    few = replace(options, mem_bytes=(named - 1) << 20)
    with pytest.raises(BudgetTooSmall, match=rf"expected at least --mem {named}M"):
        ingest(graph, tmp_path / "store", few, QUIET)
    ingest(graph, tmp_path / "store", replace(options, mem_bytes=named << 20), QUIET)
    assert open_store(tmp_path / "store").manifest.types[0].hops
