"""The layout of Ginex and AGNES: a CSC matrix, features and labels without headers, `conf.json`."""

from pathlib import Path

import msgspec
import numpy as np

from preprocess.errors import BadInput
from preprocess.files.npy import RawFile
from preprocess.sources.arrays import ArrayRows, CompressedEdges, read_dict, torch_ids
from preprocess.sources.source import NODE, RELATION, Source
from preprocess.sources.sourcefiles import read_description

CONF, SPLITS = "conf.json", "split_idx.pth"


class _Conf(msgspec.Struct):
    num_nodes: int
    indptr_shape: tuple[int, ...]
    indptr_dtype: str
    indices_shape: tuple[int, ...]
    indices_dtype: str
    features_shape: tuple[int, ...]
    features_dtype: str
    labels_shape: tuple[int, ...]
    labels_dtype: str


class GinexSource(Source):
    """A folder that Ginex's `prepare_dataset.py` wrote.  Raises BadInput."""

    layout, marks = "ginex", (CONF, "indptr.dat")

    def __init__(self, path: Path) -> None:
        conf = read_description(path / CONF, _Conf)
        num_nodes = conf.num_nodes
        super().__init__(path, {NODE: num_nodes})
        indptr = _open(path, conf, "indptr", "iu", num_nodes + 1)
        edges = CompressedEdges(
            indptr, _open(path, conf, "indices", "iu", None), 1, str(path / CONF)
        )
        edges.check_ends()
        self.add_files(path / CONF, indptr.path)
        self.add_edges((NODE, RELATION, NODE), edges)
        self.add_array(NODE, ArrayRows("x", _open(path, conf, "features", "biuf", num_nodes)))
        labels = _open(path, conf, "labels", "biuf", num_nodes)
        self.add_label(NODE, ArrayRows("label", labels, single=True))
        self.check_nodes(path / CONF)
        if (path / SPLITS).exists():
            self.add_files(path / SPLITS)
            held = read_dict(path / SPLITS)
            for name in ("train", "valid", "test"):
                if held.get(name) is not None:
                    self.add_split(NODE, torch_ids(name, path / SPLITS, name, held))


def _open(folder: Path, conf: _Conf, name: str, kinds: str, rows: int | None) -> RawFile:
    """Open an array of `rows` rows; None: a list of any length."""
    shape: tuple[int, ...] = getattr(conf, f"{name}_shape")
    text: str = getattr(conf, f"{name}_dtype")
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in kinds:
        raise BadInput.at(
            f"{folder / CONF}: {name}_dtype", repr(text),
            "integers" if kinds == "iu" else "numbers", "correct it",
        )  # fmt: skip
    maximum = 1 if kinds == "iu" else 2
    fits = 1 <= len(shape) <= maximum and min(shape) >= 0 and 0 not in shape[1:]
    if not fits or (rows is not None and shape[0] != rows):
        expected = f"{'any length' if rows is None else rows}, of {maximum} dimensions at most"
        raise BadInput.at(
            f"{folder / CONF}: {name}_shape", list(shape), expected,
            f"num_nodes is {conf.num_nodes}",
        )  # fmt: skip
    return RawFile(folder / f"{name}.dat", dtype, shape)
