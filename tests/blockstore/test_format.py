"""FORMAT.md against the code that claims to implement it."""

import re
import struct
from pathlib import Path

import msgspec
import pytest

from blockstore import format as fmt
from blockstore.errors import CorruptBlock, UnsupportedVersion
from blockstore.format import (
    BlockHeader,
    Halo,
    HaloColumns,
    HopSet,
    Influence,
    Kept,
    Manifest,
    NodeType,
    Partitioning,
    Relation,
    RowArray,
    block_fill_bytes,
    column_capacity,
    gapless_rows,
    row_geometry,
    section_offsets,
)

TEXT = (Path(fmt.__file__).parent / "FORMAT.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Rows of the table whose first header cell is `heading`, cells stripped of backticks."""
    rows = []
    lines = iter(TEXT.splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    return rows
                rows.append([c.strip().strip("`") for c in row.strip("|").split("|")])
    raise AssertionError(f"FORMAT.md has no table {heading!r}")


def test_constants_are_those_of_the_document():
    facts = dict(table("fact"))
    assert facts["format version"] == str(fmt.FORMAT_VERSION)
    assert facts["page"] == f"{fmt.PAGE_BYTES} bytes"
    assert facts["default block"] == f"{fmt.DEFAULT_BLOCK_BYTES} bytes"
    assert facts["smallest block"] == f"{fmt.MIN_BLOCK_BYTES} bytes"
    assert facts["largest shard"] == f"{fmt.SHARD_BYTES} bytes of slots"
    assert facts["manifest attribute"] == fmt.MANIFEST_KEY
    assert facts["fingerprint attribute"] == fmt.FINGERPRINT_KEY
    assert TEXT.startswith(f"# Store format, version {fmt.FORMAT_VERSION}\n")


def test_the_header_is_that_of_the_document():
    rows = table("offset")
    letters = {"uint16": "H", "uint32": "I", "uint64": "Q", "bytes": "4s", "zeros": "24x"}
    assert "<" + "".join(letters[r[2]] for r in rows) == fmt.BLOCK_HEADER.format
    at = 0
    for offset, size, kind, *_ in rows:
        assert int(offset) == at
        assert struct.calcsize("<" + letters[kind]) == int(size)
        at += int(size)
    assert at == fmt.BLOCK_HEADER.size
    assert [r[3] for r in rows[2:-1]] == list(BlockHeader._fields)
    places = {r[3]: int(r[0]) for r in rows}
    for name in ("last_degree", "num_nodes", "num_edges", "num_carried", "edges_start"):
        assert getattr(fmt, f"{name.upper()}_OFFSET") == places[name]


def test_flags_are_those_of_the_document():
    flags = {name: int(bit) for bit, name, _ in table("flag")}
    assert flags == {n: getattr(fmt, n) for n in flags}
    assert sum(flags.values()) == fmt.KNOWN_FLAGS


@pytest.mark.parametrize(
    ("heading", "record"),
    [
        ("field", Manifest),
        ("field of a partitioning", Partitioning),
        ("field of an influence", Influence),
        ("field of what is kept", Kept),
        ("field of a type", NodeType),
        ("field of a relation", Relation),
        ("field of a row array", RowArray),
        ("field of a halo", Halo),
        ("field of a hop set", HopSet),
        ("field of halo columns", HaloColumns),
    ],
)
def test_records_are_those_of_the_document(heading: str, record: type[msgspec.Struct]):
    assert [r[0] for r in table(heading)] == list(record.__struct_fields__)


def test_row_dtypes_are_those_of_the_document():
    line = re.search(r"^Row dtypes: ([^.]*)\.$", TEXT, re.MULTILINE)
    assert line is not None
    assert re.findall(r"`(\w+)`", line[1]) == list(fmt.ITEM_BYTES)


def test_a_header_comes_back():
    header = BlockHeader(3, 5, 7, 11, 13, 2, 18)
    assert BlockHeader.unpack(header.pack(), "here") == header


def test_a_header_of_another_kind_is_refused():
    raw = bytearray(BlockHeader(0, 0, 0, 0, 0, 0, 18).pack())
    with pytest.raises(CorruptBlock, match=r"here: header has 63 bytes, needs 64"):
        BlockHeader.unpack(bytes(raw[:63]), "here")
    with pytest.raises(UnsupportedVersion, match="unknown flag bits 0x20"):
        BlockHeader.unpack(BlockHeader(33, 0, 0, 0, 0, 0, 18).pack(), "here")
    raw[4] = 2
    with pytest.raises(UnsupportedVersion, match="block format 2, this code reads 1"):
        BlockHeader.unpack(bytes(raw), "here")
    raw[0] = 0
    with pytest.raises(CorruptBlock, match="magic"):
        BlockHeader.unpack(bytes(raw), "here")


@pytest.mark.parametrize("block_bytes", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("edge_ids", [0, 4, 8])
@pytest.mark.parametrize("others", [(), (0, 0), (4, 0), (0, 8), (4, 8)])
@pytest.mark.parametrize("ids", [4, 8])
def test_a_column_fills_its_block_and_no_more(block_bytes, ids, edge_ids, others):
    capacity = column_capacity(block_bytes, ids, edge_ids, *others)
    assert block_fill_bytes(1, capacity, ids, edge_ids, *others) <= block_bytes
    assert block_fill_bytes(1, capacity + 1, ids, edge_ids, *others) > block_bytes


def test_sections_begin_at_multiples_of_eight():
    assert section_offsets(1, 3, (4, 4, 4, 8)) == [72, 88, 104, 120, 144]
    assert section_offsets(1, 3, (4, 0, 4, 0)) == [72, 84, 88, 100, 100]


def test_rows_wider_than_a_block_take_whole_slots():
    wide = row_geometry(RowArray("x", "float32", 10, (5000,)), 16384)
    assert (wide.rows_per_block, wide.chunk_bytes, wide.slot_bytes) == (1, 20000, 32768)
    narrow = row_geometry(RowArray("x", "float32", 10, (1000,)), 16384)
    assert (narrow.rows_per_block, narrow.chunk_bytes, narrow.num_blocks) == (4, 16000, 3)


@pytest.mark.parametrize("row_bytes", [1, 4, 77, 100, 512, 4096, 5732])
@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("num_rows", [0, 1, 5000, 10_000_000])
def test_gapless_rows_fill_whole_pages(row_bytes, block_bytes, num_rows):
    rows = gapless_rows(row_bytes, block_bytes, num_rows)
    found = row_geometry(RowArray("x", "uint8", num_rows, (row_bytes,), rows_per_block=rows), 4096)
    assert found.slot_bytes == found.chunk_bytes == rows * row_bytes
    assert found.slot_bytes % fmt.PAGE_BYTES == 0
    unit = min(n for n in range(1, 4097) if n * row_bytes % 4096 == 0)
    assert rows % unit == 0
    distance = abs(rows * row_bytes - block_bytes)
    assert rows - unit < num_rows or rows == unit
    if rows < num_rows:  # not cut: nothing is closer
        near = [n for n in (rows - unit, rows + unit) if n]
        assert all(distance <= abs(n * row_bytes - block_bytes) for n in near)


def test_rows_without_gaps_that_do_not_fill_pages_are_refused():
    with pytest.raises(CorruptBlock, match="3 rows of 4 bytes a block, expected whole pages"):
        row_geometry(RowArray("x", "float32", 10, rows_per_block=3), 4096)
