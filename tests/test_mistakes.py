"""Mistakes of a first day: each is answered by one line, which says what to do."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from clients.hopwise.dataset import HopDataset  # noqa: E402
from clients.link import LinkDataset  # noqa: E402
from clients.torch import HeteroDataset, NeighborDataset  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import ROOT, daemon  # noqa: E402
from tests.later import Later  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402
from tests.processes import run_main  # noqa: E402

pyg, records = Later("clients.pyg"), Later("torch_geometric.data")
Scene = SimpleNamespace


@pytest.fixture(scope="module")
def scene(small_graph: Path, tmp_path_factory: pytest.TempPathFactory):
    """A graph, its store, a daemon, and files that are something else."""
    folder = tmp_path_factory.mktemp("day")
    ingest(PlainSource(small_graph), folder / "store", IngestOptions(block_bytes=16 << 10), QUIET)
    root = Path(shutil.copytree(folder / "store", folder / "old")) / "zarr.json"
    root.write_text(root.read_text().replace('"format": 3', '"format": 2'))
    for name in ("empty", "tables", "notes"):
        (folder / name).mkdir()
    (folder / "tables/users.csv").write_text("id,age\n1,2\n")
    (folder / "notes/read.me").write_text("the graph is elsewhere")
    (folder / "file").write_text("no checkpoint, no graph")
    torch.save({"model": {"weight": torch.ones(2)}}, folder / "other.pt")
    with daemon(folder / "store", "64M", 2) as endpoint:
        yield Scene(
            folder=folder, graph=small_graph, store=folder / "store", endpoint=endpoint,
            free=f"ipc://{folder}/free.sock",
        )  # fmt: skip


# words of the command, {names} of the scene in them, and the remedy
COMMANDS: dict[str, tuple[str, str]] = {
    "a path with a slip": ("preprocess ingest {folder}/grpah OUT", "is the path right?"),
    "a file": ("preprocess ingest {folder}/file OUT", "--layout says which it is"),
    "an empty folder": ("preprocess ingest {folder}/empty OUT", "is the path right?"),
    "a folder of something else": ("preprocess ingest {folder}/notes OUT", "is the path right?"),
    "tables without a schema": ("preprocess ingest {folder}/tables OUT", "blockstore schema"),
    "a store as the source": ("preprocess ingest {store} OUT", "loaderd serves stores as they are"),
    "a store that exists": ("preprocess ingest {graph} {store}", "choose another name"),
    "a size of no unit": ("preprocess ingest {graph} OUT --mem 2X", "such as 64K, 512M or 2G"),
    "too little memory": ("preprocess ingest {graph} OUT --mem 1M", "expected at least --mem 22M"),
    "a layout with a slip": ("preprocess ingest {graph} OUT --layout pgy", "or leave it out"),
    "an option with a slip": ("preprocess ingest {graph} OUT --undirectd", "ingest --help"),
    "no target": ("preprocess ingest {graph}", "Missing argument 'store'; see: blockstore ingest"),
    "a command with a slip": ("preprocess ingset {graph} OUT", "Did you mean 'ingest'?"),
    "an endpoint for a store": ("preprocess info {endpoint}", "`loaderd status` takes"),
    "a graph for a store": ("preprocess info {graph}", "made by `blockstore ingest`"),
    "a store of another version": ("preprocess verify {folder}/old", "or ingest again"),
    "export onto something": ("preprocess export {store} {graph}", "choose another name"),
    "ids that there are not": ("preprocess lookup {store} alice", "give the numbers"),
    "an operator with a slip": (
        "preprocess hops {store} --operator smy --hops 2", "is not one of 'sym', 'row'",
    ),
    "a split of 130 %": ("preprocess ingest {graph} OUT --split 0.9,0.3,0.1", "--split"),
    "served before ingest": ("loaderd serve {graph} --endpoint {free}", "`blockstore ingest`"),
    "a store that is not there": ("loaderd serve {folder}/stroe --endpoint {free}", "nothing is"),
    "a file as a store": ("loaderd serve {folder}/file --endpoint {free}", "`blockstore ingest`"),
    "an old store": ("loaderd serve {folder}/old --endpoint {free}", "or ingest again"),
    "a path for an endpoint": (
        "loaderd serve {store} --endpoint {folder}/d.sock", "; give ipc:///",
    ),
    "a second daemon": ("loaderd serve {store} --endpoint {endpoint}", "stop it, or choose"),
    "no endpoint": ("loaderd serve {store}", "'--endpoint' (env var: 'LOADERD_ENDPOINT'); see"),
    "no memory to serve": ("loaderd serve {store} --endpoint {free} --mem 64K", "at least --mem"),
    "more memory than there is": (
        "loaderd serve {store} --endpoint {free} --mem 99999G", "give a smaller --mem",
    ),
    "a path of a socket that is too long": (
        "loaderd serve {store} --endpoint {free}" + 99 * "x", "choose a shorter one",
    ),
    "a config that is not there": (
        "loaderd serve {store} --endpoint {free} --config no.toml", "give a TOML file",
    ),
    "one store twice": ("loaderd serve {store} {store} --endpoint {free}", "rename one"),
    "all interfaces without keys": (
        "loaderd serve {store} --endpoint {free} --listen tcp://0.0.0.0:0", "loaderd keygen",
    ),
    "no daemon": ("loaderd status --endpoint {free}", "start one with: loaderd serve"),
    "a store for an endpoint": ("loaderd status --endpoint {store}", "expected ipc:///path"),
    "training without a daemon": ("clients.train {free}", "start one with: loaderd serve"),
    "a model with a slip": ("clients.train {endpoint} --model sgae", "choose from 'sage'"),
    "an option of PyG's": ("clients.train {endpoint} --fanouts 5", "clients.train --help"),
    "a checkpoint of something else": (
        "clients.train {endpoint} --checkpoint {folder}/other.pt", "or another --checkpoint",
    ),
    "a checkpoint that is none": (
        "clients.train {endpoint} --checkpoint {folder}/file", "or another --checkpoint",
    ),
    "a plan that the store is not for": (
        "clients.train {endpoint} --plan macrobatch", "blockstore repartition STORE NEW",
    ),
    "an owner map that is not there": (
        "clients.train {endpoint} --plan split --owners two", "make it with `blockstore owners`",
    ),
    "a store of another name": ("clients.train {endpoint} --store papers", "expected one of store"),
    "hops that were not made": ("clients.train_hops {endpoint}", "make them by `blockstore hops`"),
    "inference of nothing": ("clients.infer {endpoint} no.pt y.npy", "a checkpoint of clients.t"),
    "inference of another model": (
        "clients.infer {endpoint} {folder}/other.pt y.npy", "for a model of this store",
    ),
    "inference of no file": ("clients.infer {endpoint} no.pt", "required: out; see: python -m"),
}  # fmt: skip


def process(words: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def in_process(words: list[str]) -> tuple[int, str]:
    """The same in this process, which has imported what it needs."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run_main(*words)
    return code, said.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_to_do(scene: Any, tmp_path: Path, name: str) -> None:
    text, remedy = COMMANDS[name]
    words = [str(tmp_path / w) if w == "OUT" else w.format(**vars(scene)) for w in text.split()]
    # a daemon would take over the signals of this process
    code, said = (process if words[0] == "loaderd" else in_process)(words)
    assert code == 2, said
    # ingest says first what it has found
    lines = [x for x in said.splitlines() if not x.endswith("plain, edge_index.npy")]
    assert len(lines) == 1, said
    assert lines[0].startswith("error: ")
    assert remedy in lines[0]
    assert list(tmp_path.iterdir()) == []


def first(dataset: Any) -> Any:
    return next(iter(dataset))


def asked(**options: Any) -> Callable[[Scene], Any]:
    """A batch, with these options."""
    return lambda scene: first(NeighborDataset(scene.endpoint, **options))


def of_pyg(**options: Any) -> Callable[[Scene], Any]:
    return lambda scene: first(pyg.NeighborLoader(scene.endpoint, [3], **options))


CALLS: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "a graph for an endpoint": (lambda s: NeighborDataset(str(s.graph)), "`blockstore ingest`"),
    "a path that is not there": (lambda s: NeighborDataset("stroe"), "or the path of a store"),
    "nobody serves": (lambda s: NeighborDataset(s.free), "start one with: loaderd serve STORE"),
    "a URL": (lambda s: NeighborDataset("http://localhost"), "expected ipc:///path"),
    "None": (lambda s: NeighborDataset(None), "expected ipc:///path"),
    "PyG's data": (lambda s: pyg.NeighborLoader(records.Data(), [3]), "expected a daemon's end"),
    "a split with a slip": (asked(split="tarin"), "it has train, valid, test, all"),
    "a fanout below -1": (asked(num_neighbors=[-2]), "expected -1 (all neighbors), or up to"),
    "no hops": (asked(num_neighbors=[]), "expected 1 to 16"),
    "a number for a list": (asked(num_neighbors=10), "such as [15, 10]"),
    "a fanout of an unknown relation": (
        asked(num_neighbors={("a", "b", "c"): [1]}), "the store has node__to__node",
    ),
    "batches of nothing": (asked(batch_size=0), "expected 1 to"),
    "an array with a slip": (asked(features=("yaer",)), "the store has x of node"),
    "a text for a list of arrays": (asked(features="x"), "expected names, as ('x',)"),
    "labels with a slip": (asked(labels="yaer"), "the store has x of node"),
    "features of edges that are absent": (asked(edge_features=True), "ingest a graph that has"),
    "weights that are absent": (asked(weighted=True), "ingest a graph that has them"),
    "weights by PyG's name": (of_pyg(weight_attr="w"), "ingest a graph that has them"),
    "times that are absent": (asked(edge_times=True), "or leave edge_times out"),
    "times of seeds": (asked(input_nodes=[1], input_time=[1]), "ingest it with an array"),
    "times without seeds'": (of_pyg(time_attr="t"), "expected a time of each seed"),
    "edge ids that are absent": (asked(return_e_id=True), "ingest with --edge-ids"),
    "an id too large": (asked(input_nodes=[1, 4000]), "outside [0, 4000)"),
    "a mask of another graph": (
        asked(input_nodes=torch.ones(3999, dtype=torch.bool)), "expected one over the 4000",
    ),
    "a mask of nobody": (
        asked(input_nodes=torch.zeros(4000, dtype=torch.bool)), "expected at least one",
    ),
    "ids that are fractions": (asked(input_nodes=np.ones(3)), "expected 1-d ids or a bool mask"),
    "a plan with a slip": (asked(plan="macro"), "choose among auto, minibatch"),
    "a plan for partitions": (asked(plan="macrobatch"), "blockstore repartition STORE NEW"),
    "an option with a slip": (asked(bacth_size=3), "expected some of batch_dependency"),
    "a rank too large": (asked(rank=2, world_size=2), "expected 0 to 1"),
    "another store": (asked(store="papers"), "expected one of store"),
    "a type that is not there": (
        lambda s: first(HeteroDataset(s.endpoint, input_type="paper")), "it has node",
    ),
    "a split of nodes for edges": (
        lambda s: first(LinkDataset(s.endpoint, "train", [3])), "it has all",
    ),
    "edges of an odd shape": (
        lambda s: LinkDataset(s.endpoint, torch.zeros(3, 4, dtype=torch.int64), [3]),
        "expected integers (2, edges)",
    ),
    "a way to sample with a slip": (of_pyg(subgraph_type="both"), "'bidirectional' or 'induced'"),
    "negatives with a slip": (
        lambda s: pyg.LinkNeighborLoader(s.endpoint, [3], neg_sampling="foo"),
        "expected 'binary' or 'triplet'",
    ),
    "a collate_fn": (of_pyg(collate_fn=list), "give transform"),
    "batches of batches": (
        lambda s: first(DataLoader(NeighborDataset(s.endpoint), batch_size=4)), "batch_size=None",
    ),
    "a state of something else": (
        lambda s: NeighborDataset(s.endpoint).load_state_dict({"epoch": 1}), "state_dict() gave",
    ),
    "hops before they are made": (lambda s: first(HopDataset(s.endpoint)), "`blockstore hops`"),
    "edges of a data set": (
        lambda s: pyg.StoreDataset(s.endpoint)[0].edge_index, "NeighborLoader(data, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_what_to_do(scene: Any, name: str) -> None:
    call, remedy = CALLS[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one is looked at below)
        call(scene)
    said = str(caught.value)
    assert remedy in said
    assert "\n" not in said
    module = type(caught.value).__module__
    assert re.match(r"builtins|blockstore|loaderd|clients", module), module
