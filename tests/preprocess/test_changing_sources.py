"""A source that changes during an ingest: the store is of one version, or there is none."""

import json
import mmap
import os
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

from preprocess.errors import BadInput
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Rendering
from preprocess.sources.layouts import LAYOUTS, open_source
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_resume import stopped, tree

NODES, EDGES, WIDTH = 600, 3000, 32
OPTIONS = IngestOptions(block_bytes=4096, edge_ids=True)


def _arrays(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, NODES, (2, EDGES))
    return edges, rng.random((NODES, WIDTH), np.float32), rng.integers(0, 3, NODES)


def plain(folder: Path, seed: int) -> tuple[Path, Path, Path]:
    """The path to ingest, the file of features, the file of edges."""
    edges, features, labels = _arrays(seed)
    np.save(folder / "edge_index.npy", edges)
    np.save(folder / "node_feat.npy", features)
    np.save(folder / "node_label.npy", labels)
    return folder, folder / "node_feat.npy", folder / "edge_index.npy"


def _tables(folder: Path, seed: int, form: str) -> tuple[Path, Path, Path]:
    edges, features, labels = _arrays(seed)
    names = [f"f{i}" for i in range(WIDTH)]
    # numbers of one width, so that files of other content have the same size
    columns = {name: np.round(features[:, i] % 0.9 + 0.1, 6) for i, name in enumerate(names)}
    nodes = {"id": np.arange(NODES) + 1000, **columns, "class": labels}
    tables = {"nodes": nodes, "edges": {"a": edges[0] + 1000, "b": edges[1] + 1000}}
    for name, values in tables.items():
        table = pa.table({key: pa.array(value) for key, value in values.items()})
        if form == "csv":
            pa_csv.write_csv(table, folder / f"{name}.csv")
        else:
            pq.write_table(table, folder / f"{name}.parquet", compression=None)
    described = {
        "node_type": "node", "files": f"nodes.{form}", "node_id_col": "id",
        "features": [{"feature_name": "x", "feature_col": names}],
        "labels": [{"label_col": "class"}],
    }  # fmt: skip
    relation = {"relation": ["node", "to", "node"], "files": f"edges.{form}"}
    ends = {"source_id_col": "a", "dest_id_col": "b"}
    schema = {"nodes": [described], "edges": [{**relation, **ends}]}
    (folder / "schema.json").write_text(json.dumps(schema))
    return folder, folder / f"nodes.{form}", folder / f"edges.{form}"


def csv(folder: Path, seed: int) -> tuple[Path, Path, Path]:
    return _tables(folder, seed, "csv")


def parquet(folder: Path, seed: int) -> tuple[Path, Path, Path]:
    return _tables(folder, seed, "parquet")


def torch_file(folder: Path, seed: int) -> tuple[Path, Path, Path]:
    edges, features, labels = _arrays(seed)
    held = {"edge_index": edges, "x": features, "y": labels}
    path = folder / "graph.pt"
    torch.save({name: torch.from_numpy(values) for name, values in held.items()}, path)
    return path, path, path


def _other(path: Path, make: Callable[[Path, int], tuple[Path, Path, Path]]) -> Path:
    """The same file of another graph, elsewhere."""
    folder = path.parent.with_name("other")
    folder.mkdir(exist_ok=True)
    make(folder, 2)
    return folder / path.name


def change(path: Path, other: Path) -> None:
    """Its content, in place."""
    path.write_bytes(other.read_bytes())


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path, other: Path) -> None:
    """By another file of the same size and time."""
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


def touch(path: Path, other: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


def remove(path: Path, other: Path) -> None:
    path.unlink()


def write_mapped(path: Path, other: Path) -> None:
    """Through a mapping, in a page that was written a moment before: its time stays."""
    stat = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        at = len(view) // 2
        view[at : at + 16] = bytes(b ^ 1 for b in view[at : at + 16])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


CHANGES = [change, truncate, replace, touch, remove, write_mapped]
FORMS = [plain, csv, parquet, torch_file]


class At(Progress):
    """Progress that does something when a certain step begins."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        super().__init__(rendering=Rendering())
        self._left, self._action = number, action
        self.begun = 0

    def stage(self, name, total, unit):
        self.begun += 1
        if self.begun == self._left:
            self._action()
        return super().stage(name, total, unit)


@cache
def _steps(make) -> int:
    """How many an ingest of such a source has."""
    with TemporaryDirectory() as name:
        (folder := Path(name) / "in").mkdir()
        counting = At(-1, lambda: None)
        ingest(open_source(make(folder, 1)[0]).source, Path(name) / "whole", OPTIONS, counting)
    return counting.begun


# every change to two forms, and one to all
USUAL = {(make, change) for make in FORMS} | {
    (make, alter)
    for i, alter in enumerate(CHANGES[1:])
    for make in (FORMS[i % 4], FORMS[(i + 2) % 4])
}


@pytest.mark.parametrize(
    ("make", "alter"),
    [
        pytest.param(make, alter, marks=[] if (make, alter) in USUAL else pytest.mark.long)
        for make, alter in product(FORMS, CHANGES)
    ],
)
def test_a_source_that_changes_gives_no_mixed_store(tmp_path: Path, make, alter):
    """When the first, a middle and the last step begin: refused in a line that names the file."""
    (tmp_path / "in").mkdir()
    path, features, edges = make(tmp_path / "in", 1)
    steps = [_steps(make) // 2]
    if alter is CHANGES[0]:
        steps += [1, _steps(make)]
    for number in steps:
        make(tmp_path / "in", 1)
        changed = features if number % 2 else edges
        target = tmp_path / f"store-{number}"
        watch = At(number, lambda p=changed: alter(p, _other(p, make)))
        with pytest.raises(BadInput) as caught:
            ingest(open_source(path).source, target, OPTIONS, watch)
        assert str(caught.value).startswith(f"{changed}: found ")
        assert "expected a source that stays as it is" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert watch.begun >= number
        assert not target.exists()
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("make", FORMS)
def test_a_source_that_changes_while_it_is_opened_is_refused(tmp_path, make, monkeypatch):
    (tmp_path / "in").mkdir()
    path, features, _ = make(tmp_path / "in", 1)
    chosen = LAYOUTS[open_source(path).source.layout]

    class Slow:
        layout, recognise = chosen.layout, chosen.recognise

        def __call__(self, found: Path):
            source = chosen(found)
            features.write_bytes(_other(features, make).read_bytes() + b" ")
            return source

    monkeypatch.setitem(LAYOUTS, Slow.layout, Slow())
    with pytest.raises(BadInput, match="when it was opened, expected a source that stays"):
        open_source(path)


@pytest.mark.parametrize("alter", [change, truncate, replace, touch, write_mapped])
def test_a_run_goes_on_with_the_same_files_only(tmp_path: Path, alter):
    (tmp_path / "in").mkdir()
    path, features, _ = plain(tmp_path / "in", 1)
    stopped(open_source(path).source, tmp_path / "store", "nodes/node/features/x", OPTIONS)
    alter(features, _other(features, plain))
    if alter is truncate:
        with pytest.raises(BadInput, match="truncated"):
            open_source(path)
        return
    result = ingest(open_source(path).source, tmp_path / "store", OPTIONS, QUIET)
    assert not any(s.resumed for s in result.stages)
    ingest(open_source(path).source, tmp_path / "whole", OPTIONS, QUIET)
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")
