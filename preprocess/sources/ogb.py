"""What OGB's layouts have in common: notes, and the splits that lie in `split/<name>/`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.arrow import FLAG
from preprocess.files.strided import GivenArray, Placed
from preprocess.files.tables import Table
from preprocess.files.torchfile import kind_of, open_tensor, read_torch
from preprocess.ingest.contents import SPLITS
from preprocess.sources.arrays import ArrayRows, id_rows
from preprocess.sources.source import Rows, Source
from preprocess.sources.text import TextIds

# whose edges OGB's master.csv says to add the inverse of, and the names of their archives
_ADD_INVERSE = ("proteins", "products", "ppa", "ppassoc", "collab", "ddi")
_FOLDER_NAME = re.compile(r"(?:ogb[nl][_-])?(.+?)(?:_(?:pyg|dgl))?")
_RELEASE_NAME = re.compile(r"ogb[nl]-(\w+)")  # in RELEASE_v1.txt
_PAIRS = (("edge",), ("source_node", "target_node"), ("head", "tail"))
_NEGATIVES = "edge_neg"
_OTHER_TYPES = "head_type"  # of pairs of many relations in one list


class OgbSource(Source):
    """A dataset's folder.  Splits of pairs over many relations (ogbl-biokg) are left out."""

    def add_rest(self, folder: Path) -> None:
        """What is found in the same way in all layouts, after nodes and edges."""
        self.check_nodes(folder)
        releases = sorted(folder.glob("RELEASE_v*.txt"))
        self.add_files(*releases)
        self.undirected = not _names(folder, releases).isdisjoint(_ADD_INVERSE)
        root = folder / "split"
        names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        if len(names) > 1:
            raise BadInput.at(
                root, f"splits {' and '.join(names)}", "one", "move the others out of the folder"
            )
        if names:
            self._find_splits(root / names[0])

    def _find_splits(self, folder: Path) -> None:
        whole = folder / "split_dict.pt"
        if whole.is_file():
            self.add_files(whole)
            held = read_torch(whole)
            for split in SPLITS:
                if not isinstance(held, dict) or split not in held:
                    what = f"no {split!r}" if isinstance(held, dict) else f"a {kind_of(held)}"
                    expected = f"a dictionary of {', '.join(SPLITS)}"
                    raise BadInput.at(whole, what, expected, "save it again")
                self._add_loaded(
                    split, whole, f"{whole}: {split}", held[split], len(self.num_nodes)
                )
        elif any((folder / f"{split}.pt").exists() for split in SPLITS):
            for split in SPLITS:
                path = folder / f"{split}.pt"
                self.add_files(path)
                self._add_loaded(split, path, str(path), read_torch(path), 0)
        else:
            self._add_texts(folder)

    def _add_texts(self, folder: Path) -> None:
        types, flags = self.num_nodes, folder / "nodetype-has-split.csv.gz"
        if flags.exists():
            owners = {name: folder / name for name in read_flags(flags, types)}
            self.add_files(flags)
        elif len(types) == 1 and not any(p.is_dir() for p in folder.iterdir()):
            owners = {next(iter(types)): folder}
        else:
            owners = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
            if not owners:
                raise BadInput.at(folder, "no folders", f"some of {', '.join(types)}", "add them")
        for name, owner in owners.items():
            if name not in types:
                expected = f"of {', '.join(types)}"
                raise BadInput.at(owner, f"a split of type {name!r}", expected, "correct its name")
            for split in SPLITS:
                self.add_split(name, TextIds(split, owner / f"{split}.csv.gz", types[name], name))

    def _add_loaded(self, split: str, path: Path, where: str, value: Any, one_list: int) -> None:
        """A list of the only type, if `one_list` is 1, lists by type, or columns of pairs."""
        types, dot = self.num_nodes, "." if where != str(path) else ": "
        if isinstance(value, Placed | GivenArray) and one_list == 1:
            rows = open_tensor(path, where, value, "a tensor")
            self.add_split(next(iter(types)), id_rows(split, rows))
            return
        if not isinstance(value, dict):
            expected = "a dictionary by type" if len(types) > 1 else "a tensor or a dictionary"
            raise BadInput.at(where, f"a {kind_of(value)}", expected, "save it again")
        if value and set(value) <= set(types):
            for name, ids in value.items():
                rows = open_tensor(path, f"{where}{dot}{name}", ids, "a tensor")
                self.add_split(name, id_rows(split, rows))
            return
        if _OTHER_TYPES in value:
            return
        columns = next((c for c in _PAIRS if set(c) <= set(value)), None)
        if columns is None or len(self._edges) != 1:
            keys = ", ".join(map(str, value)) or "nothing"
            expected = f"types of nodes ({', '.join(types)}) or pairs of one relation (edge)"
            raise BadInput.at(where, f"a dictionary of {keys}", expected, "save it again")
        (ends,) = self._edges
        pairs = {split: columns, f"{split}_negative": (_NEGATIVES,)}
        for name, fields in pairs.items():
            if set(fields) <= set(value):
                files = [
                    open_tensor(path, f"{where}{dot}{field}", value[field], "a tensor")
                    for field in fields
                ]
                if len(files) == 1:
                    self.add_split(ends, id_rows(name, files[0], ((2,),)))
                else:
                    src, dst = (id_rows(name, file) for file in files)
                    self.add_split(ends, _pairs(name, src, dst, fields[0]))


def _pairs(name: str, src: ArrayRows, dst: ArrayRows, first: str) -> Rows:
    """Pairs of nodes in two lists, of which the `first` is called so.  Raises BadInput."""
    if dst.form.num_rows != src.form.num_rows:
        raise BadInput.at(
            dst.form.where, f"{dst.form.num_rows} rows", f"{src.form.num_rows} as in {first}",
            "save it again",
        )  # fmt: skip
    dtype = np.result_type(src.form.dtype, dst.form.dtype)
    form = src.form._replace(name=name, dtype=dtype, row_shape=(2,))
    return Rows(form, partial(_stacked, src, dst), src.path)


def _stacked(src: ArrayRows, dst: ArrayRows, count: int) -> Iterator[NDArray[Any]]:
    for ends in zip(src.pieces(count), dst.pieces(count), strict=True):
        yield np.stack(ends, axis=1)


def read_flags(path: Path, types: Mapping[str, int]) -> list[str]:
    """Types that are said to have something: a header of types, one row of truth values."""
    table = Table(path)
    for name in table.names:
        if name not in types:
            raise BadInput.at(
                f"{path}: header", f"node type {name!r}", f"one of {', '.join(types)}", "correct it"
            )
    rows = list(table.arrays(dict.fromkeys(table.names, FLAG), 2))
    if len(rows) != 1 or rows[0][0].size != 1:
        raise BadInput.at(path, "another number of rows", "one", "correct it")
    return [name for name, flag in zip(table.names, rows[0], strict=True) if flag[0]]


def _names(folder: Path, releases: Sequence[Path]) -> set[str]:
    """What the dataset is called, by its folder and by its notes."""
    match = _FOLDER_NAME.fullmatch(folder.resolve().name)
    notes = " ".join(p.read_text(errors="replace") for p in releases)
    return {*([match[1]] if match else []), *_RELEASE_NAME.findall(notes)}
