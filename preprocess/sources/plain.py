"""The plain layout: a folder of npy files with fixed names, which docs/layouts.md lists."""

from pathlib import Path

import msgspec

from preprocess.errors import BadInput
from preprocess.sources.description import read_description
from preprocess.sources.plain_arrays import PlainArrays
from preprocess.sources.plain_names import (
    CSR,
    CSR_PARTS,
    EDGES,
    META,
    ONLY,
    SCHEMA,
    one_type,
    parse_stem,
)
from preprocess.sources.source import NODE

_SCAN_EDGES = 1 << 18


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
        super().__init__(folder, one_type, f"{EDGES}.npy")
        for stem in self.stems():
            if (found := parse_stem(stem)) is not None:
                self.take(stem, *found)
        self._find_sparse()
        self.open_relation(ONLY)
        self.open_type(NODE)
        self.num_nodes[NODE] = self._count_nodes()
        self.open_splits(NODE)

    def _find_sparse(self) -> None:
        """Tell sparse arrays from dense ones: those with a `_csr.json`, or with offsets."""
        dense, tail, first = self.named(NODE, "rows"), f"_{CSR}", f"_{CSR_PARTS[0]}"
        raws = [p.stem.removesuffix(tail) for p in self._folder.glob(f"node_*{tail}.json")]
        raws += [s.removesuffix(first) for s in dense.values() if s.endswith(first)]
        parts = {f"{raw}_{part}" for raw in raws for part in CSR_PARTS}
        for name in [name for name, stem in dense.items() if stem in parts]:
            del dense[name]
        for raw in raws:
            if (found := parse_stem(raw)) is not None:
                self.named(NODE, "csr")[found[2]] = f"{raw}{tail}.json"

    def _count_nodes(self) -> int:
        counts: dict[str, int] = {Path(r.where).name: r.num_rows for r in self.node_arrays(NODE)}
        meta = self._folder / META
        if meta.exists():
            self.add_files(meta)
            said = read_description(meta, _Meta, '{"num_nodes": n}').num_nodes
            counts |= {META: said} if said is not None else {}
        if counts:
            says, num_nodes = max(counts.items(), key=lambda c: c[1])
            self.check_counts(NODE, num_nodes, says)
            if counts.get(META, num_nodes) != num_nodes:
                raise BadInput.at(
                    meta, f"{counts[META]} nodes", f"{num_nodes}, as {says} has", "correct it"
                )
        else:
            pieces = self._edges[ONLY].pieces(_SCAN_EDGES)
            num_nodes = 1 + max((int(ids.max()) for ends in pieces for ids in ends), default=-1)
        if num_nodes <= 0:
            raise BadInput.at(
                self._folder, "a graph with no nodes", "at least one", "is this the right folder?"
            )
        return num_nodes
