"""The plain layout: a folder of npy files with fixed names.

    edge_index.npy                  (2, edges): sources, targets
    node_feat.npy                   (nodes, features), the array "x"; or node_feat_csr.json and
                                    node_feat_{indptr,indices,data}.npy
    node_<name>.npy                 another array of the nodes, or its CSR form in the same way
    node_label.npy                  (nodes,), or (nodes, labels)
    <name>_idx.npy                  a split: train_idx.npy, valid_idx.npy, test_idx.npy, others
    edge_<name>.npy                 an array of the edges; "weight" and "time" guide sampling
    <name>_edge.npy                 a split of edges: positions, or pairs (source, target) a row
    meta.json                       {"num_nodes": n}, where no array of the nodes says it

Files of other names are not read.
"""

from pathlib import Path
from typing import Any

import msgspec

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.source import SourceRelation
from preprocess.sources.plain_arrays import PlainArrays
from preprocess.sources.plain_names import (
    CSR,
    CSR_PARTS,
    EDGES,
    LABEL,
    META,
    SCHEMA,
    OneType,
    array_order,
    parse_stem,
    plain_name,
    split_order,
)

NODE, RELATION = "node", "to"
_SCAN_ITEMS = 1 << 18


class _Meta(msgspec.Struct):
    num_nodes: int | None = None


class PlainSource(PlainArrays):
    """One node type "node", one relation "to".  Raises BadInput.

    There are as many nodes as rows of labels or features, else as `meta.json` says, else one more
    than the largest id.
    """

    layout = "plain"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `edge_index.npy`, and no `schema.json`."""
        found = (path / f"{EDGES}.npy").is_file() and not (path / SCHEMA).exists()
        return f"{EDGES}.npy" if found else None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, OneType(), f"{EDGES}.npy")
        relation = self.open_edges((NODE, RELATION, NODE))
        found: dict[str, dict[str, str]] = {}
        for stem in self.stems():
            parsed = parse_stem(stem)
            if parsed is None:
                continue
            kind, raw = parsed
            named = found.setdefault(kind, {})
            if (name := plain_name(kind, raw)) in named:
                raise BadInput.at(
                    folder / f"{stem}.npy", f"an array {name!r}, which {named[name]}.npy is too",
                    "names that differ", "rename one",
                )  # fmt: skip
            named[name] = stem
        self._open_features(found.get("features", {}))
        if LABEL in found.get("label", {}).values():
            self.open_label(NODE, LABEL)
        self._counts[NODE] = self._count_nodes(relation)
        for name in split_order(named := found.get("split", {})):
            self.open_split(NODE, name, named[name])
        for name in array_order(named := found.get("edge_rows", {})):
            self.open_edge_rows(relation, name, named[name])
        for name in split_order(named := found.get("edge_split", {})):
            self.open_edge_split(relation, name, named[name])

    def _open_features(self, named: dict[str, str]) -> None:
        """Dense arrays, and sparse ones: those with a `_csr.json`, or with offsets."""
        tail, first = f"_{CSR}", f"_{CSR_PARTS[0]}"
        raws = [p.stem.removesuffix(tail) for p in self._folder.glob(f"node_*{tail}.json")]
        raws += [s.removesuffix(first) for s in named.values() if s.endswith(first)]
        sparse = {plain_name("features", r.removeprefix("node_")): r for r in raws}
        parts = {f"{raw}_{part}" for raw in sparse.values() for part in CSR_PARTS}
        dense = {name: stem for name, stem in named.items() if stem not in parts}
        for name in array_order([*dense, *sparse]):
            if name in dense and name in sparse:
                raise BadInput.at(
                    self._folder / f"{dense[name]}.npy", f"{sparse[name]}{tail}.json beside it",
                    "one of them", "remove one",
                )  # fmt: skip
            if name in dense:
                self.open_features(NODE, name, dense[name])
            else:
                self.open_csr(NODE, name)

    def _count_nodes(self, relation: SourceRelation) -> int:
        counts: dict[str, int] = {Path(r.where).name: r.num_rows for r in self.node_arrays(NODE)}
        meta = self._folder / META
        if meta.exists():
            self.files.append(meta)
            try:
                said = msgspec.json.decode(meta.read_bytes(), type=_Meta).num_nodes
            except msgspec.MsgspecError as error:
                raise BadInput.at(meta, error, '{"num_nodes": n}', "correct it") from error
            counts |= {META: said} if said is not None else {}
        if counts:
            says, num_nodes = max(counts.items(), key=lambda c: c[1])
            self.check_counts(NODE, num_nodes, says)
            if counts.get(META, num_nodes) != num_nodes:
                raise BadInput.at(
                    meta, f"{counts[META]} nodes", f"{num_nodes}, as {says} has", "correct it"
                )
        else:
            num_nodes = _largest(NpyFile(Path(relation.where))) + 1
        if num_nodes <= 0:
            raise BadInput.at(
                self._folder, "a graph with no nodes", "at least one", "is this the right folder?"
            )
        return num_nodes


def _largest(file: Any) -> int:
    """The largest item, or -1."""
    pieces = file.pieces(0, file.size, _SCAN_ITEMS)
    return max((int(piece.max()) for piece in pieces), default=-1)
