"""The layout of GraphSAINT: `adj_full.npz`, `feats.npy`, `class_map.json`, `role.json`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.npy import NpyFile
from preprocess.ingest.prepare import Preparation
from preprocess.pipeline.stage import Facts
from preprocess.sources.arrays import ArrayRows, MadeRows
from preprocess.sources.jsontext import read_entries, read_lists
from preprocess.sources.scipy_npz import open_matrix
from preprocess.sources.source import NODE, RELATION, Source, SourceRows

ADJACENCY, FEATURES, CLASSES, ROLES = "adj_full.npz", "feats.npy", "class_map.json", "role.json"
_SPLITS = {"tr": "train", "va": "valid", "te": "test"}
_MIN_WINDOW = 1 << 16  # nodes

_Class = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
_Flags = list[Annotated[int, msgspec.Meta(ge=-128, le=127)]]


class GraphSaintSource(Source):
    """A `Source` that is `Preparable`: JSON becomes arrays, a window of the nodes at a time."""

    layout, marks = "graphsaint", (ADJACENCY, ROLES)

    def __init__(self, path: Path) -> None:
        num_nodes, edges = open_matrix(path / ADJACENCY)
        super().__init__(path, {NODE: num_nodes})
        says = f"one a node of {ADJACENCY}"
        self.add_array(NODE, ArrayRows("x", NpyFile(path / FEATURES), num_nodes, says))
        self._classes, self._roles = path / CLASSES, path / ROLES
        if not self._roles.is_file():
            raise BadInput.at(self._roles, "no file: it is missing", "a JSON file", "add it")
        self.check_nodes(path / ADJACENCY)
        self.add_edges((NODE, RELATION, NODE), edges)
        self.add_files(self._classes, self._roles)
        self._kind, form = self._label_form()
        self._label = MadeRows(form)
        self.add_label(NODE, self._label)

    def prepare(self, preparation: Preparation) -> None:
        """Labels and splits as arrays: passes over the JSON, memory a share of what there is."""
        self._label.made = preparation.folder / "labels"
        window = max(_MIN_WINDOW, preparation.mem_bytes // 8 // self._label.form.row_bytes)
        preparation.record("labels", partial(self._write_labels, window), lambda _: ["labels"])
        counts = preparation.record(
            "splits", partial(self._write_splits, preparation.folder), lambda facts: facts
        )
        self._splits.clear()
        for name, count in counts.items():
            where = f"{self._roles}: {next(k for k, v in _SPLITS.items() if v == name)}"
            form = SourceRows(name, np.dtype(np.int64), (), count, "dense", where)
            self.add_split(NODE, MadeRows(form, preparation.folder / name))

    def _label_form(self) -> tuple[Any, SourceRows]:
        """The type of a value, and what labels become: the first entry says it."""
        _, entries = next(read_entries(self._classes, int | list[int]))
        first: Any = next(iter(entries.values()), 0)
        is_row = isinstance(first, list)
        dtype = np.dtype(np.int8 if is_row else np.int64)
        shape = (len(first),) if is_row else ()
        rows = SourceRows("label", dtype, shape, self.num_nodes[NODE], "dense", str(self._classes))
        return _Flags if is_row else _Class, rows

    def _write_labels(self, window: int) -> Facts:
        """All labels to a file, -1 where a node has none: one pass for `window` nodes."""

        def fill(first: int, labels: NDArray[Any]) -> None:
            for place, entries in read_entries(self._classes, self._kind):
                ids = np.fromiter(entries, np.int64, len(entries))
                self._check(place, ids, entries)
                here = (ids >= first) & (ids < first + labels.shape[0])
                if here.any():
                    values = np.array(list(entries.values()), labels.dtype)
                    labels[ids[here] - first] = values[here]

        return self._label.write(window, -1, fill)

    def _check(self, place: str, ids: NDArray[np.int64], entries: dict[int, Any]) -> None:
        """Nodes are there, and rows are of one width.  Raises BadInput."""
        num_nodes = self.num_nodes[NODE]
        if ids.size and int(ids.max()) >= num_nodes:
            raise BadInput.at(
                place, f'"{ids.max()}"', f"nodes 0 to {num_nodes - 1}",
                f"{ADJACENCY} has {num_nodes} nodes",
            )  # fmt: skip
        for width in self._label.form.row_shape:
            bad = next((n for n, values in entries.items() if len(values) != width), None)
            if bad is not None:
                raise BadInput.at(
                    place, f'{len(entries[bad])} labels of "{bad}"', f"{width}, as the first has",
                    "write the file again",
                )  # fmt: skip

    def _write_splits(self, folder: Path) -> Facts:
        """A file of ids for each split; how many there are."""
        counts: dict[str, int] = {}
        for name in _SPLITS.values():
            (folder / name).unlink(missing_ok=True)
        for key, ids in read_lists(self._roles):
            if key not in _SPLITS or (not ids.size and _SPLITS[key] in counts):
                raise BadInput.at(
                    f"{self._roles}: {key}", "this list", "tr, va and te, each once", "correct it"
                )
            with ArrayFile(folder / _SPLITS[key], np.int64) as out:
                out.append(ids)
                counts[_SPLITS[key]] = out.size
        missing = next((key for key, name in _SPLITS.items() if name not in counts), None)
        if missing is not None:
            raise BadInput.at(self._roles, f"no list {missing!r}", "tr, va and te", "add it")
        return {name: counts[name] for name in _SPLITS.values()}
