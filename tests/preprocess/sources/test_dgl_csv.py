"""DGL's CSVDataset: as its guide lays it out, of one type and of several; refusals."""

from pathlib import Path
from typing import Any

import pytest

from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.table import DglCsvSource
from tests.preprocess.quiet import QUIET
from tests.preprocess.sources.reading import read_all, ready, texts_of
from tests.preprocess.sources.refusals import assert_refused, text

META = """version: 1.0.0
dataset_name: small
edge_data:
- file_name: edges.csv
node_data:
- file_name: nodes.csv
"""
NODES = """,node_id,label,train_mask,val_mask,test_mask,feat,year
0,5,1,True,False,False,"0.5, 1.5",2000
1,3,0,False,True,False,"2.5,3",2001
2,9,,False,False,True,"[4, -1e3]",2002
"""
EDGES = """src_id,dst_id,weight,feat,train_mask
5,3,0.5,"1,2,3",1
9,9,1,"4,5,6",0
3,5,2,"7,8,9",1
"""
HETERO = """dataset_name: larger
separator: ';'
node_data:
- {file_name: user.csv, ntype: user, node_id_field: name}
- {file_name: item.csv, ntype: item}
edge_data:
- {file_name: buys.csv, etype: [user, buys, item], src_id_field: who}
- {file_name: knows.csv, etype: [user, knows, user]}
"""


def homogeneous(folder: Path) -> Path:
    """Three nodes with ids out of order, as pandas writes them, row numbers first."""
    (folder / "meta.yaml").write_text(META)
    (folder / "nodes.csv").write_text(NODES)
    (folder / "edges.csv").write_text(EDGES)
    return folder


def hetero(folder: Path) -> Path:
    """Users are texts, items are 0, 1, 2."""
    (folder / "meta.yaml").write_text(HETERO)
    (folder / "user.csv").write_text("name;label\nann;0\nbob;1\n")
    (folder / "item.csv").write_text('node_id;feat\n0;"1,2"\n1;"3,4"\n2;"5,6"\n')
    (folder / "buys.csv").write_text("who;dst_id;time\nbob;2;77\nann;0;-1\n")
    (folder / "knows.csv").write_text("src_id;dst_id\nbob;ann\n")
    return folder


def test_a_graph_of_one_type(tmp_path: Path):
    assert DglCsvSource.recognise(homogeneous(tmp_path)) == "meta.yaml"
    source = DglCsvSource(tmp_path)
    with ready(source, tmp_path):
        assert read_all(source) == {
            "_V": {
                "nodes": 3,
                "features": {
                    "x": [[0.5, 1.5], [2.5, 3], [4, -1000]],
                    "year": [2000, 2001, 2002],
                    "key": [5, 3, 9],
                },
                "label": {"label": [1, 0, None]},
                "splits": {"train": [0], "valid": [1], "test": [2]},
            },
            "_V _E _V": {
                "edges": [(0, 1), (2, 2), (1, 0)],
                "arrays": {"weight": [0.5, 1, 2], "x": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]},
                "splits": {"train": [0, 2]},
            },
        }


def test_a_graph_of_several_types(tmp_path: Path):
    source = DglCsvSource(hetero(tmp_path))
    with ready(source, tmp_path) as keys:
        assert read_all(source) == {
            "user": {"nodes": 2, "features": {}, "label": {"label": [0, 1]}, "splits": {}},
            "item": {
                "nodes": 3,
                "features": {"x": [[1, 2], [3, 4], [5, 6]]},
                "label": {},
                "splits": {},
            },
            "user buys item": {
                "edges": [(1, 2), (0, 0)],
                "arrays": {"time": [77, -1]},
                "splits": {},
            },
            "user knows user": {"edges": [(1, 0)], "arrays": {}, "splits": {}},
        }
        assert texts_of(keys / "user.parquet") == ["ann", "bob"]


@pytest.mark.parametrize("write", [homogeneous, hetero])
def test_they_become_stores(tmp_path: Path, write: Any):
    options = IngestOptions(mem_bytes=64 << 20, block_bytes=4096)
    manifest = ingest(DglCsvSource(write(tmp_path)), tmp_path / "store", options, QUIET).manifest
    assert sum(r.num_edges for r in manifest.relations) == 3


REFUSED = {
    "no meta": (lambda f: (f / "meta.yaml").unlink(), "meta.yaml: found no file"),
    "no YAML": (text("meta.yaml", "a: [1"), "meta.yaml: found "),
    "nothing": (text("meta.yaml", "version: 1.0.0"), "meta.yaml: found Object missing required fi"),
    "version": (text("meta.yaml", META.replace("1.0.0", "2.0.0")), "found version '2.0.0'"),
    "many graphs": (
        text("meta.yaml", f"{META}graph_data:\n  file_name: graphs.csv\n"), "found graph_data",
    ),
    "a graph id": (text("edges.csv", "graph_id,src_id,dst_id\n0,5,3\n"), "a column 'graph_id'"),
    "missing file": (lambda f: (f / "edges.csv").unlink(), "edges.csv: found no file: it is miss"),
    "missing id": (text("edges.csv", "src,dst_id\n5,3\n"), "edges.csv: header: found columns"),
    "unknown id": (text("edges.csv", "src_id,dst_id\n5,3\n\n3,4\n"), "edges.csv:4: found node id"),
    "id twice": (text("nodes.csv", "node_id\n3\n5\n3\n"), "nodes.csv:4: found node id '3' again"),
    "ragged": (text("edges.csv", "src_id,dst_id\n5,3,1\n"), "edges.csv:2: found 3 columns"),
    "width": (
        text("edges.csv", 'src_id,dst_id,feat\n5,3,"1,2"\n9,9,"1"\n'),
        "edges.csv:3: found 1 numbers in column 'feat', expected 2",
    ),
    "text": (text("edges.csv", "src_id,dst_id,note\n5,3,why\n"), "column note: found text"),
    "mask": (
        text("nodes.csv", "node_id,train_mask\n3,True\n5,maybe\n9,False\n"),
        "nodes.csv:3: found 'maybe' in column 'train_mask'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED[name]
    spoiler(homogeneous(tmp_path))
    assert_refused(tmp_path, lambda: DglCsvSource(tmp_path), words)
