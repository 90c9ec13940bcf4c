"""Small datasets as OGB's archives hold them once unpacked."""

import gzip
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from preprocess.sources.source import Source
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
)

NAN = math.nan
EDGES = np.array([[0, 1, 4, 0, 2], [1, 2, 4, 1, 3]])
FEATURES = np.array([[0.5, -1.25], [2, 3e-3], [0, 0], [7, 8], [-1, 1]], np.float32)
YEARS = [2013, 2015, 2014, 2015, 2016]
SPLITS = {"train": [3, 0], "valid": [4], "test": [1, 2]}
ENDS = ("node", "to", "node")


def csv(path: Path, rows: Any, header: Sequence[str] = ()) -> None:
    """As pandas writes it: packed, nothing for NaN (in quotes where a line would be empty)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(header)] if header else []
    for row in rows:
        cells = [_cell(v) for v in (row if isinstance(row, tuple | list | np.ndarray) else [row])]
        lines.append(",".join(cells) if cells != [""] else '""')
    text(path, "".join(f"{line}\n" for line in lines))


def text(path: Path, content: str) -> None:
    """Packed text."""
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.write(content)


def _cell(value: Any) -> str:
    return "" if isinstance(value, float) and math.isnan(value) else str(value)


def arxiv(folder: Path) -> Path:
    """As ogbn_arxiv: features, one label, years, splits in text."""
    raw = folder / "raw"
    csv(raw / "edge.csv.gz", EDGES.T)
    csv(raw / "num-node-list.csv.gz", [5])
    csv(raw / "num-edge-list.csv.gz", [5])
    csv(raw / "node-feat.csv.gz", FEATURES)
    csv(raw / "node-label.csv.gz", [4, 0, 2, 1, 4])
    csv(raw / "node_year.csv.gz", YEARS)
    (folder / "RELEASE_v1.txt").write_text("")
    (folder / "processed").mkdir()
    torch.save({}, folder / "processed/geometric_data_processed.pt")
    (folder / "mapping").mkdir()
    csv(folder / "mapping/nodeidx2paperid.csv.gz", [(0, 9657784)], ["node idx", "paper id"])
    for split, ids in SPLITS.items():
        csv(folder / f"split/time/{split}.csv.gz", ids)
    return folder


def arxiv_graph() -> ExpectedGraph:
    """What is in `arxiv`, and in `papers`."""
    node = ExpectedType(5, {"x": FEATURES, "year": YEARS}, [4.0, 0, 2, 1, 4], dict(SPLITS))
    return ExpectedGraph({"node": node}, {ENDS: ExpectedRelation(EDGES)})


def proteins(folder: Path) -> Path:
    """As ogbn_proteins: no features, several labels, species, arrays of edges, one split file."""
    raw = folder / "raw"
    csv(raw / "edge.csv.gz", EDGES.T)
    csv(raw / "num-node-list.csv.gz", [5])
    csv(raw / "num-edge-list.csv.gz", [5])
    csv(raw / "edge-feat.csv.gz", np.arange(10).reshape(5, 2) / 8)
    csv(raw / "node-label.csv.gz", [(0, 1, 1), (1, 0, NAN), (0, 0, 0), (1, 1, 1), (NAN,) * 3])
    csv(raw / "species.csv.gz", [3702, 9606, 3702, 4932, 10090])
    (folder / "RELEASE_v1.txt").write_text("# Release note for ogbn-proteins\n\n### v1: 2020\n")
    for split in SPLITS:
        csv(folder / f"split/species/{split}.csv.gz", [0])
    lists = {split: np.array(ids) for split, ids in SPLITS.items()}
    torch.save(lists, folder / "split/species/split_dict.pt")
    return folder


def proteins_graph() -> ExpectedGraph:
    """What is in `proteins`."""
    labels = np.array([(0, 1, 1), (1, 0, NAN), (0, 0, 0), (1, 1, 1), (NAN,) * 3])
    node = ExpectedType(5, {"species": [3702, 9606, 3702, 4932, 10090]}, labels, dict(SPLITS))
    feat = (np.arange(10).reshape(5, 2) / 8).astype(np.float32)
    return ExpectedGraph({"node": node}, {ENDS: ExpectedRelation(EDGES, {"feat": feat})})


WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")


def mag(folder: Path) -> Path:
    """As ogbn_mag: types and relations in tables of their own; only papers have features."""
    raw = folder / "raw"
    csv(raw / "num-node-dict.csv.gz", [(3, 0, 4)], ["author", "field", "paper"])
    csv(raw / "triplet-type-list.csv.gz", [WRITES, CITES])
    csv(raw / "nodetype-has-label.csv.gz", [(False, False, True)], ["author", "field", "paper"])
    for ends, edges, number in (
        (WRITES, [(2, 0), (0, 3), (1, 3)], 1),
        (CITES, [(3, 0), (1, 2)], 2),
    ):
        relation = raw / "relations" / "___".join(ends)
        csv(relation / "edge.csv.gz", edges)
        csv(relation / "num-edge-list.csv.gz", [len(edges)])
        csv(relation / "edge_reltype.csv.gz", [number] * len(edges))
    csv(raw / "node-feat/paper/node-feat.csv.gz", [(0.5, 1.0), (-2.0, 0.0), (1.5, 3.0), (4.0, 5.0)])
    csv(raw / "node-feat/paper/node_year.csv.gz", [2010, 2011, 2012, 2013])
    csv(raw / "node-label/paper/node-label.csv.gz", [246, 131, 189, 131])
    split = folder / "split/time"
    csv(split / "nodetype-has-split.csv.gz", [(False, False, True)], ["author", "field", "paper"])
    for name, ids in (("train", [0, 2]), ("valid", [1]), ("test", [3])):
        csv(split / "paper" / f"{name}.csv.gz", ids)
    return folder


def mag_graph() -> ExpectedGraph:
    """What is in `mag`."""
    features = np.array([(0.5, 1.0), (-2.0, 0.0), (1.5, 3.0), (4.0, 5.0)], np.float32)
    paper = ExpectedType(
        4,
        {"x": features, "year": [2010, 2011, 2012, 2013]},
        [246.0, 131, 189, 131],
        {"train": [0, 2], "valid": [1], "test": [3]},
    )
    relations = {
        WRITES: ExpectedRelation([[2, 0, 1], [0, 3, 3]], {"reltype": [1, 1, 1]}),
        CITES: ExpectedRelation([[3, 1], [0, 2]], {"reltype": [2, 2]}),
    }
    types = {"author": ExpectedType(3), "field": ExpectedType(0), "paper": paper}
    return ExpectedGraph(types, relations)


def collab(folder: Path) -> Path:
    """As ogbl_collab: weights and years of edges; pairs as arrays, as torch 1.5 wrote them."""
    raw = folder / "raw"
    csv(raw / "edge.csv.gz", EDGES.T)
    csv(raw / "num-node-list.csv.gz", [5])
    csv(raw / "num-edge-list.csv.gz", [5])
    csv(raw / "node-feat.csv.gz", FEATURES)
    csv(raw / "edge_weight.csv.gz", [1, 3, 2, 1, 1])
    csv(raw / "edge_year.csv.gz", YEARS)
    split = folder / "split/time"
    split.mkdir(parents=True)
    for name, pairs in PAIRS.items():
        one = {"edge": np.array(pairs), "weight": np.ones(len(pairs), int), "year": np.array([9])}
        if name != "train":
            one["edge_neg"] = np.array([[4, 0], [3, 3], [2, 0]])
        torch.save(one, split / f"{name}.pt", _use_new_zipfile_serialization=False)
    return folder


PAIRS = {"train": [[0, 1], [1, 2], [4, 4]], "valid": [[0, 1]], "test": [[2, 3]]}


def collab_graph() -> ExpectedGraph:
    """What is in `collab`."""
    negatives = [[4, 0], [3, 3], [2, 0]]
    splits = {
        "train": PAIRS["train"],
        "valid": PAIRS["valid"],
        "valid_negative": negatives,
        "test": PAIRS["test"],
        "test_negative": negatives,
    }
    relation = ExpectedRelation(EDGES, {"weight": [1, 3, 2, 1, 1], "year": YEARS}, splits)
    return ExpectedGraph({"node": ExpectedType(5, {"x": FEATURES})}, {ENDS: relation})


def papers(folder: Path, compressed: bool = False, **changes: Any) -> Path:
    """As ogbn_papers100M: what `arxiv` has, in two `.npz` files; an array that is None is left out.

    Node 2 has no label.
    """
    raw = folder / "raw"
    raw.mkdir(parents=True)
    arrays = {
        "edge_index": EDGES,
        "num_nodes_list": np.array([5]),
        "num_edges_list": np.array([5]),
        "node_feat": FEATURES,
        "node_year": np.array(YEARS).reshape(5, 1),
    } | {k: v for k, v in changes.items() if k != "node_label"}
    labels = changes.get("node_label", np.array([[4], [0], [NAN], [1], [4]], np.float32))
    write = np.savez_compressed if compressed else np.savez
    write(raw / "data.npz", **{k: v for k, v in arrays.items() if v is not None})
    np.savez(raw / "node-label.npz", node_label=labels)
    for split, ids in SPLITS.items():
        csv(folder / f"split/time/{split}.csv.gz", ids)
    return folder


def papers_graph() -> ExpectedGraph:
    """What is in `papers`."""
    graph = arxiv_graph()
    graph.types["node"].label = [4, 0, NAN, 1, 4]
    return graph


def npy(values: Any) -> bytes:
    """A `.npy` file."""
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def names_of(source: Source, folder: Path) -> list[str]:
    """The files of a source, by their paths in its folder."""
    return [str(path.relative_to(folder)) for path in source.files]
