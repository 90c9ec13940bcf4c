"""Ids of keys, with little memory and with much, against a dict."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall
from preprocess.errors import BadInput
from preprocess.files.arrow import Texts
from preprocess.sources import idmap
from preprocess.sources.idmap import KeyColumn, KeyMap, map_keys, table_bytes_of

LARGE = 1 << 20
TINY = 1200  # a pass numbers 40 keys
LEAST = 1000  # a pass numbers a few keys


def texts(keys: list[bytes]) -> Texts:
    offsets = np.cumsum([0, *map(len, keys)]).astype(np.int64)
    return Texts(offsets, np.frombuffer(b"".join(keys), np.uint8))


def key_column(keys: list[bytes], path: Path, piece: int = 5) -> KeyColumn:
    """Keys in pieces, each reading of which is the same."""

    def pieces() -> Iterator[Texts]:
        yield from (texts(keys[i : i + piece]) for i in range(0, len(keys), piece))

    return KeyColumn(pieces, lambda row: f"{path.name}:{row + 1}", path)


def run(
    folder: Path, defined: list[bytes] | None, referring: list[list[bytes]], table_bytes: int
) -> tuple[KeyMap, list[list[int]]]:
    """The map, and the ids of each referring column."""
    first = None if defined is None else key_column(defined, folder / "nodes")
    others = [key_column(keys, folder / f"edges{i}") for i, keys in enumerate(referring)]
    done = []
    found = map_keys(first, others, folder, table_bytes, bytes.decode, done.append)
    assert sum(done) == len(defined or []) + sum(map(len, referring))
    ids = [np.fromfile(o.ids, found.dtype).tolist() for o in others]
    assert found.rows == tuple(len(keys) for keys in referring)
    assert {p.name for p in folder.iterdir()} == {o.ids.name for o in others}
    return found, ids


# runs of one letter differ by their length alone; others by one byte
KEYS = st.one_of(
    st.binary(max_size=3),
    st.integers(0, 40).map(lambda n: b"a" * n),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: n.to_bytes(8, "little", signed=True)),
)


@given(
    nodes=st.lists(KEYS, min_size=1, max_size=120, unique=True), data=st.data(),
    sizes=st.sampled_from([LARGE, TINY, LEAST]),
)  # fmt: skip
def test_keys_that_nodes_define(tmp_path_factory, nodes, data, sizes):
    folder = tmp_path_factory.mktemp("map")
    rows = st.lists(st.sampled_from(nodes), max_size=60)
    referring = [data.draw(rows) for _ in range(data.draw(st.integers(0, 3)))]
    number = {key: i for i, key in enumerate(nodes)}
    found, ids = run(folder, nodes, referring, sizes)
    assert found.num_keys == len(nodes)
    assert ids == [[number[key] for key in keys] for keys in referring]


@given(
    referring=st.lists(st.lists(KEYS, max_size=80), min_size=1, max_size=4),
    sizes=st.sampled_from([LARGE, TINY, LEAST]),
)
def test_keys_by_first_appearance(tmp_path_factory, referring, sizes):
    number: dict[bytes, int] = {}
    for key in (key for keys in referring for key in keys):
        number.setdefault(key, len(number))
    found, ids = run(tmp_path_factory.mktemp("map"), None, referring, sizes)
    assert found.num_keys == len(number)
    assert ids == [[number[key] for key in keys] for keys in referring]


def test_many_keys_in_several_passes_are_as_in_one(tmp_path: Path):
    rng = np.random.default_rng(3)
    nodes = [f"node {n:x}".encode() for n in rng.permutation(10_000)]
    edges = [nodes[i] for i in rng.integers(0, len(nodes), 15_000)]
    for defined in (nodes, None):
        maps = [run(tmp_path, defined, [edges], s) for s in (1 << 15, 8 << 20)]
        assert maps[0] == maps[1]


@pytest.mark.parametrize("sizes", [LARGE, TINY])
def test_keys_of_one_hash_stay_apart(tmp_path: Path, monkeypatch, sizes: int):
    """Of 30 keys every hash is the same: only their bytes tell them apart."""

    def same(offsets, data, out):
        out[:] = 7

    monkeypatch.setattr(idmap, "hash_keys", same)
    nodes = [bytes([i // 5, i % 5]) for i in range(30)]
    _, ids = run(tmp_path, nodes, [nodes[::-1]], sizes)
    assert ids == [list(range(30))[::-1]]


SPOILED: dict[str, tuple[Callable[[list[bytes], list[bytes]], object], str]] = {
    "twice": (
        lambda nodes, _: nodes.append(nodes[7]),
        "nodes:101: found node id key 7 again, first in nodes:8, expected each node once",
    ),
    "unknown": (
        lambda _, edges: edges.insert(33, b"stranger"),
        "edges0:34: found node id stranger, expected one that the table of nodes has",
    ),
}


@pytest.mark.parametrize("sizes", [LARGE, TINY])
@pytest.mark.parametrize("name", SPOILED)
def test_refusals_name_the_row(tmp_path: Path, name: str, sizes: int):
    nodes = [b"key %d" % i for i in range(100)]
    edges = nodes[::-1]
    spoil, words = SPOILED[name]
    spoil(nodes, edges)
    with pytest.raises(BadInput) as caught:
        run(tmp_path, nodes, [edges], sizes)
    assert str(caught.value).startswith(words)
    assert not list(tmp_path.glob("keymap-*"))


@pytest.mark.parametrize("sizes", [LARGE, TINY])
def test_ids_become_wider_where_uint32_does_not_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: int
):
    nodes = [b"key %d" % i for i in range(100)]
    done: list[int] = []
    for maximum, dtype in ((100, np.uint32), (99, np.uint64)):
        monkeypatch.setattr(idmap, "_NARROW", maximum)
        column = key_column(nodes[::-1], tmp_path / "edges")
        first = key_column(nodes, tmp_path / "nodes")
        found = map_keys(first, [column], tmp_path, sizes, bytes.decode, done.append)
        assert found.dtype == dtype
        assert np.fromfile(column.ids, dtype).tolist() == list(range(100))[::-1]


def test_a_key_that_does_not_fit_says_so(tmp_path: Path):
    with pytest.raises(BudgetTooSmall, match="a key too long"):
        run(tmp_path, [b"key", b"k" * 2000], [], TINY)
    with pytest.raises(BudgetTooSmall, match="expected at least --mem 16M"):
        table_bytes_of(1 << 20)


@pytest.mark.parametrize("max_bytes", [5_000, 70_000, 1 << 20])
def test_tables_grow_within_what_they_are_given(max_bytes: int):
    table, i = idmap._Table(max_bytes), 0
    while not table.is_full:
        i += 1
        table.find(texts([b"%d %d" % (i, k) for k in range(64)]), idmap.DEFINE)
    arrays = (table._slots, table._hashes, table._starts, table._held)
    assert max_bytes // 8 < sum(a.nbytes for a in arrays) <= max_bytes + 64
