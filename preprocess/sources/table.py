"""Layouts of CSV and Parquet tables: a user's own, with a schema file, and DGL's CSVDataset.

A schema is `schema.json`, `schema.yaml` or a file of another name.  docs/layouts.md, "CSV and
Parquet tables", has its fields and an example.  Field names are those of GraphStorm's construction
files; other features of these are refused.

DGL's layout is `meta.yaml` and tables of nodes and edges with a header.  Columns are `node_id`, or
`src_id` and `dst_id`, or those named in `meta.yaml`; `label`; truth values `train_mask`,
`val_mask`, `test_mask`; every other column is an array, of numbers or of quoted, comma-separated
numbers; `feat` is the main one.  Ids are integers or texts.  Node i is row i, whereas DGL itself
sorts nodes by their ids.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from preprocess.errors import BadInput
from preprocess.files.tables import Table, is_table
from preprocess.ingest.contents import SPLITS
from preprocess.sources.columns import Columns, EdgeTables, NodeTables, Splits, TableSequence
from preprocess.sources.plain_names import typed_file
from preprocess.sources.sourcefiles import read_description
from preprocess.sources.tabular import TabularSource

_NAMES = ("schema.json", "schema.yaml", "schema.yml")
_SUFFIXES = (".json", ".yaml", ".yml")
_OTHERS = ("meta", "metadata")  # descriptions of DGL's layouts
_PATTERN = "*?["
META = "meta.yaml"
_TYPE, _RELATION = "_V", ("_V", "_E", "_V")  # defaults if meta.yaml names none
_VERSION = "1.0.0"
_LABEL, _MAIN = "label", "feat"
_MASKS = (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask"))


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    separator: str = ""
    header: bool = True


class _Feature(msgspec.Struct, forbid_unknown_fields=True):
    feature_col: str | list[str]
    feature_name: str = ""


class _Label(msgspec.Struct, forbid_unknown_fields=True):
    label_col: str | list[str]
    task_type: str = ""


class _Rows(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    files: str | list[str] = []
    format: str | _Format = ""
    features: list[_Feature] = []
    labels: list[_Label] = []
    split_col: str = ""
    mask_cols: dict[str, str] = {}
    time_col: str = ""


class _Nodes(_Rows, forbid_unknown_fields=True, kw_only=True):
    node_type: str
    node_id_col: str = ""
    id_type: str = ""
    from_edges: bool = False


class _Edges(_Rows, forbid_unknown_fields=True, kw_only=True):
    relation: tuple[str, str, str]
    source_id_col: str
    dest_id_col: str
    weight_col: str = ""


class _Graph(msgspec.Struct, forbid_unknown_fields=True):
    nodes: list[_Nodes]
    edges: list[_Edges]
    version: str = ""
    undirected: bool = False


class TableSource(TabularSource):
    """CSV and Parquet tables with a schema file.  Raises BadInput."""

    layout = "table"

    def __init__(self, path: Path) -> None:
        """`path`: the schema file, or a folder that contains one."""
        schema = path
        if path.is_dir():
            schema = next((path / n for n in _NAMES if (path / n).is_file()), path / _NAMES[0])
        graph = read_description(schema, _Graph)
        self.undirected = graph.undirected
        nodes = [self._node(schema, f"nodes[{i}]", n) for i, n in enumerate(graph.nodes)]
        edges = [self._edge(schema, f"edges[{i}]", e) for i, e in enumerate(graph.edges)]
        super().__init__(schema, nodes, edges, [schema])

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A schema file, or a folder with `schema.json` or `schema.yaml` and without npy files."""
        if path.is_dir():
            if typed_file(path) is not None:
                return None
            name = next((n for n in _NAMES if (path / n).is_file()), None)
            return f"{name}, a schema of tables" if name else None
        is_schema = path.is_file() and path.suffix in _SUFFIXES and path.stem not in _OTHERS
        return f"{path.name}, a schema of tables" if is_schema else None

    def _node(self, schema: Path, place: str, node: _Nodes) -> NodeTables:
        where = f"{schema}: {place}"
        if node.from_edges:
            given = [n for n in ("files", "node_id_col", "features", "labels", "split_col",
                                 "mask_cols", "time_col") if getattr(node, n)]  # fmt: skip
            if given:
                raise BadInput.at(
                    where, f"from_edges and {given[0]}", "one of them",
                    "nodes that only edges name have no table",
                )  # fmt: skip
            return NodeTables(node.node_type, None, kind=_id_kind(where, node.id_type))
        features = _features(node)
        if node.time_col:
            features.append(Columns("time", (node.time_col,)))
        return NodeTables(
            node.node_type, _tables(schema, where, node), node.node_id_col,
            _id_kind(where, node.id_type), tuple(features), _label(where, node),
            _splits(where, node),
        )  # fmt: skip

    def _edge(self, schema: Path, place: str, edge: _Edges) -> EdgeTables:
        where = f"{schema}: {place}"
        features, label = _features(edge), _label(where, edge)
        for name, column in (("weight", edge.weight_col), ("time", edge.time_col)):
            if column:
                features.append(Columns(name, (column,)))
        if label is not None:
            features.append(label)
        return EdgeTables(
            *edge.relation, _tables(schema, where, edge), edge.source_id_col, edge.dest_id_col,
            tuple(features), _splits(where, edge),
        )  # fmt: skip


def _tables(schema: Path, where: str, rows: _Rows) -> TableSequence:
    form = _Format(rows.format) if isinstance(rows.format, str) else rows.format
    patterns = [rows.files] if isinstance(rows.files, str) else rows.files
    if not patterns:
        raise BadInput.at(where, "no files", "one at least", "name the files")
    paths = [p for pattern in patterns for p in _matches(schema.parent, where, pattern)]
    tables = [Table(p, form.name, form.separator, form.header) for p in paths]
    return TableSequence(tables, f"correct {where}")


def _matches(folder: Path, where: str, pattern: str) -> Sequence[Path]:
    """Files that match a pattern, sorted by name; a folder stands for the tables in it."""
    path = folder / pattern
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if is_table(p))
    elif any(c in pattern for c in _PATTERN) and not path.exists():
        anchor = Path(pattern).anchor
        base, relative = (Path(anchor) if anchor else folder), pattern.removeprefix(anchor)
        found = sorted(p for p in base.glob(relative) if p.is_file())
    else:
        return [path]
    if not found:
        raise BadInput.at(where, f"no file for {pattern!r}", "one at least", "is the path right?")
    return found


def _features(rows: _Rows) -> list[Columns]:
    found = []
    for f in rows.features:
        columns = (f.feature_col,) if isinstance(f.feature_col, str) else tuple(f.feature_col)
        found.append(Columns(f.feature_name or columns[0], columns))
    return found


def _label(where: str, rows: _Rows) -> Columns | None:
    if len(rows.labels) > 1:
        raise BadInput.at(
            where, f"{len(rows.labels)} labels", "one at most", "list the others as features"
        )
    if not rows.labels:
        return None
    column = rows.labels[0].label_col
    return Columns("label", (column,) if isinstance(column, str) else tuple(column))


def _splits(where: str, rows: _Rows) -> Splits:
    unknown = [name for name in rows.mask_cols if name not in SPLITS]
    if unknown or (rows.split_col and rows.mask_cols):
        found = f"mask_cols of {unknown[0]!r}" if unknown else "split_col and mask_cols"
        raise BadInput.at(where, found, f"split_col, or mask_cols of {', '.join(SPLITS)}", "choose")
    return Splits(rows.split_col, tuple(rows.mask_cols.items()))


def _id_kind(where: str, kind: str) -> str:
    if kind not in ("", "integer", "text"):
        raise BadInput.at(where, f"id_type {kind!r}", "integer or text", "correct it")
    return kind


class _DglNodes(msgspec.Struct):
    file_name: str
    ntype: str = _TYPE
    graph_id_field: str = "graph_id"
    node_id_field: str = "node_id"


class _DglEdges(msgspec.Struct):
    file_name: str
    etype: tuple[str, str, str] = _RELATION
    graph_id_field: str = "graph_id"
    src_id_field: str = "src_id"
    dst_id_field: str = "dst_id"


class _Meta(msgspec.Struct):
    node_data: list[_DglNodes]
    edge_data: list[_DglEdges]
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
        nodes = [_dgl_node(path, meta.separator, n) for n in meta.node_data]
        edges = [_dgl_edge(path, meta.separator, e) for e in meta.edge_data]
        super().__init__(path, nodes, edges, [described])


def _dgl_node(folder: Path, separator: str, node: _DglNodes) -> NodeTables:
    tables = _dgl_tables(folder, separator, node.file_name)
    others = _others(tables, node.graph_id_field, (node.node_id_field,))
    label = Columns(_LABEL, (_LABEL,)) if _LABEL in others else None
    features = tuple(_array(name) for name in others if name != _LABEL)
    return NodeTables(
        node.ntype, tables, node.node_id_field, "", features, label, _dgl_masks(tables)
    )


def _dgl_edge(folder: Path, separator: str, edge: _DglEdges) -> EdgeTables:
    tables = _dgl_tables(folder, separator, edge.file_name)
    others = _others(tables, edge.graph_id_field, (edge.src_id_field, edge.dst_id_field))
    features = tuple(_array(name) for name in others)
    return EdgeTables(
        *edge.etype, tables, edge.src_id_field, edge.dst_id_field, features, _dgl_masks(tables)
    )


def _dgl_tables(folder: Path, separator: str, name: str) -> TableSequence:
    return TableSequence([Table(folder / name, "csv", separator)], f"correct {META}, or the header")


def _others(tables: TableSequence, graph: str, ids: tuple[str, ...]) -> list[str]:
    """Columns that become arrays.  Those without a name are row numbers written by pandas."""
    if graph in tables.names:
        raise BadInput.at(
            f"{tables.where}: header", f"a column {graph!r}, of many graphs", "one graph",
            "remove the column",
        )  # fmt: skip
    taken = {"", *ids, *(mask for _, mask in _MASKS)}
    return [n for n in tables.names if n not in taken and not n.startswith("Unnamed")]


def _array(name: str) -> Columns:
    return Columns("x" if name == _MAIN else name, (name,))


def _dgl_masks(tables: TableSequence) -> Splits:
    return Splits(masks=tuple(m for m in _MASKS if m[1] in tables.names))
