"""Names of the files of both plain layouts.

Names of types, relations and arrays are percent-encoded where they hold what a file name cannot, or
what would be taken for something else; readers undo that.
"""

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from preprocess.ingest.contents import SPLITS
from preprocess.sources.source import Ends

MAIN = "x"  # the array that is called "feat" on disk
META, SCHEMA = "meta.json", "schema.json"
EDGES, LABEL, FEATURES = "edge_index", "node_label", "node_feat"
CSR = "csr"  # what says the shape of a sparse array
CSR_PARTS = ("indptr", "indices", "data")
_NODE, _EDGE, _IDS, _PAIRS = "node_", "edge_", "_idx", "_edge"
_BETWEEN = "__"
FORMS = {  # of `SeveralTypes`: first word of a name -> numbers of names that may follow
    "edge": (3, 4), "edge_split": (4,), "feat": (1, 2, 3), "label": (1,), "split": (2,),
}  # fmt: skip


class OneType:
    """`node_feat`, `node_<name>`, `edge_<name>`, `<split>_idx`, `<split>_edge`: no types."""

    def edges(self, ends: Ends) -> str:
        return EDGES

    def edge_rows(self, ends: Ends, name: str) -> str:
        raw = _quoted(name)
        return _EDGE + (_changed(raw) if _EDGE + raw == EDGES else raw)

    def edge_split(self, ends: Ends, name: str) -> str:
        return _unlike(f"{_quoted(name)}{_PAIRS}")

    def features(self, node_type: str, name: str) -> str:
        return _NODE + self._array(name)

    def csr(self, node_type: str, name: str, part: str) -> str:
        """A part of a sparse array of the nodes."""
        return f"{_NODE}{self._array(name)}_{part}"

    def label(self, node_type: str) -> str:
        return LABEL

    def split(self, node_type: str, name: str) -> str:
        return _unlike(f"{_quoted(name)}{_IDS}")

    def _array(self, name: str) -> str:
        if name == MAIN:
            return FEATURES.removeprefix(_NODE)
        raw = _quoted(name)
        taken = _NODE + raw in (FEATURES, LABEL) or raw.rpartition("_")[2] in (CSR, *CSR_PARTS)
        return _changed(raw) if taken else raw


class SeveralTypes:
    """`feat__<type>`, `feat__<type>__<name>`, `edge__<src>__<name>__<dst>`, ..."""

    def edges(self, ends: Ends) -> str:
        return _joined("edge", *ends)

    def edge_rows(self, ends: Ends, name: str) -> str:
        return _joined("edge", *ends, name)

    def edge_split(self, ends: Ends, name: str) -> str:
        return _joined("edge_split", *ends, name)

    def features(self, node_type: str, name: str) -> str:
        if name == MAIN:
            return _joined("feat", node_type)
        stem = _joined("feat", node_type, name)
        if name in (CSR, *CSR_PARTS):
            return _joined("feat", node_type, "") + _changed(name)
        return stem

    def csr(self, node_type: str, name: str, part: str) -> str:
        """A part of a sparse array of a type."""
        return f"{self.features(node_type, name)}{_BETWEEN}{part}"

    def label(self, node_type: str) -> str:
        return _joined("label", node_type)

    def split(self, node_type: str, name: str) -> str:
        return _joined("split", node_type, name)


PlainNames = OneType | SeveralTypes  # of the files of a layout, without ".npy" or ".json"


def parse_stem(stem: str) -> tuple[str, str] | None:
    """(kind, name as it stands there) of a file of `OneType`; None for one that is not read.

    Kinds: "edges", "edge_rows", "edge_split", "features" (parts of sparse ones too), "label",
    "split".
    """
    if stem in (EDGES, LABEL):
        return ("edges" if stem == EDGES else "label"), ""
    for kind, head, tail in (
        ("features", _NODE, ""), ("edge_rows", _EDGE, ""),
        ("split", "", _IDS), ("edge_split", "", _PAIRS),
    ):  # fmt: skip
        name = stem.removeprefix(head).removesuffix(tail)
        if name and stem == head + name + tail:
            return kind, name
    return None


def parse_stems(stem: str) -> tuple[str, list[str]]:
    """(first word, names with what is encoded) of a file of `SeveralTypes`."""
    head, *names = stem.split(_BETWEEN)
    return head, names


def plain_name(kind: str, raw: str) -> str:
    """The name of an array from that in a file name of `OneType`."""
    return MAIN if kind == "features" and _NODE + raw == FEATURES else unquote(raw)


def typed_file(folder: Path) -> str | None:
    """The name of a file of `SeveralTypes` in a folder that has a schema, the first one."""
    if not (folder / SCHEMA).is_file():
        return None
    names = sorted(p.name for p in folder.glob(f"*{_BETWEEN}*.npy"))
    return next((n for n in names if n.split(_BETWEEN)[0] in FORMS), None)


def split_order(names: Iterable[str]) -> list[str]:
    """Train, valid and test, then others by name."""
    held = set(names)
    return [n for n in SPLITS if n in held] + sorted(held - set(SPLITS))


def array_order(names: Iterable[str]) -> list[str]:
    """The main array, then others by name."""
    return sorted(set(names), key=lambda n: (n != MAIN, n))


def _quoted(name: str) -> str:
    return quote(name, safe=" -_.+~:,()=@")


def _changed(raw: str) -> str:
    """The same name with its first character encoded."""
    return f"%{ord(raw[0]):02X}{raw[1:]}"


def _unlike(stem: str) -> str:
    """A stem that does not begin as arrays do."""
    return _changed(stem) if stem.startswith((_NODE, _EDGE)) else stem


def _joined(head: str, *names: str) -> str:
    """Names with two underscores between them, and nowhere else."""
    parts = []
    for name in names:
        raw = _quoted(name).replace(_BETWEEN, "_%5F")
        raw = raw[:-1] + "%5F" if raw.endswith("_") else raw
        parts.append("%5F" + raw[1:] if raw.startswith("_") else raw)
    return _BETWEEN.join([head, *parts])
