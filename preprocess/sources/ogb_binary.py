"""OGB's layout in arrays: `raw/data.npz`, read in place or decompressed in order."""

from pathlib import Path

from preprocess.errors import BadInput
from preprocess.files.npy import ZipArray, list_members
from preprocess.sources.arrays import ArrayRows, EdgeArray
from preprocess.sources.ogb import OgbSource
from preprocess.sources.source import NODE, RELATION, Ends

_DATA, _LABELS = "data.npz", "node-label.npz"
_INDEX, _LABEL = "edge_index", "node_label"
_COUNTS = ("num_nodes_list", "num_edges_list")
_MAIN = {"node_feat": "x", "edge_feat": "feat"}


class OgbBinarySource(OgbSource):
    """A dataset's folder with arrays in `raw`.  Raises BadInput."""

    layout, marks = "ogb-binary", (f"raw/{_DATA}",)

    def __init__(self, path: Path) -> None:
        data, labels = path / "raw" / _DATA, path / "raw" / _LABELS
        members = list_members(data)
        for name in members:
            if not name.startswith(("node_", "edge_")) and name not in _COUNTS:
                raise BadInput.at(
                    data, f"array {name!r}", "names that begin with node_ or edge_", "take it out"
                )
        num_nodes, num_edges = (_only_number(ZipArray(data, name)) for name in _COUNTS)
        super().__init__(path, {NODE: num_nodes})
        ends: Ends = (NODE, RELATION, NODE)
        edges = EdgeArray(ZipArray(data, _INDEX))
        if edges.num_edges != num_edges:
            raise BadInput.at(
                edges.where, f"{edges.num_edges} edges", f"{num_edges}, as {_COUNTS[1]} says",
                "are they of one graph?",
            )  # fmt: skip
        self.add_edges(ends, edges)
        for name in sorted(members, key=lambda n: (n not in _MAIN, n)):  # the main array first
            if name not in (*_COUNTS, _INDEX):
                of_nodes, array = name.startswith("node_"), ZipArray(data, name)
                count, says = (num_nodes, _COUNTS[0]) if of_nodes else (num_edges, _COUNTS[1])
                rows = ArrayRows(
                    _MAIN.get(name, name[5:]), array, count, f"as {says} says", name not in _MAIN
                )
                self.add_array(NODE if of_nodes else ends, rows)
        if labels.exists():
            array, says = ZipArray(labels, _LABEL), f"as {_COUNTS[0]} says"
            self.add_label(NODE, ArrayRows("label", array, num_nodes, says, single=True))
        self.add_rest(path)


def _only_number(array: ZipArray) -> int:
    array.check(array.size == 1 and array.dtype.kind in "iu", "one integer: one graph",
                "take one graph out of them")  # fmt: skip
    number = int(array.flat().read(0, 1)[0])
    if number < 0:
        raise BadInput.at(array.where, number, "at least 0", "correct it")
    return number
