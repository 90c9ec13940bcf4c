"""The layout of DGL's CSVDataset: `meta.yaml` and tables of nodes and edges with a header.

Columns `node_id`, or `src_id` and `dst_id`, or those that `meta.yaml` names; `label`; truth values
`train_mask`, `val_mask`, `test_mask`; every other column is an array, of numbers or of numbers
between commas in quotes; `feat` is the main one.  Ids are integers or texts.  Node i is row i: DGL
itself sorts nodes by their ids.
"""

from pathlib import Path

import msgspec

from preprocess.errors import BadInput
from preprocess.files.tables import Table
from preprocess.sources.columns import Columns, EdgeTables, NodeTables, Splits, TableSequence
from preprocess.sources.sourcefiles import read_description
from preprocess.sources.tabular import TabularSource

META = "meta.yaml"
_TYPE, _RELATION = "_V", ("_V", "_E", "_V")  # where meta.yaml names none
_VERSION = "1.0.0"
_LABEL, _MAIN = "label", "feat"
_MASKS = (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask"))


class _Nodes(msgspec.Struct):
    file_name: str
    ntype: str = _TYPE
    graph_id_field: str = "graph_id"
    node_id_field: str = "node_id"


class _Edges(msgspec.Struct):
    file_name: str
    etype: tuple[str, str, str] = _RELATION
    graph_id_field: str = "graph_id"
    src_id_field: str = "src_id"
    dst_id_field: str = "dst_id"


class _Meta(msgspec.Struct):
    node_data: list[_Nodes]
    edge_data: list[_Edges]
    dataset_name: str = ""
    version: str = _VERSION
    separator: str = ","
    graph_data: msgspec.Raw | dict[str, str] | None = None


class DglCsvSource(TabularSource):
    """A folder of DGL's CSVDataset, with one graph.  Raises BadInput."""

    layout, marks = "dgl-csv", (META,)

    def __init__(self, path: Path) -> None:
        described = path / META
        meta = read_description(described, _Meta)
        if meta.version != _VERSION:
            raise BadInput.at(
                described, f"version {meta.version!r}", _VERSION, "is it of CSVDataset?"
            )
        if meta.graph_data is not None:
            raise BadInput.at(
                described, "graph_data, for many graphs", "one graph", "join the graphs"
            )
        nodes = [_node(path, meta.separator, n) for n in meta.node_data]
        edges = [_edge(path, meta.separator, e) for e in meta.edge_data]
        super().__init__(path, nodes, edges, [described])


def _node(folder: Path, separator: str, node: _Nodes) -> NodeTables:
    tables = _tables(folder, separator, node.file_name)
    others = _others(tables, node.graph_id_field, (node.node_id_field,))
    label = Columns(_LABEL, (_LABEL,)) if _LABEL in others else None
    features = tuple(_array(name) for name in others if name != _LABEL)
    return NodeTables(node.ntype, tables, node.node_id_field, "", features, label, _splits(tables))


def _edge(folder: Path, separator: str, edge: _Edges) -> EdgeTables:
    tables = _tables(folder, separator, edge.file_name)
    others = _others(tables, edge.graph_id_field, (edge.src_id_field, edge.dst_id_field))
    features = tuple(_array(name) for name in others)
    return EdgeTables(
        *edge.etype, tables, edge.src_id_field, edge.dst_id_field, features, _splits(tables)
    )


def _tables(folder: Path, separator: str, name: str) -> TableSequence:
    return TableSequence([Table(folder / name, "csv", separator)], f"correct {META}, or the header")


def _others(tables: TableSequence, graph: str, ids: tuple[str, ...]) -> list[str]:
    """Columns that become arrays; those without a name are what pandas writes for row numbers."""
    if graph in tables.names:
        raise BadInput.at(
            f"{tables.where}: header", f"a column {graph!r}, of many graphs", "one graph",
            "remove the column",
        )  # fmt: skip
    taken = {"", *ids, *(mask for _, mask in _MASKS)}
    return [n for n in tables.names if n not in taken and not n.startswith("Unnamed")]


def _array(name: str) -> Columns:
    return Columns("x" if name == _MAIN else name, (name,))


def _splits(tables: TableSequence) -> Splits:
    return Splits(masks=tuple(m for m in _MASKS if m[1] in tables.names))
