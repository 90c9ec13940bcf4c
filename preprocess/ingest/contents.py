"""The arrays and graphs of a store, planned from a source's headers and the options.  Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from blockstore.format import (
    ITEM_BYTES,
    TIME_DTYPE,
    WEIGHT_DTYPE,
    EdgeLayout,
    RowArray,
    id_bits,
    row_geometry,
)
from preprocess.errors import BadInput
from preprocess.ingest.options import IngestOptions
from preprocess.sources.source import Source, SourceRelation, SourceRows
from preprocess.stages.csc import Widths

WEIGHT, TIME = "weight", "time"  # edge arrays that lie inside graph blocks
SPLITS = ("train", "valid", "test")
_MAX_PART_BYTES, _MAX_SHOWN = 240, 40  # file systems allow 255
_EDGE_BYTES = 16  # assumed for an edge if the source's file has no size


class ArrayContent(NamedTuple):
    """An array of the source, and the array of the store that it becomes."""

    source: SourceRows
    array: RowArray

    @property
    def is_stored(self) -> bool:
        """Whether the rows come from a store, in its stored form."""
        return self.source.stored is not None


@dataclass(frozen=True, slots=True)
class TypeContents:
    name: str
    first: int  # store id of its first node
    num_nodes: int
    original_id: RowArray
    store_id: RowArray
    features: tuple[ArrayContent, ...]
    label: ArrayContent | None  # its dtype may change after the labels have been read
    splits: tuple[ArrayContent, ...]

    @property
    def stop(self) -> int:
        return self.first + self.num_nodes

    @property
    def partition_path(self) -> str:
        """Path of the side array of partition offsets."""
        return f"nodes/{as_path(self.name)}/partition_offsets"


@dataclass(frozen=True, slots=True)
class RelationContents:
    source: SourceRelation
    src: TypeContents
    dst: TypeContents
    undirected: bool  # whether reverse edges are added to this relation
    keep_loops: bool
    widths: Widths  # of ids while edges are sorted: with edge ids if edge arrays need them
    edge_id_dtype: str | None  # of edge ids in the store
    weight: SourceRows | None
    time: SourceRows | None
    features: tuple[ArrayContent, ...]
    splits: tuple[ArrayContent, ...]
    reverse_of: str
    ids: SourceRows | None = None  # edge ids, if they are not the positions of the edges

    @property
    def path(self) -> str:
        """Path of its folder in the store."""
        return relation_path(self.source)

    @property
    def max_edges(self) -> int:
        return self.source.num_edges * (2 if self.undirected else 1)

    @property
    def source_bytes(self) -> int:
        """Bytes of one read of all its edges."""
        path = Path(self.source.where)
        size = path.stat().st_size if path.is_file() else 0
        return size or _EDGE_BYTES * self.source.num_edges

    @property
    def place_dtype(self) -> str:
        """Dtype of the positions of edges in block order."""
        return place_dtype(self.max_edges)

    @property
    def layout(self) -> EdgeLayout:
        """Layout of the edges in its graph blocks."""
        return EdgeLayout(
            self.widths.node,
            id_bits(self.src.num_nodes),
            self.src.first,
            ITEM_BYTES[self.edge_id_dtype] if self.edge_id_dtype else 0,
            ITEM_BYTES[WEIGHT_DTYPE] if self.weight else 0,
            ITEM_BYTES[TIME_DTYPE] if self.time else 0,
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of an edge in arrays, before it is packed."""
        return ITEM_BYTES[self.widths.node] + sum(self.layout.bits[1:]) // 8

    @property
    def inline(self) -> tuple[SourceRows, ...]:
        """Edge arrays that lie inside the blocks."""
        return tuple(r for r in (self.ids, self.weight, self.time) if r is not None)

    @property
    def has_rows(self) -> bool:
        return bool(self.inline or self.features)


@dataclass(frozen=True, slots=True)
class Contents:
    id_dtype: str
    types: tuple[TypeContents, ...]
    relations: tuple[RelationContents, ...]

    @property
    def num_nodes(self) -> int:
        return sum(t.num_nodes for t in self.types)

    @property
    def max_edges(self) -> int:
        return sum(r.max_edges for r in self.relations)

    @property
    def column_item_bytes(self) -> int:
        """Bytes of an edge in columns in memory; those of a single relation also hold edge ids."""
        return self.relations[0].widths.key_bytes - 4 if len(self.relations) == 1 else 4

    def columns_fit(self, share: int) -> bool:
        """Whether the columns that decide the node order fit in memory, in a third of `share`."""
        return self.column_item_bytes * self.max_edges <= share // 3

    @property
    def reads_columns(self) -> bool:
        """Whether the graph is made of the columns on disk; otherwise the source is read again."""
        return len(self.relations) == 1 and not self.relations[0].widths.edge

    def rows(self) -> list[ArrayContent]:
        """Every array that comes from the source, except those inside graph blocks."""
        found: list[ArrayContent] = []
        for t in self.types:
            found += [*t.features, *([t.label] if t.label else []), *t.splits]
        for r in self.relations:
            found += [*r.features, *r.splits]
        return found

    def row_arrays(self) -> list[RowArray]:
        """Every row array of the store."""
        ids = [a for t in self.types for a in (t.original_id, t.store_id)]
        return [*ids, *(r.array for r in self.rows())]


def list_contents(source: Source, options: IngestOptions) -> Contents:
    """The contents of the store for `source`.  Raises BadInput: something no store can hold."""
    total = sum(source.num_nodes.values())
    node = options.node_dtype(total)
    types: dict[str, TypeContents] = {}
    first = 0
    for name, num_nodes in source.num_nodes.items():
        types[name] = _type_contents(source, name, first, num_nodes, node, options)
        first += num_nodes
    relations = tuple(
        _relation_contents(source, r, types, node, total, options) for r in source.relations
    )
    contents = Contents(node, tuple(types.values()), relations)
    paths = [r.path for r in relations] + [a.path for a in contents.row_arrays()]
    twice = next((p for p, count in Counter(paths).items() if count > 1), None)
    if twice is not None:
        raise BadInput.at(source.where, f"two of {twice}", "names that differ", "rename one")
    return contents


def check_left_out(source: Source, options: IngestOptions) -> None:
    """Raises BadInput if a split to be left out does not exist."""
    rows = [r for name in source.num_nodes for r in source.splits(name)]
    rows += [r for relation in source.relations for r in source.edge_splits(relation)]
    names = list(dict.fromkeys(r.name for r in rows))
    for name in options.leave_out:
        if name not in names:
            held = ", ".join(names) or "nothing: it has no splits"
            raise BadInput.at("--leave-out", repr(name), held, "name a split of the source")


def row_disk_bytes(array: RowArray, block_bytes: int) -> int:
    """Bytes of the shards of a row array, and of its checksums."""
    geometry = row_geometry(array, block_bytes)
    return geometry.num_blocks * geometry.slot_bytes * 1025 // 1024


def graph_bytes(relation: RelationContents, options: IngestOptions) -> int:
    """Bytes of a relation's blocks, with headers and unused space."""
    size = relation.max_edges * sum(relation.layout.bits) // 8 + 4 * relation.dst.num_nodes
    return size + size // 64 + options.block_bytes


def as_path(name: str) -> str:
    """A name as part of a path in a store: characters unsafe in files or Zarr become %xx.

    Raises BadInput: it is too long for a file system.
    """
    quoted = quote(name, safe=" -_.+~:,()=@")
    quoted = quoted if quoted.strip(".") else quoted.replace(".", "%2E")
    check_length(quoted)
    return quoted


def check_length(part: str) -> None:
    """Raises BadInput if part of a path, with its suffixes, is longer than file systems allow."""
    if len(part) > _MAX_PART_BYTES:
        raise BadInput.at(
            f"name {part[:_MAX_SHOWN]}...", f"{len(part)} bytes where it is part of a path",
            f"{_MAX_PART_BYTES} at most", "give the type, relation or array a shorter name",
        )  # fmt: skip


def relation_path(relation: SourceRelation) -> str:
    """Path of a relation's folder in a store."""
    part = "___".join(as_path(n) for n in (relation.src, relation.name, relation.dst))
    check_length(part)
    return f"edges/{part}"


def split_sizes(shares: Sequence[float], total: int) -> list[tuple[int, int]]:
    """The range (first, stop) of each split among `total` places."""
    ends = [0]
    for share in shares:
        ends.append(min(total, ends[-1] + round(share * total)))
    if sum(shares) > 1 - 1e-9:  # rounding must not leave any place out
        ends[-1] = total
    return list(pairwise(ends))


def _type_contents(
    source: Source, name: str, first: int, num_nodes: int, node: str, options: IngestOptions
) -> TypeContents:
    path = f"nodes/{as_path(name)}"
    label = source.label(name)
    label_rows = None
    if label is not None:
        dtype = "int64" if label.dtype.kind == "f" else _plain_dtype(label)
        label_rows = ArrayContent(label, _row_array(f"{path}/label", label, dtype))
    features = _features(path, source.features(name), options)
    for rows in (*features, *([label_rows] if label_rows else [])):
        _check_rows(rows.source, num_nodes, f"one a node of type {name}")
    splits = _splits(path, source.splits(name), options)
    ids = [RowArray(f"{path}/{kind}", node, num_nodes) for kind in ("original_id", "store_id")]
    return TypeContents(name, first, num_nodes, ids[0], ids[1], features, label_rows, splits)


def _features(
    path: str, rows: Iterable[SourceRows], options: IngestOptions
) -> tuple[ArrayContent, ...]:
    """Floats and the main array are cast to the dtype of the options; other numbers stay."""
    found = []
    for r in rows:
        dtype = options.dtype if r.dtype.kind == "f" or r.name == "x" else _plain_dtype(r)
        found.append(ArrayContent(r, _row_array(f"{path}/features/{as_path(r.name)}", r, dtype)))
    return tuple(found)


def _splits(
    path: str, rows: Iterable[SourceRows], options: IngestOptions
) -> tuple[ArrayContent, ...]:
    return tuple(
        ArrayContent(r, _row_array(f"{path}/splits/{as_path(r.name)}", r, "int64"))
        for r in rows
        if r.name not in options.leave_out
    )


def _relation_contents(
    source: Source,
    relation: SourceRelation,
    types: dict[str, TypeContents],
    node: str,
    num_nodes: int,
    options: IngestOptions,
) -> RelationContents:
    same = relation.src == relation.dst
    path = relation_path(relation)
    held = {r.name: r for r in source.edge_rows(relation)}
    for r in held.values():
        _check_rows(r, relation.num_edges, f"one an edge of {relation.where}")
    weight, time = held.pop(WEIGHT, None), held.pop(TIME, None)
    for inline, kinds, wanted in ((weight, "biuf", "one number"), (time, "iu", "one integer")):
        if inline and (inline.row_shape not in ((), (1,)) or inline.dtype.kind not in kinds):
            raise BadInput.at(
                inline.where, f"{inline.dtype} of shape {inline.row_shape}", f"{wanted} an edge",
                f"a {inline.name} guides sampling: give other edge arrays another name",
            )  # fmt: skip
    features = _features(path, held.values(), options)
    guides = bool(weight or time or features)
    sorting = edge_id_dtype(relation.num_edges, options.edge_ids or guides)
    return RelationContents(
        source=relation,
        src=types[relation.src],
        dst=types[relation.dst],
        undirected=options.undirected and same,
        keep_loops=options.self_loops == "keep" or not same,
        widths=Widths.of(node, num_nodes, sorting, relation.num_edges),
        edge_id_dtype=edge_id_dtype(relation.num_edges, options.edge_ids),
        weight=weight,
        time=time,
        features=features,
        splits=_splits(path, source.edge_splits(relation), options),
        reverse_of=source.reverse_of(relation),
    )


def place_dtype(num_edges: int) -> str:
    """Dtype of positions of edges; the largest number means that an edge is not stored."""
    return "uint32" if num_edges < 2**32 - 1 else "uint64"


def edge_id_dtype(num_edges: int, kept: bool) -> str | None:
    """Dtype of edge ids; added reverses have ids up to twice the number of edges."""
    if not kept:
        return None
    return "uint32" if 2 * num_edges < 2**32 else "uint64"


def _row_array(path: str, rows: SourceRows, dtype: str) -> RowArray:
    if rows.stored is not None:
        return rows.stored
    scale = f"{path}.scale" if dtype == "int8" and rows.dtype.name != "int8" else ""
    return RowArray(path, dtype, rows.num_rows, rows.row_shape, rows.held, scale)


def _plain_dtype(rows: SourceRows) -> str:
    """The dtype in a store.  Raises BadInput: a store cannot hold it."""
    name = "uint8" if rows.dtype.kind == "b" else rows.dtype.name
    if name not in ITEM_BYTES:
        raise BadInput.at(
            rows.where, f"items of {rows.dtype}", f"one of {', '.join(ITEM_BYTES)}", "convert them"
        )
    return name


def _check_rows(rows: SourceRows, num_rows: int, what: str) -> None:
    if rows.num_rows != num_rows:
        raise BadInput.at(
            rows.where, f"{rows.num_rows} rows", f"{num_rows}, {what}", "is it of another graph?"
        )
    if 0 in rows.row_shape:
        raise BadInput.at(rows.where, f"rows of shape {rows.row_shape}", "numbers", "leave it out")
