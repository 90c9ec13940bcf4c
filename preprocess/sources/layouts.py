"""The known layouts of graphs, and detection of the layout of a path."""

from pathlib import Path
from typing import NamedTuple

from blockstore.errors import NotAStore, StoreError
from blockstore.root import read_root
from preprocess.errors import BadInput
from preprocess.sources.ginex import GinexSource
from preprocess.sources.graphbolt import GraphBoltSource
from preprocess.sources.graphsaint import GraphSaintSource
from preprocess.sources.igb import Igb2kSource, IgbSource
from preprocess.sources.mag240m import Mag240mSource
from preprocess.sources.ogb import OgbBinarySource, OgbCsvSource
from preprocess.sources.plain import PlainHeteroSource, PlainSource
from preprocess.sources.propose import has_tables
from preprocess.sources.pyg import PygSource
from preprocess.sources.scipy_npz import ScipyNpzSource
from preprocess.sources.source import Source
from preprocess.sources.sourcefiles import SourceFiles, stats_below
from preprocess.sources.table import DglCsvSource, TableSource

_MAX_SHOWN = 6  # file names in a message


class Opened(NamedTuple):
    """A source, and the files that identified its layout."""

    source: Source
    saw: str  # "raw/edge.csv.gz and raw/num-node-list.csv.gz"
    files: SourceFiles  # their state when the source was opened


_CLASSES: tuple[type[Source], ...] = (
    PlainSource,
    PlainHeteroSource,
    DglCsvSource,
    GraphBoltSource,
    IgbSource,
    Igb2kSource,
    Mag240mSource,
    OgbCsvSource,
    OgbBinarySource,
    TableSource,
    ScipyNpzSource,
    GraphSaintSource,
    GinexSource,
    PygSource,
)
LAYOUTS = {layout.layout: layout for layout in _CLASSES}


def open_source(path: Path, layout: str | None = None) -> Opened:
    """Open a graph in the named layout, or in the only one that recognises it.

    Raises BadInput: no such path or layout, no layout or several that match, a bad source.
    """
    known = ", ".join(LAYOUTS)
    if layout is not None and layout not in LAYOUTS:
        raise BadInput.at("--layout", repr(layout), f"one of {known}", "or leave it out")
    if not path.exists():
        raise BadInput.at(path, "nothing", "a graph on disk", "is the path right?")
    if layout is not None:
        chosen = LAYOUTS[layout]
        return _open(chosen, path, chosen.recognise(path) or "named by --layout")
    matches = [(c, saw) for c in LAYOUTS.values() if (saw := c.recognise(path)) is not None]
    if not matches and _is_store(path):
        raise BadInput.at(
            path, "a store", "a graph in another layout",
            "loaderd serves stores as they are, blockstore repartition and export read them",
        )  # fmt: skip
    if not matches and has_tables(path):
        raise BadInput.at(
            path, "tables without a schema", "schema.json, which says what they are",
            f"blockstore schema {path} > {path / 'schema.json'} proposes one: look at it",
        )  # fmt: skip
    if not matches:
        raise BadInput.at(
            path, _listing(path), f"a graph in a layout that is known ({known})",
            "is the path right? --layout says which it is",
        )  # fmt: skip
    if len(matches) > 1:
        found = " and ".join(f"{saw} ({c.layout})" for c, saw in matches)
        raise BadInput.at(path, found, "one layout", "--layout says which it is")
    ((chosen, saw),) = matches
    return _open(chosen, path, saw)


def _open(layout: type[Source], path: Path, saw: str) -> Opened:
    before = stats_below(path)  # before opening the source, which reads headers
    source = layout(path)
    return Opened(source, saw, SourceFiles(source.files, before))


def _is_store(path: Path) -> bool:
    """Whether a path is a store, even if it is damaged or of another version."""
    try:
        read_root(path)
    except NotAStore:
        return False
    except StoreError:
        return True
    return True


def _listing(path: Path) -> str:
    """Describe a path that has no known layout."""
    if not path.is_dir():
        return f"a file {path.name}"
    names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir())
    if not names:
        return "an empty folder"
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"a folder with {', '.join(names[:_MAX_SHOWN])}{more}"
