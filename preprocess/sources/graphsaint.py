"""The layout of GraphSAINT: `adj_full.npz`, `feats.npy`, `class_map.json`, `role.json`.

Its JSON may not fit in memory: `{"<id>": value, ...}` and `{"<name>": [ids], ...}` are read in
pieces.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.npy import NpyFile
from preprocess.ingest.prepare import Preparation
from preprocess.pipeline.stage import Facts
from preprocess.sources.arrays import ArrayRows, MadeRows
from preprocess.sources.scipy_npz import open_matrix
from preprocess.sources.source import NODE, RELATION, Source, SourceRows

ADJACENCY, FEATURES, CLASSES, ROLES = "adj_full.npz", "feats.npy", "class_map.json", "role.json"
_SPLITS = {"tr": "train", "va": "valid", "te": "test"}
_MIN_WINDOW = 1 << 16  # nodes

_Class = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
_Flags = list[Annotated[int, msgspec.Meta(ge=-128, le=127)]]
_PART_BYTES = 1 << 18  # of text; its decoded values take about ten times as much
_LAST_ENTRY = re.compile(rb'(.*),\s*(?=")', re.DOTALL)  # everything before the last key
_LIST_START = re.compile(rb'[\s,]*"([^"]*)"\s*:\s*\[')
_MAX_START = 1 << 10  # maximum bytes of a list's key and opening bracket

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class GraphSaintSource(Source):
    """A `Source` that is `Preparable`: it converts JSON to arrays, a window of nodes at a time."""

    layout, marks = "graphsaint", (ADJACENCY, ROLES)

    def __init__(self, path: Path) -> None:
        num_nodes, edges = open_matrix(path / ADJACENCY)
        super().__init__(path, {NODE: num_nodes})
        says = f"one a node of {ADJACENCY}"
        self.add_array(NODE, ArrayRows("x", NpyFile(path / FEATURES), num_nodes, says))
        self._classes, self._roles = path / CLASSES, path / ROLES
        if not self._roles.is_file():
            raise BadInput.at(self._roles, "no file: it is missing", "a JSON file", "add it")
        self.check_nodes(path / ADJACENCY)
        self.add_edges((NODE, RELATION, NODE), edges)
        self.add_files(self._classes, self._roles)
        self._kind, form = self._label_form()
        self._label = MadeRows(form)
        self.add_label(NODE, self._label)

    def prepare(self, preparation: Preparation) -> None:
        """Write labels and splits as arrays, in passes over the JSON, using part of the memory."""
        self._label.made = preparation.folder / "labels"
        window = max(_MIN_WINDOW, preparation.mem_bytes // 8 // self._label.form.row_bytes)
        preparation.record("labels", partial(self._write_labels, window), ["labels"])
        counts = preparation.record(
            "splits", partial(self._write_splits, preparation.folder), lambda facts: facts
        )
        self._splits.clear()
        for name, count in counts.items():
            where = f"{self._roles}: {next(k for k, v in _SPLITS.items() if v == name)}"
            form = SourceRows(name, np.dtype(np.int64), (), count, "dense", where)
            self.add_split(NODE, MadeRows(form, preparation.folder / name))

    def _label_form(self) -> tuple[Any, SourceRows]:
        """The type of a JSON value, and the form of the label array, from the first entry."""
        _, entries = next(read_entries(self._classes, int | list[int]))
        first: Any = next(iter(entries.values()), 0)
        is_row = isinstance(first, list)
        dtype = np.dtype(np.int8 if is_row else np.int64)
        shape = (len(first),) if is_row else ()
        rows = SourceRows("label", dtype, shape, self.num_nodes[NODE], "dense", str(self._classes))
        return _Flags if is_row else _Class, rows

    def _write_labels(self, window: int) -> Facts:
        """Write all labels, -1 for nodes without one, with a pass for each `window` nodes."""

        def fill(first: int, labels: NDArray[Any]) -> None:
            for place, entries in read_entries(self._classes, self._kind):
                ids = np.fromiter(entries, np.int64, len(entries))
                self._check(place, ids, entries)
                here = (ids >= first) & (ids < first + labels.shape[0])
                if here.any():
                    values = np.array(list(entries.values()), labels.dtype)
                    labels[ids[here] - first] = values[here]

        return self._label.write(window, -1, fill)

    def _check(self, place: str, ids: NDArray[np.int64], entries: dict[int, Any]) -> None:
        """Check ids, and that all rows have the same width.  Raises BadInput."""
        num_nodes = self.num_nodes[NODE]
        if ids.size and int(ids.max()) >= num_nodes:
            raise BadInput.at(
                place, f'"{ids.max()}"', f"nodes 0 to {num_nodes - 1}",
                f"{ADJACENCY} has {num_nodes} nodes",
            )  # fmt: skip
        for width in self._label.form.row_shape:
            bad = next((n for n, values in entries.items() if len(values) != width), None)
            if bad is not None:
                raise BadInput.at(
                    place, f'{len(entries[bad])} labels of "{bad}"', f"{width}, as the first has",
                    "write the file again",
                )  # fmt: skip

    def _write_splits(self, folder: Path) -> Facts:
        """Write a file of ids for each split; returns their counts."""
        counts: dict[str, int] = {}
        for name in _SPLITS.values():
            (folder / name).unlink(missing_ok=True)
        for key, ids in read_lists(self._roles):
            if key not in _SPLITS or (not ids.size and _SPLITS[key] in counts):
                raise BadInput.at(
                    f"{self._roles}: {key}", "this list", "tr, va and te, each once", "correct it"
                )
            with ArrayFile(folder / _SPLITS[key], np.int64) as out:
                out.append(ids)
                counts[_SPLITS[key]] = out.size
        missing = next((key for key, name in _SPLITS.items() if name not in counts), None)
        if missing is not None:
            raise BadInput.at(self._roles, f"no list {missing!r}", "tr, va and te", "add it")
        return {name: counts[name] for name in _SPLITS.values()}


def read_entries(path: Path, value: Any) -> Iterator[tuple[str, dict[int, Any]]]:
    """(place, entries) of a JSON object, some entries at a time, in order.

    value   a type that msgspec decodes; no value holds text

    Raises BadInput.
    """
    decoder = msgspec.json.Decoder(dict[Id, value])
    with _opened(path) as window:
        while window.more():
            found = _LAST_ENTRY.match(window.text)
            if found is not None:
                yield window.place, window.decode(decoder, b"{%b}" % found[1])
                window.drop(found.end())
        rest = window.text.rstrip()
        if not rest.endswith(b"}"):
            raise window.bad("its end", '"}" at the end')
        yield window.place, window.decode(decoder, b"{%b" % rest)


def read_lists(path: Path) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """(name, ids) of each list, some ids at a time, in order; first none, to announce the name.

    Raises BadInput.
    """
    decoder = msgspec.json.Decoder(list[Id])
    name: str | None = None
    with _opened(path) as window:
        while True:
            if name is None:
                found = _LIST_START.match(window.text)
                if found is not None:
                    name = found[1].decode(errors="replace")
                    yield name, np.empty(0, np.int64)
                    window.drop(found.end())
                elif len(window.text) > _MAX_START or not window.more():
                    if window.text.strip() == b"}":
                        return
                    raise window.bad(repr(window.text[:20].decode(errors="replace")), "a list")
                continue
            end = window.text.find(b"]")
            stop = end if end >= 0 else window.text.rfind(b",")
            if stop > 0:
                ids = window.decode(decoder, b"[%b]" % window.text[:stop])
                yield name, np.array(ids, np.int64)
            window.drop(stop + 1)
            if end >= 0:
                name = None
            elif not window.more():
                raise window.bad("its end", f'"]" after the ids of {name}')


class _Window:
    """The text of a file that has been read but not decoded yet."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._offset, self.text = 0, b""

    @property
    def place(self) -> str:
        return f"{self._path}+{self._offset}"

    def more(self) -> bool:
        """Read some more text; returns whether there was any."""
        part = self._file.read(_PART_BYTES)
        self.text += part
        return bool(part)

    def drop(self, num_bytes: int) -> None:
        """Remove decoded text from the beginning."""
        self._offset, self.text = self._offset + num_bytes, self.text[num_bytes:]

    def decode(self, decoder: Any, text: bytes) -> Any:
        try:
            return decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            said = " ".join(str(error).split()).replace("`", "'")
            raise self.bad(said, "numbers in JSON") from error

    def bad(self, found: str, expected: str) -> BadInput:
        return BadInput.at(self.place, found, expected, "write the file again")


@contextmanager
def _opened(path: Path) -> Iterator[_Window]:
    """A window that begins after the "{" of a file.  Raises BadInput."""
    try:
        with path.open("rb") as file:
            window = _Window(path, file)
            window.more()
            start = len(window.text) - len(window.text.lstrip())
            if window.text[start : start + 1] != b"{":
                found = window.text[start : start + 10].decode(errors="replace")
                raise window.bad(repr(found), 'an object, from "{"')
            window.drop(start + 1)
            yield window
    except OSError as error:
        raise BadInput.at(path, error.strerror or error, "a JSON file", "add it") from error
