"""OGB's layout in text: packed csv files without a header, of a graph of one type or of several.

docs/layouts.md lists them.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from preprocess.errors import BadInput
from preprocess.files.arrow import INTEGER
from preprocess.files.tables import Table
from preprocess.sources.ogb import OgbSource, read_flags
from preprocess.sources.source import NODE, RELATION, Ends, Owner
from preprocess.sources.text import TextEdges, TextRows

_SUFFIX = ".csv.gz"
_EDGE, _NODES, _EDGES = "edge.csv.gz", "num-node-list.csv.gz", "num-edge-list.csv.gz"
_TYPES, _TRIPLETS = "num-node-dict.csv.gz", "triplet-type-list.csv.gz"
_LABEL, _HAS_LABEL = "node-label.csv.gz", "nodetype-has-label.csv.gz"
_SPECIES = "species.csv.gz"  # what ogbn-proteins calls node_species.csv.gz
_FLOAT64 = np.dtype(np.float64)  # of labels: NaN where there is none
_SOME = 1000  # relations


class OgbCsvSource(OgbSource):
    """A dataset's folder with text in `raw`.  Raises BadInput."""

    layout = "ogb-csv"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with the edges and the number of nodes in `raw`, or the types and relations."""
        for names in ((_EDGE, _NODES), (_TRIPLETS, _TYPES)):
            found = [f"raw/{name}" for name in names if (path / "raw" / name).is_file()]
            if found:
                return " and ".join(found)
        return None

    def __init__(self, path: Path) -> None:
        raw = path / "raw"
        if not raw.is_dir():
            what = "no folder raw" if path.is_dir() else "no folder"
            raise BadInput.at(path, what, "a dataset of OGB", "is the path right?")
        super().__init__(path)
        if (raw / _TYPES).exists() or (raw / _TRIPLETS).exists():
            self._add_several(raw)
        else:
            (num_nodes,) = _only_row(Table(raw / _NODES, header=False))
            self.add_files(raw / _NODES)
            self._add_type(NODE, num_nodes, raw, _NODES, raw / _LABEL, (raw / _LABEL).exists())
            self._add_relation(raw, (NODE, RELATION, NODE))
        self.add_rest(path)

    def _add_several(self, raw: Path) -> None:
        counts = Table(raw / _TYPES)
        num_nodes = dict(zip(counts.names, _only_row(counts), strict=True))
        self.add_files(raw / _TYPES, raw / _TRIPLETS)
        flags = raw / _HAS_LABEL
        labels = {name: raw / "node-label" / name / _LABEL for name in num_nodes}
        if flags.exists():
            self.add_files(flags)
            labelled = read_flags(flags, num_nodes)
        else:
            labelled = [name for name, label in labels.items() if label.exists()]
        for name, count in num_nodes.items():
            folder, has_label = raw / "node-feat" / name, name in labelled and count > 0
            self._add_type(name, count, folder, _TYPES, labels[name], has_label)
        for ends in _triplets(Table(raw / _TRIPLETS, header=False), num_nodes):
            self._add_relation(raw / "relations" / "___".join(ends), ends)

    def _add_type(
        self, name: str, count: int, folder: Path, says: str, label: Path, has_label: bool
    ) -> None:
        self.num_nodes[name] = count
        self._add_arrays(name, folder, "node", count, says)
        if has_label:
            self.add_label(name, TextRows("label", label, count, says, dtype=_FLOAT64))

    def _add_relation(self, folder: Path, ends: Ends) -> None:
        (num_edges,) = _only_row(Table(folder / _EDGES, header=False))
        self.add_files(folder / _EDGES)
        self.add_edges(ends, TextEdges(folder / _EDGE, num_edges, _EDGES))
        self._add_arrays(ends, folder, "edge", num_edges, _EDGES)

    def _add_arrays(self, owner: Owner, folder: Path, kind: str, num_rows: int, says: str) -> None:
        """`<kind>-feat` and each `<kind>_<name>` of a folder."""
        if num_rows == 0:
            return
        main = folder / f"{kind}-feat{_SUFFIX}"
        if main.exists():
            name = "x" if kind == "node" else "feat"
            self.add_array(owner, TextRows(name, main, num_rows, says, main=True))
        paths = {
            path.name.removesuffix(_SUFFIX).removeprefix(f"{kind}_"): path
            for path in sorted(folder.glob(f"{kind}_*{_SUFFIX}"))
        }
        if kind == "node" and (folder / _SPECIES).exists():
            paths.setdefault("species", folder / _SPECIES)
        for name, path in paths.items():
            self.add_array(owner, TextRows(name, path, num_rows, says))


def _triplets(table: Table, types: Mapping[str, int]) -> list[Ends]:
    if len(table.names) != 3:
        raise BadInput.at(
            f"{table.path}:1", f"{len(table.names)} columns",
            "3: source type, relation, target type", "correct it",
        )  # fmt: skip
    found: list[Ends] = []
    columns = [
        [texts.at(i) for texts in table.texts(name, _SOME) for i in range(len(texts))]
        for name in table.names
    ]
    for row, (src, name, dst) in enumerate(zip(*columns, strict=True)):
        for end in (src, dst):
            if end not in types:
                raise BadInput.at(
                    table.place(row), f"node type {end!r}", f"one of {', '.join(types)}",
                    f"{_TYPES} lists the types",
                )  # fmt: skip
        if (src, name, dst) in found:
            raise BadInput.at(
                table.place(row), f"relation {src},{name},{dst} again", "each once", "drop the line"
            )
        found.append((src, name, dst))
    return found


def _only_row(table: Table) -> list[int]:
    """Numbers of nodes or edges, of one graph."""
    rows = table.arrays(dict.fromkeys(table.names, INTEGER), 2)
    first = next(rows, None)
    if first is None:
        raise BadInput.at(table.path, "no numbers", "one row of them", "copy it again")
    if first[0].size > 1 or next(rows, None) is not None:
        raise BadInput.at(
            table.path, "several rows, a graph each", "one graph", "take one graph out of them"
        )
    numbers = [int(column[0]) for column in first]
    if min(numbers) < 0:
        raise BadInput.at(table.place(0), min(numbers), "at least 0", "correct it")
    return numbers
