"""`blockstore lookup`: translate the user's ids of nodes to the store's numbers, and back.

Text ids are in a table beside the store, one for each type, integer ids in its array `key`; an
ingest of tables wrote them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import NodeType
from blockstore.store import Store, scan_rows
from preprocess.errors import BadInput
from preprocess.files.tables import Table
from preprocess.ingest.prepare import keys_of
from preprocess.sources.tabular import KEY, key_file

_ROWS = 1 << 16
_INTEGERS = ("int64", ())  # dtype and row shape of the array of keys


class NodeKeys:
    """The user's ids (keys) of the nodes of a type.  Raises BadInput."""

    def __init__(self, store: Store, node_type: NodeType) -> None:
        self._store, self._type = store, node_type
        self._texts = keys_of(store.path) / key_file(node_type.name)

    @property
    def known(self) -> bool:
        """Whether the nodes have keys, other than their numbers."""
        key = self._type.features.get(KEY)
        return self._texts.is_file() or (
            key is not None and (key.dtype, key.row_shape) == _INTEGERS
        )

    def numbers(self, keys: Sequence[str]) -> dict[str, int]:
        """The number of each key that exists."""
        if self._texts.is_file():
            return dict(self._text_numbers(keys))
        wanted = np.array(sorted(int(key) for key in keys if _is_integer(key)), np.int64)
        found: dict[int, int] = {}
        for values, numbers in self._integers():
            here = np.isin(values, wanted)
            found.update(zip(values[here].tolist(), numbers[here].tolist(), strict=True))
        return {key: found[int(key)] for key in keys if _is_integer(key) and int(key) in found}

    def keys(self, numbers: Sequence[int]) -> dict[int, str]:
        """The key of each number that exists."""
        found: dict[int, str] = {}
        if not self._texts.is_file():
            for values, ids in self._integers():
                here = np.isin(ids, numbers)
                found.update(zip(ids[here].tolist(), map(str, values[here].tolist()), strict=True))
            return found
        row, wanted = 0, sorted(numbers)
        for texts in Table(self._texts).texts(KEY, _ROWS):
            low, high = np.searchsorted(wanted, [row, row + len(texts)])
            found.update({number: texts.at(number - row) for number in wanted[low:high]})
            row += len(texts)
        return found

    def _text_numbers(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        row = 0
        for places in Table(self._texts).words(KEY, keys, _ROWS):
            for at in np.flatnonzero(places >= 0).tolist():
                yield keys[int(places[at])], row + at
            row += places.size

    def _integers(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(integer keys, numbers) in the order of the store, some at a time."""
        numbers = scan_rows(self._store, self._type.original_id, _ROWS)
        first, ids = next(numbers)
        for row, values in scan_rows(self._store, self._type.features[KEY], _ROWS):
            done = 0
            while done < values.shape[0]:
                at = row + done - first
                if at == ids.size:
                    first, ids = next(numbers)
                    continue
                count = min(ids.size - at, values.shape[0] - done)
                yield values[done : done + count], ids[at : at + count]
                done += count


def lookup(
    store: Store, asked: Sequence[str], node_type: str, back: bool
) -> tuple[list[str], list[str]]:
    """(a line for each id that is found: type, key and number with tabs; ids not found).

    back   look up keys by numbers, instead of numbers by keys

    Raises BadInput: no such type, or nodes without keys.
    """
    types = [t for t in store.manifest.types if node_type in ("", t.name)]
    if not types:
        known = ", ".join(t.name for t in store.manifest.types)
        raise BadInput.at("--type", repr(node_type), f"one of {known}", "correct it")
    held = {t.name: keys for t in types if (keys := NodeKeys(store, t)).known}
    if not held:
        raise BadInput.at(
            Path(store.path), "no ids but the numbers of nodes, from 0",
            f"{keys_of(store.path)}, or an array {KEY!r}, of an ingest of tables",
            "give the numbers to loaders as they are",
        )  # fmt: skip
    wrong = next((text for text in asked if back and not _is_integer(text)), None)
    if wrong is not None:
        raise BadInput.at("--back", repr(wrong), "numbers of nodes", "or leave --back out")
    lines, found = [], set[str]()
    for name, keys in held.items():
        numbers = keys.numbers(asked) if not back else {text: int(text) for text in asked}
        names = keys.keys([*numbers.values()]) if back else {n: t for t, n in numbers.items()}
        for text, number in numbers.items():
            if number in names:
                lines.append(f"{name}\t{names[number]}\t{number}")
                found.add(text)
    return lines, [text for text in asked if text not in found]


def _is_integer(text: str) -> bool:
    """Whether a text is an int64."""
    digits = text.removeprefix("-")
    return len(digits) < 20 and digits.isdecimal() and -(2**63) <= int(text) < 2**63
