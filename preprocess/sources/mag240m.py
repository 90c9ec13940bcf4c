"""The layout of MAG240M, as OGB-LSC unpacks it.

    mag240m_kddcup2021/
      meta.pt                                  {"paper": 121751666, "author": ..., ...}
      split_dict.pt                            {"train": ids, "valid": ids, "test-dev": ids, ...}
      processed/paper/node_feat.npy            float16 (papers, 768)
      processed/paper/node_label.npy           floats (papers,), NaN where there is none
      processed/paper/node_year.npy            integers (papers,)
      processed/<source>___<relation>___<target>/edge_index.npy    integers (2, edges)

Only papers have features.  The whole test split and its parts "test-dev" and "test-challenge" hold
the same papers: where both parts are there the whole is left out, else it is the split "test".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.files.torchapart import load_apart
from preprocess.source import SourceRows
from preprocess.sources.typed import ArrayRows, EdgeArray, TypedArrays

FOLDER = "mag240m_kddcup2021"
META, SPLITS, PROCESSED, EDGES = "meta.pt", "split_dict.pt", "processed", "edge_index.npy"
_PAPER, _CLASSES, _BETWEEN = "paper", "num_classes", "___"
_WHOLE, _PARTS = ("test-whole", "test"), ("test-dev", "test-challenge")


class Mag240mSource(TypedArrays):
    """The folder itself, or the one that it lies in.  Raises BadInput."""

    layout = "mag240m"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """`meta.pt` and a folder of a relation."""
        for folder, prefix in ((path, ""), (path / FOLDER, f"{FOLDER}/")):
            names = _relation_names(folder)
            if names and (folder / META).is_file():
                return f"{prefix}{META} and {prefix}{PROCESSED}/{names[0]}"
        return None

    def __init__(self, path: Path) -> None:
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        super().__init__(path, _count_nodes(folder / META))
        names = _relation_names(folder)
        if not names:
            raise BadInput.at(
                folder / PROCESSED, "no relations", "folders source___relation___target",
                "is it whole?",
            )  # fmt: skip
        for name in names:
            file = folder / PROCESSED / name / EDGES
            self.add_edges(self._ends(file), EdgeArray(NpyFile(file)))
        self._add_papers(folder / PROCESSED / _PAPER)
        self._add_splits(folder / SPLITS)
        self.files += [folder / META, folder / SPLITS]

    def _ends(self, path: Path) -> tuple[str, str, str]:
        """(source type, relation, target type) of a relation's file."""
        parts = path.parent.name.split(_BETWEEN)
        if len(parts) != 3:
            raise BadInput.at(
                path.parent, f"{len(parts)} names", "source___relation___target", "rename it"
            )
        for end in (parts[0], parts[2]):
            if end not in self.num_nodes:
                raise BadInput.at(
                    path, f"a relation of node type {end!r}",
                    f"one of {', '.join(self.num_nodes)}, as in {META}",
                    f"correct {META}, or move the relation away",
                )  # fmt: skip
        return parts[0], parts[1], parts[2]

    def _add_papers(self, folder: Path) -> None:
        num_papers = self.num_nodes[_PAPER]
        features, label, year = (
            ArrayRows(NpyFile(folder / f"node_{name}.npy"), num_papers)
            for name in ("feat", "label", "year")
        )
        self.add_feature(_PAPER, "x", features)
        self.add_feature(_PAPER, "year", year)
        self.add_label(_PAPER, label)
        self.files += [folder / f"node_{name}.npy" for name in ("feat", "label", "year")]

    def _add_splits(self, path: Path) -> None:
        held = _load_dict(path, "ids of each split")
        whole = next((name for name in _WHOLE if name in held), None)
        if all(part in held for part in _PARTS):
            left_out = set(_WHOLE)
        else:
            left_out = {*_WHOLE, *_PARTS} - {whole} if whole else set()
        for name, ids in held.items():
            reader = _IdList(f"{path}: {name}", ids)
            if name not in left_out:
                self.add_split(_PAPER, "test" if name in _WHOLE else name, reader)


class _IdList:
    """Node ids that a torch file holds.  Raises BadInput: no list of integers."""

    def __init__(self, where: str, ids: Any) -> None:
        self._where = where
        if not isinstance(ids, np.ndarray):
            raise BadInput.at(
                where, f"a {type(ids).__name__}", "an array of node ids", "save it again"
            )
        self._ids = ids
        if self._ids.ndim != 1 or self._ids.dtype.kind not in "iu":
            raise BadInput.at(
                f"{where}: header", f"shape {self._ids.shape} of {self._ids.dtype}",
                "(n,) of integers", "save the ids of the papers as a list",
            )  # fmt: skip

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""
        return SourceRows(name, self._ids.dtype, (), self._ids.size, "dense", self._where)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Ids in order, at most `count` at a time."""
        for first in range(0, self._ids.size, count):
            yield self._ids[first : first + count]


def _relation_names(folder: Path) -> list[str]:
    found = (folder / PROCESSED).glob(f"*{_BETWEEN}*")
    return sorted(p.name for p in found if p.is_dir())


def _load_dict(path: Path, of: str) -> dict[str, Any]:
    held = load_apart(path)
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        what = "names that are not text" if isinstance(held, dict) else f"a {type(held).__name__}"
        raise BadInput.at(path, what, f"a dict of names and {of}", "is it of MAG240M?")
    return held


def _count_nodes(path: Path) -> dict[str, int]:
    """Nodes of each type, in the order of `meta.pt`."""
    counts = _load_dict(path, "counts")
    counts.pop(_CLASSES, None)
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadInput.at(f"{path}: {name}", repr(count), "a number of nodes", "correct it")
    if _PAPER not in counts:
        raise BadInput.at(
            path, f"counts of {', '.join(counts) or 'nothing'}", f"one of {_PAPER} among them",
            "is it of MAG240M?",
        )  # fmt: skip
    return counts
