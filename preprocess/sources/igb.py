"""The layout of IGB: the homogeneous IGB260M and the heterogeneous IGBH, of every size.

docs/layouts.md lists its files.  In `large` and `full` the files of papers and authors have no
header: their number of rows follows from the name of the size.  In `full` only the first papers
have labels, followed by zeros.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile, RawFile, has_header
from preprocess.files.strided import StoredArray
from preprocess.sources.arrays import ArrayRows, EdgeArray
from preprocess.sources.source import Ends, Rows, Source, SourceRows, split_ends

PROCESSED, EDGES, FEATURES = "processed", "edge_index.npy", "node_feat.npy"
NUM_COLUMNS = 1024  # of features
_PAPER, _BETWEEN = "paper", "__"
_CITES = "paper__cites__paper"
_KNOWN = (
    _CITES, "paper__written_by__author", "author__affiliated_to__institute", "paper__topic__fos",
    "paper__published__journal", "paper__venue__conference",
)  # fmt: skip
_LABEL_DTYPE = np.dtype(np.int16)  # holds 2983 classes, and -1 for none


class Headerless(NamedTuple):
    """Row counts of the files of one size that have no header."""

    num_nodes: Mapping[str, int]  # rows of the features, by type
    num_labelled: Mapping[str, int] = {}  # number of first papers with labels, by classes


SIZES: Mapping[str, Headerless] = {  # as in IGB's own loader
    "large": Headerless({_PAPER: 100_000_000, "author": 116_959_896}),
    "full": Headerless(
        {_PAPER: 269_346_174, "author": 277_220_883}, {"19": 227_130_858, "2K": 157_675_969}
    ),
}


class IgbSource(Source):
    """The folder of a size, or its parent if it is the only one; labels of 19 classes.

    Labels of 2983 classes, if they exist, become the array "label_2K".  Raises BadInput.
    """

    layout = "igb"
    classes, other_classes = "19", "2K"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder of citations between papers."""
        folders = _graphs(path)
        if not folders:
            return None
        names = _relation_names(folders[0])
        place = "" if folders[0] == path else f"{folders[0].name}/"
        more = f" and {len(names) - 1} more relations" if len(names) > 1 else ""
        return f"{place}{PROCESSED}/{_CITES}{more}"

    def __init__(self, path: Path, sizes: Mapping[str, Headerless] = SIZES) -> None:
        """`sizes`: row counts of files without a header, by name of the size."""
        folders = _graphs(path)
        if len(folders) != 1:
            found = ", ".join(f.name for f in folders)
            raise BadInput.at(
                path, f"several graphs: {found}" if found else f"no {PROCESSED}/{_CITES}",
                "the folder of one size of IGB", "name that folder",
            )  # fmt: skip
        (folder,) = folders
        self._size, self._sizes = folder.absolute().name, sizes
        held = folder / PROCESSED
        ends = {name: _ends(held / name) for name in _relation_names(folder)}
        features = {
            name: self._open(held / name / FEATURES, name)
            for name in dict.fromkeys(t for s, _, d in ends.values() for t in (s, d))
        }
        super().__init__(path, {name: file.shape[0] for name, file in features.items()})
        for name, types in ends.items():
            self.add_edges(types, EdgeArray(NpyFile(held / name / EDGES), paired=True))
        for name, file in features.items():
            self.add_array(name, ArrayRows("x", file))
        folder = held / _PAPER
        self.add_label(_PAPER, self._label_rows("label", folder, self.classes))
        other = self.other_classes
        if (folder / f"node_label_{other}.npy").exists():
            self.add_array(_PAPER, self._label_rows(f"label_{other}", folder, other))

    @property
    def _known(self) -> Headerless:
        """The entry for the graph's size, which is the last word of its folder's name."""
        word = self._size.replace("_", "-").rpartition("-")[2]
        return self._sizes.get(word, Headerless({}))

    def _open(self, path: Path, node_type: str) -> StoredArray:
        """The features of a type, with a header or without."""
        if has_header(path):
            file = NpyFile(path)
            if len(file.shape) != 2:
                raise BadInput.at(
                    f"{path}: header", f"shape {file.shape}", "(nodes, features)", "reshape it"
                )
            return file
        return RawFile(path, np.float32, (self._rows_of(path, node_type), NUM_COLUMNS))

    def _rows_of(self, path: Path, node_type: str) -> int:
        """Number of rows of a type's file without a header."""
        num_rows = self._known.num_nodes.get(node_type)
        if num_rows is None:
            known = " or ".join(n for n, s in self._sizes.items() if node_type in s.num_nodes)
            expected = f"one, or {known} as the folder's name" if known else "one"
            raise BadInput.at(
                f"{path}: header", f"none, in a folder {self._size}", expected,
                "the name of the folder says how many rows there are: rename it" if known
                else "save it again with numpy.save",
            )  # fmt: skip
        return num_rows

    def _label_rows(self, name: str, folder: Path, classes: str) -> Rows:
        path, num_papers = folder / f"node_label_{classes}.npy", self.num_nodes[_PAPER]
        num_labelled = min(self._known.num_labelled.get(classes, num_papers), num_papers)
        if has_header(path):
            return _label_array(name, NpyFile(path), num_papers, num_labelled)
        whole = self._rows_of(path, _PAPER)
        item = np.dtype(np.float32).itemsize
        num_rows = num_labelled if path.stat().st_size == num_labelled * item else whole
        file = RawFile(path, np.float32, (num_rows,))
        return _label_array(name, file, num_papers, num_labelled)


class Igb2kSource(IgbSource):
    """As `igb`, with labels of 2983 classes; those of 19 are the array "label_19"."""

    layout = "igb-2k"
    classes, other_classes = "2K", "19"

    @classmethod
    def recognise(cls, _path: Path) -> str | None:
        """Never: `igb` matches instead; this layout must be requested by name."""
        return None


def _label_array(name: str, file: StoredArray, num_papers: int, num_labelled: int) -> Rows:
    """Classes of papers; -1 for those without, and for all from `num_labelled` on.

    Raises BadInput: another shape or dtype; while it is read, a number that is no class.
    """
    file.check(len(file.shape) == 1 and file.dtype.kind in "iuf", "(papers,) of numbers")
    if file.shape[0] not in (num_papers, num_labelled):
        raise BadInput.at(
            file.header, f"{file.shape[0]} rows", f"{num_papers}, one a paper",
            "is it of this graph?",
        )  # fmt: skip
    form = SourceRows(name, _LABEL_DTYPE, (), num_papers, "dense", file.where)
    return Rows(form, partial(_label_pieces, file, num_papers, num_labelled), file.path)


def _label_pieces(
    file: StoredArray, num_papers: int, num_labelled: int, count: int
) -> Iterator[NDArray[np.int16]]:
    out, maximum = np.empty(min(count, num_papers), _LABEL_DTYPE), np.iinfo(_LABEL_DTYPE).max
    done = 0
    for values in file.pieces(0, num_labelled, count):
        known = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, np.bool_)
        bad = known & ~((values >= -1) & (values <= maximum) & (values == np.floor(values)))
        if bad.any():
            at = int(np.argmax(bad))
            raise BadInput.at(
                f"{file.where}[{done + at}]", f"label {values[at]}",
                f"a class from 0 to {maximum}, or -1 or NaN for none", "is it of this graph?",
            )  # fmt: skip
        out[:] = -1
        np.copyto(out[: values.size], values, where=known, casting="unsafe")
        yield out[: values.size]
        done += values.size
    out[:] = -1
    for first in range(done, num_papers, count):
        yield out[: num_papers - first]


def _graphs(path: Path) -> list[Path]:
    """Folders that contain `processed`: the path, else its parent, else all that are in it."""
    if (path / PROCESSED / _CITES).is_dir():
        return [path]
    if (path / _CITES).is_dir() and path.absolute().name == PROCESSED:
        return [path.absolute().parent]
    return sorted(p.parent.parent for p in path.glob(f"*/{PROCESSED}/{_CITES}"))


def _relation_names(folder: Path) -> list[str]:
    """IGB's relations in its own order, then any others."""
    found = (folder / PROCESSED).glob(f"*{_BETWEEN}*")
    names = sorted(p.name for p in found if p.is_dir())
    return [n for n in _KNOWN if n in names] + [n for n in names if n not in _KNOWN]


def _ends(path: Path) -> Ends:
    """(source type, relation, target type) of the folder of a relation."""
    ends = split_ends(path.name, _BETWEEN, path)
    for end in (ends[0], ends[2]):
        if not (path.parent / end).is_dir():
            raise BadInput.at(
                path, f"a relation of node type {end!r}",
                f"a folder {PROCESSED}/{end} with its {FEATURES}",
                "add it, or move the relation away",
            )  # fmt: skip
    return ends
