"""Propose a schema for a folder of CSV or Parquet tables, from the names and types of columns.

A table of edges has two columns of ids, recognised by their names (`src` and `dst`, ...) or by the
names of other tables (`user_id` beside `users.csv`).  Any other table holds nodes.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.errors import BadInput
from preprocess.files.arrow import ColumnType
from preprocess.files.tables import Table, is_table
from preprocess.sources.columns import TableSequence
from preprocess.sources.source import NODE

_ENDS = (
    ("src", "dst"), ("source", "target"), ("source", "dest"), ("source", "destination"),
    ("from", "to"), ("head", "tail"), ("subject", "object"), ("u", "v"), ("start", "end"),
    ("id_1", "id_2"), ("id1", "id2"), ("node_1", "node_2"), ("node1", "node2"),
)  # fmt: skip
_GENERIC = {name for pair in _ENDS for name in pair}
_ID_ENDINGS = ("_id", "_ids", "id", "_key", "_node", "")  # of names of columns
_NODE_IDS = ("id", "node_id", "nid", "node", "key", "_id", "uid", "uuid")
_LABELS = ("label", "labels", "class", "y", "target")
_SPLITS = ("split", "part", "fold", "set")
_MASKS = {"train": ("train_mask", "is_train", "in_train", "train"),
          "valid": ("val_mask", "valid_mask", "is_valid", "in_valid", "valid", "val"),
          "test": ("test_mask", "is_test", "in_test", "test")}  # fmt: skip
_TIMES = ("time", "timestamp", "when", "date", "datetime", "ts", "created_at", "t")
_WEIGHTS = ("weight", "weights", "w")
_NUMBER = re.compile(r"[-_. ]?(part|chunk|shard)?[-_. ]?\d+([-_.]of[-_.]\d+)?$", re.I)
_PROSE = {".txt"}  # suffixes of files that may not be tables


class _Found(NamedTuple):
    """Tables that form one sequence, with what is known about them."""

    stem: str  # what their names have in common
    files: str | list[str]  # as the schema names them
    tables: TableSequence
    types: dict[str, ColumnType]

    @property
    def kind(self) -> str:
        """The type of its nodes: "movie" if movies has a column movie_id, else the singular."""
        shorter = _bare(self.stem)[:-1]
        named = self.named((f"{shorter}_id", f"{shorter}id"))
        return shorter if named else _singular(self.stem)

    def named(self, names: Sequence[str]) -> str:
        """The first of these names that is a column, ignoring case; "": there is none."""
        held = {column.lower(): column for column in reversed(self.tables.names)}
        return next((held[name] for name in names if name in held), "")


def propose(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """A schema, and notes on what to check in it.  Raises BadInput: no tables."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise BadInput.at(folder, what, "a folder of tables", "is the path right?")
    found = list(_tables(folder))
    if not found:
        raise BadInput.at(
            folder, "no .csv, .tsv or .parquet", "a folder of tables", "is the path right?"
        )
    stems = {one.kind: one.stem for one in found}
    ends = {one.stem: _ends(one, stems) for one in found}
    if len(found) == 1 and len(found[0].tables.names) == 2:  # must be edges
        ends = {found[0].stem: (found[0].tables.names[0], found[0].tables.names[1])}
    nodes: dict[str, _Found] = {}
    for one in found:
        if ends[one.stem] is None:
            nodes[one.stem if one.kind in nodes else one.kind] = one
    notes: list[str] = []
    edges = [
        _edge(one, columns, nodes, notes)
        for one in found
        if (columns := ends[one.stem]) is not None
    ]
    listed = [_node(name, one, notes) for name, one in nodes.items()]
    for name in dict.fromkeys(end for edge in edges for end in edge["relation"][::2]):
        if name not in nodes:
            notes.append(f"type {name!r} has no table: its nodes are those that edges name")
            listed.append({"node_type": name, "from_edges": True})
    if not edges:
        notes.append("no table has two columns of ids: add the relations under edges")
    return {"nodes": listed, "edges": edges}, notes


def has_tables(folder: Path) -> bool:
    """Whether a schema could be proposed, judging by file names."""
    return folder.is_dir() and any(_looked_at(p) for p in [*folder.iterdir(), *folder.glob("*/*")])


def _looked_at(path: Path) -> bool:
    shown = path.is_file() and not path.name.startswith(".")
    return shown and is_table(path) and not _PROSE.intersection(path.suffixes[-2:])


def _tables(folder: Path) -> Iterator[_Found]:
    """Group tables: those in a subfolder form one sequence; so do users-0.csv, users-1.csv, ..."""
    groups: dict[tuple[str, tuple[str, ...]], list[Table]] = {}
    for table in [Table(p) for p in sorted(folder.iterdir()) if _looked_at(p)]:
        stem = _stem(table.path)
        groups.setdefault((_NUMBER.sub("", stem) or stem, table.names), []).append(table)
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        for table in [Table(p) for p in sorted(place.iterdir()) if _looked_at(p)]:
            groups.setdefault((place.name, table.names), []).append(table)
    stems = [stem for stem, _ in groups]
    for (stem, _), held in groups.items():
        tables = TableSequence(held, "name a column of all files")
        types = {name: tables.type_of(name) for name in tables.names}
        files = [str(t.path.relative_to(folder)) for t in held]
        alone = stems.count(stem) == 1
        if len(files) > 1 and alone and all(t.path.parent == folder / stem for t in held):
            files = [stem]
        yield _Found(
            stem if alone else _stem(held[0].path), files[0] if len(files) == 1 else files,
            tables, types,
        )  # fmt: skip


def _ends(one: _Found, stems: dict[str, str]) -> tuple[str, str] | None:
    """The columns of sources and targets; None if it is not a table of edges."""
    for pair in _ENDS:
        for ending in _ID_ENDINGS:
            columns = [one.named((f"{name}{ending}",)) for name in pair]
            if all(columns):
                return columns[0], columns[1]
    if one.named((*_NODE_IDS, f"{one.kind}_id", f"{one.kind}id")):
        return None
    others = {kind for kind, stem in stems.items() if stem != one.stem}
    keyed = [c for c in one.tables.names if _owner(c) in others or _names_ids(c)]
    known = any(_owner(c) in others for c in keyed)
    return (keyed[0], keyed[1]) if len(keyed) == 2 and known else None


def _node(name: str, one: _Found, notes: list[str]) -> dict[str, Any]:
    key = one.named((f"{name}_id", f"{name}id", *_NODE_IDS))
    if not key:
        notes.append(f"{one.stem}: no column of ids: nodes are numbered by their rows, from 0")
    made: dict[str, Any] = {"node_type": name, "files": one.files}
    if key:
        made["node_id_col"] = key
    return made | _arrays(one, {key}, _LABELS, notes)


def _edge(
    one: _Found, columns: tuple[str, str], nodes: dict[str, _Found], notes: list[str]
) -> dict[str, Any]:
    only = next(iter(nodes)) if len(nodes) == 1 else NODE
    owners = [_owner(column) for column in columns]
    said = [o in nodes or not nodes or _names_ids(c) for o, c in zip(owners, columns, strict=True)]
    types = [o if s and o not in _GENERIC else "" for o, s in zip(owners, said, strict=True)]
    name, words = one.stem, re.split("[-_.]+", _bare(one.stem))
    if not all(types) and len(words) > 1:  # author_writes_paper, user-item
        ends = [_singular(words[0]), _singular(words[-1])]
        if all(end in nodes for end in ends) or (not nodes and len(words) == 3):
            types, name = ends, "_".join(words[1:-1]) or name
    if not all(types) and len(nodes) != 1:
        notes.append(f"{one.stem}: is it of edges from {types[0] or only} to {types[1] or only}?")
    src, dst = (t or only for t in types)
    weight, used = one.named(_WEIGHTS), set(columns)
    made: dict[str, Any] = {
        "relation": [src, name, dst], "files": one.files,
        "source_id_col": columns[0], "dest_id_col": columns[1],
    }  # fmt: skip
    if weight:
        made["weight_col"] = weight
    return made | _arrays(one, {*used, weight}, (), notes, "feat")


def _arrays(
    one: _Found, used: set[str], labels: Sequence[str], notes: list[str], main: str = "x"
) -> dict[str, Any]:
    """Label, split, time and features from the columns that are not used yet."""
    made: dict[str, Any] = {}

    def take(names: Sequence[str], is_text: bool) -> str:
        column = one.named(names)
        if not column or column in used or (one.types[column].dtype is None) != is_text:
            return ""
        used.add(column)
        return column

    if label := take(labels, False):
        made["labels"] = [{"label_col": label}]
    if split := take(_SPLITS, True):
        made["split_col"] = split
    masks = {name: column for name, names in _MASKS.items() if (column := take(names, False))}
    if masks and not split:
        made["mask_cols"] = masks
    time = one.named(_TIMES)
    if time and time not in used and _is_integer(one.types[time]):
        made["time_col"] = time
        used.add(time)
    left = [name for name in one.tables.names if name not in used]
    numbers = [name for name in left if one.types[name].dtype is not None]
    if len(numbers) == 1 and not one.types[numbers[0]].width:
        made["features"] = [{"feature_col": numbers[0]}]
    elif numbers:
        made["features"] = [{"feature_name": main, "feature_col": numbers}]
    if texts := [name for name in left if name not in numbers]:
        notes.append(f"{one.stem}: text is left out: {', '.join(texts)}")
    return made


def _is_integer(kind: ColumnType) -> bool:
    return kind.dtype is not None and kind.dtype.kind in "iu" and not kind.width


def _owner(column: str) -> str:
    """The type that a column of ids refers to: "user" for user_id and userId."""
    name = column.lower()
    ending = next((e for e in _ID_ENDINGS if e and name.endswith(e) and name != e), "")
    return _singular(name.removesuffix(ending).rstrip("_"))


def _names_ids(column: str) -> bool:
    """Whether a column has a name like user_id or userId."""
    return column.lower().endswith("_id") or column.endswith("Id")


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _bare(name: str) -> str:
    return re.sub("^(nodes?|edges?|vertices|vertex)[-_.]+", "", name.lower())


def _singular(name: str) -> str:
    """The type of a table's name: "user" for users, nodes-users and Users."""
    name = _bare(name)
    if name.endswith("ies") and len(name) > 4:
        return f"{name[:-3]}y"
    return name[:-1] if name.endswith("s") and not name.endswith("ss") and len(name) > 2 else name
