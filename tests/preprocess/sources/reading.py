"""Everything that a source gives, whole, for comparison with plain arrays."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from preprocess.files.tables import Table
from preprocess.ingest.prepare import keys_of, prepared
from preprocess.sources.source import Source
from preprocess.sources.sourcefiles import SourceFiles
from preprocess.stages.scan import check_edge_splits, check_splits
from tests.preprocess.quiet import QUIET
from tests.preprocess.sources.conformance import edges_of, rows_of
from tests.preprocess.sources.refusals import MEM


@contextmanager
def ready(source: Source, folder: Path) -> Iterator[Path]:
    """A source that is prepared; gives the folder of its owner's texts."""
    target = folder / "ready"
    with prepared(source, target, MEM, QUIET, False, SourceFiles(source.files)):
        yield keys_of(target)
    assert not list(folder.glob(".ready*"))


def arrays_of(source: Source, listed: Any) -> dict[str, list[Any]]:
    """Name to values of each array, NaN as None."""
    return {r.name: _plain(rows_of(source, r).tolist()) for r in listed if r is not None}


def _plain(value: Any) -> Any:
    """NaN as None, in lists of any depth."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if value != value else value


def read_all(source: Source) -> dict[str, Any]:
    """All of a source, as plain values."""
    found: dict[str, Any] = {}
    for name, num_nodes in source.num_nodes.items():
        check_splits(source, name)
        found[name] = {
            "nodes": num_nodes,
            "features": arrays_of(source, source.features(name)),
            "label": arrays_of(source, [source.label(name)]),
            "splits": arrays_of(source, source.splits(name)),
        }
    for r in source.relations:
        check_edge_splits(source, r)
        found[f"{r.src} {r.name} {r.dst}"] = {
            "edges": [(s, d) for s, d in edges_of(source, r).T.tolist()],
            "arrays": arrays_of(source, source.edge_rows(r)),
            "splits": arrays_of(source, source.edge_splits(r)),
        }
    return found


def texts_of(path: Path) -> list[str]:
    """The texts beside a store."""
    return [piece.at(i) for piece in Table(path).texts("key", 5) for i in range(len(piece))]
