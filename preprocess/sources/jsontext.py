"""JSON too large to be held: `{"<id>": value, ...}` and `{"<name>": [ids], ...}`, in pieces."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput

_PART_BYTES = 1 << 18  # of text; the values in it take some ten times as much
_LAST_ENTRY = re.compile(rb'(.*),\s*(?=")', re.DOTALL)  # all before the key of the last entry
_LIST_START = re.compile(rb'[\s,]*"([^"]*)"\s*:\s*\[')
_MOST_START = 1 << 10  # bytes that a list may begin with

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

_Value = TypeVar("_Value")


def read_entries(path: Path, value: Any) -> Iterator[tuple[str, dict[int, Any]]]:
    """The entries of an object, some at a time and in order, and the place where they begin.

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
    """The ids of each list with its name, some at a time and in order; first none, for its name.

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
                elif len(window.text) > _MOST_START or not window.more():
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
    """Text of a file that has not been decoded yet."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._offset, self.text = 0, b""

    @property
    def place(self) -> str:
        return f"{self._path}+{self._offset}"

    def more(self) -> bool:
        """Append some text; whether there was any."""
        part = self._file.read(_PART_BYTES)
        self.text += part
        return bool(part)

    def drop(self, num_bytes: int) -> None:
        """Go on behind some text."""
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
    """A window behind the "{" of a file.  Raises BadInput."""
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
