"""Names of the files of both plain layouts.

Names of types, relations and arrays are percent-encoded if they contain characters that a file name
cannot have, or could be mistaken for another name; readers decode them.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from preprocess.ingest.contents import SPLITS
from preprocess.sources.source import NODE, RELATION, Ends, Owner

MAIN = "x"  # the array that is called "feat" on disk
META, SCHEMA = "meta.json", "schema.json"
EDGES, LABEL, FEATURES = "edge_index", "node_label", "node_feat"
CSR = "csr"  # suffix of the file with the shape of a sparse array
CSR_PARTS = ("indptr", "indices", "data")
ONLY: Ends = (NODE, RELATION, NODE)  # the relation of a graph of one type
_NODE, _EDGE, _IDS, _PAIRS = "node_", "edge_", "_idx", "_edge"
_BETWEEN = "__"
FORMS = {  # of `several_types`: first word of a file name -> how many names may follow
    "edge": (3, 4), "edge_split": (4,), "feat": (1, 2, 3), "label": (1,), "split": (2,),
}  # fmt: skip

# (kind, owner, name of the array) -> name of its file, without ".npy"; kinds are "edges", "rows",
# "label" and "split"
PlainNames = Callable[[str, Owner, str], str]


def one_type(kind: str, owner: Owner, name: str) -> str:
    """File names without types: `node_feat`, `node_<name>`, `edge_<name>`, `<split>_idx`, ..."""
    of_edges, raw = owner == ONLY, _quoted(name)
    if kind in ("edges", "label"):
        return EDGES if of_edges else LABEL
    if kind == "split":
        stem = raw + (_PAIRS if of_edges else _IDS)
        return _changed(stem) if stem.startswith((_NODE, _EDGE)) else stem  # else taken for arrays
    if name == MAIN and not of_edges:
        return FEATURES
    head = _EDGE if of_edges else _NODE
    is_part = not of_edges and raw.rpartition("_")[2] in (CSR, *CSR_PARTS)
    taken = is_part or head + raw in (EDGES, FEATURES, LABEL)
    return head + (_changed(raw) if taken else raw)


def several_types(kind: str, owner: Owner, name: str) -> str:
    """File names with types: `feat__<type>`, `feat__<type>__<name>`, ..."""
    if isinstance(owner, str):
        head, names = ("feat" if kind == "rows" else kind), [owner]
    else:
        head, names = ("edge_split" if kind == "split" else "edge"), [*owner]
    parts = [_apart(n) for n in names]
    if kind in ("rows", "split") and (head, name) != ("feat", MAIN):
        is_part = head == "feat" and name in (CSR, *CSR_PARTS)
        parts.append(_changed(name) if is_part else _apart(name))
    return _BETWEEN.join([head, *parts])


def csr_stem(names: PlainNames, node_type: str, name: str, part: str) -> str:
    """File name of one part of a type's sparse array."""
    between = "_" if names is one_type else _BETWEEN
    return f"{names('rows', node_type, name)}{between}{part}"


def parse_stem(stem: str) -> tuple[str, Owner, str] | None:
    """(kind, owner, name) of a file named by `one_type`; None for the edges and unknown files.

    Parts of sparse arrays have the kind "rows", too.
    """
    if stem == EDGES:
        return None
    if stem in (LABEL, FEATURES):
        return ("label" if stem == LABEL else "rows"), NODE, MAIN
    for kind, owner, head, tail in (
        ("rows", NODE, _NODE, ""), ("rows", ONLY, _EDGE, ""),
        ("split", NODE, "", _IDS), ("split", ONLY, "", _PAIRS),
    ):  # fmt: skip
        raw = stem.removeprefix(head).removesuffix(tail)
        if raw and stem == head + raw + tail:
            return kind, owner, unquote(raw)
    return None


def parse_stems(stem: str) -> tuple[str, list[str]]:
    """(first word, encoded names) of a file named by `several_types`."""
    head, *names = stem.split(_BETWEEN)
    return head, names


def typed_file(folder: Path) -> str | None:
    """The first file named by `several_types` in a folder that has a schema."""
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


def _apart(name: str) -> str:
    """Encode a name so that it has no two adjacent underscores, and none at its ends."""
    raw = _quoted(name).replace(_BETWEEN, "_%5F")
    raw = raw[:-1] + "%5F" if raw.endswith("_") else raw
    return "%5F" + raw[1:] if raw.startswith("_") else raw
