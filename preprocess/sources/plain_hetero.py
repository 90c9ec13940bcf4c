"""The plain layout of several types or relations: npy files whose names say what they are of.

docs/layouts.md lists them.  Files of other names are not read.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec

from preprocess.errors import BadInput
from preprocess.sources.description import read_description
from preprocess.sources.plain_arrays import PlainArrays, shifted_ids
from preprocess.sources.plain_names import (
    CSR_PARTS,
    FORMS,
    LABEL,
    MAIN,
    SCHEMA,
    parse_stem,
    parse_stems,
    several_types,
    split_order,
    typed_file,
)
from preprocess.sources.source import NODE, Ends, Owner

_KINDS = {"edge": "rows", "edge_split": "split", "feat": "rows", "label": "label", "split": "split"}

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Schema(msgspec.Struct):
    node_types: dict[str, _Count]
    relations: list[str | tuple[str, str, str]]
    offsets: dict[str, _Count] = {}
    target: str | None = None
    feature_shapes: dict[str, tuple[int, int]] = {}


class PlainHeteroSource(PlainArrays):
    """Any number of types and relations, in the order of the schema.  Raises BadInput."""

    layout = "plain-hetero"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `schema.json` and arrays that are called after types."""
        first = typed_file(path)
        return f"{SCHEMA} and {first}" if first else None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, several_types, SCHEMA)
        self._schema_path = folder / SCHEMA
        self._schema = _read_schema(self._schema_path)
        self.add_files(self._schema_path)
        self.num_nodes.update(self._schema.node_types)
        self.check_nodes(self._schema_path)
        listed = [self._ends(r) for r in self._schema.relations]
        twice = next((e for i, e in enumerate(listed) if e in listed[:i]), None)
        if twice is not None:
            raise self._bad(f"relation {'|'.join(twice)} twice", "it once", "remove one")
        for stem in self.stems():
            self._sort_in(stem, listed)
        for ends in listed:
            self.open_relation(ends)
        for node_type in self.num_nodes:
            self.open_type(node_type, self._schema.feature_shapes.get(node_type))
            self.open_splits(node_type)
        self._open_target()
        for node_type, num_nodes in self.num_nodes.items():
            self.check_counts(node_type, num_nodes, SCHEMA)

    def _sort_in(self, stem: str, listed: Sequence[Ends]) -> None:
        """Take down what a file is of."""
        head, raws = parse_stems(stem)
        path = self.path(stem)
        if head not in FORMS or not raws:
            return
        if len(raws) not in FORMS[head]:
            raise BadInput.at(
                path, f"{len(raws)} names behind {head}",
                " or ".join(map(str, FORMS[head])), "see docs/layouts.md, or rename it",
            )  # fmt: skip
        names, of_edges = [unquote(r) for r in raws], head.startswith("edge")
        owner: Owner = (names[0], names[1], names[2]) if of_edges else names[0]
        if owner not in (listed if of_edges else self.num_nodes):
            found = f"relation {'|'.join(owner)}" if of_edges else f"node type {owner!r}"
            raise self._unknown(path, found, "relations" if of_edges else "node_types")
        rest = names[3:] if of_edges else names[1:]
        if head == "feat" and rest and raws[-1] in CSR_PARTS:
            self.named(owner, "csr")[rest[0] if len(rest) > 1 else MAIN] = f"{stem}.npy"
        elif head == "feat" and len(rest) > 1:
            raise BadInput.at(
                path, f"a part {raws[-1]!r}", f"one of {', '.join(CSR_PARTS)}", "rename it"
            )
        elif rest or head != "edge":
            self.take(stem, _KINDS[head], owner, rest[0] if rest else MAIN)

    def _open_target(self) -> None:
        """Labels and splits in which nodes are numbered through the types."""
        target, path = self._schema.target, self.path(LABEL)
        if target is None:
            return
        if target not in self.num_nodes:
            raise self._unknown(self._schema_path, f"target {target!r}", "node_types")
        first = self._first(target)
        if path.exists():
            if self.label(target) is not None:
                raise BadInput.at(
                    path, f"labels of {target}, which have a file of their own", "one of them",
                    "remove one",
                )  # fmt: skip
            total, found = sum(self.num_nodes.values()), self.npy(LABEL).shape[:1]
            if found != (total,):
                raise BadInput.at(
                    f"{path}: header", f"{found[0] if found else 0} rows",
                    f"{total}, one a node of any type", f"{SCHEMA} has {total}",
                )  # fmt: skip
            self.open_label(target, LABEL, first, self.num_nodes[target])
        held = {r.name for r in self.splits(target)}
        stems = {p[2]: s for s in self.stems() if (p := parse_stem(s)) and p[:2] == ("split", NODE)}
        for name in split_order(stems):
            if name in held:
                raise BadInput.at(
                    self.path(stems[name]), f"split {name} of {target}, which has another file",
                    "one of them", "remove one",
                )  # fmt: skip
            file = self.npy(stems[name])
            self.add_split(target, shifted_ids(name, file, first, self.num_nodes[target]))

    def _first(self, target: str) -> int:
        """Number of the first node of a type, counted through the types."""
        first = 0
        for name, num_nodes in self.num_nodes.items():
            if self._schema.offsets.get(name, first) != first:
                raise self._bad(
                    f"offset {self._schema.offsets[name]} of {name}",
                    f"{first}, behind the types before it", "correct it",
                )  # fmt: skip
            if name == target:
                return first
            first += num_nodes
        raise AssertionError(target)

    def _ends(self, relation: str | tuple[str, str, str]) -> Ends:
        names = relation.split("|") if isinstance(relation, str) else list(relation)
        if len(names) != 3:
            raise self._bad(f"relation {relation!r}", '"<src>|<name>|<dst>"', "correct it")
        for name in (names[0], names[2]):
            if name not in self.num_nodes:
                raise self._unknown(
                    self._schema_path, f"node type {name!r} of {'|'.join(names)}", "node_types"
                )
        return names[0], names[1], names[2]

    def _bad(self, found: object, expected: str, remedy: str) -> BadInput:
        return BadInput.at(self._schema_path, found, expected, remedy)

    def _unknown(self, path: Path, found: str, field: str) -> BadInput:
        return BadInput.at(path, found, f'one of "{field}" in {SCHEMA}', "add it there")


def _read_schema(path: Path) -> _Schema:
    """Raises BadInput, also for a type that is there twice."""
    expected = '{"node_types": {"<type>": nodes}, "relations": ["<src>|<name>|<dst>"]}'
    schema = read_description(path, _Schema, expected)

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
        if twice is not None:
            raise BadInput.at(path, f"{twice!r} twice", "each name once", "rename one")

    json.loads(path.read_bytes(), object_pairs_hook=once)  # msgspec takes the last one
    return schema
