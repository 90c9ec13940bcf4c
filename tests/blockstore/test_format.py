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
    EdgeLayout,
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
    id_bits,
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
    assert facts["smallest block"] == f"{fmt.PAGE_BYTES} bytes"
    assert facts["largest shard"] == f"{fmt.SHARD_BYTES} bytes of slots"
    assert facts["manifest attribute"] == fmt.MANIFEST_KEY
    assert facts["fingerprint attribute"] == fmt.FINGERPRINT_KEY
    assert TEXT.startswith(f"# Store format, version {fmt.FORMAT_VERSION}\n")


def test_the_header_is_that_of_the_document():
    rows = table("offset")
    letters = {"uint16": "H", "uint32": "I", "uint64": "Q", "bytes": "4s", "zeros": "16x"}
    assert "<" + "".join(letters[r[2]] for r in rows) == fmt.BLOCK_HEADER.format
    at = 0
    for offset, size, kind, *_ in rows:
        assert int(offset) == at
        assert struct.calcsize("<" + letters[kind]) == int(size)
        at += int(size)
    assert at == fmt.BLOCK_HEADER.size
    assert [r[3] for r in rows[2:-1]] == list(BlockHeader._fields)
    places = {r[3]: int(r[0]) for r in rows}
    assert all(places[name] == at for name, at in fmt.FIELD_OFFSETS.items())


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
    header = BlockHeader(3, 5, 7, 11, 13, 2, 18, 2**40)
    assert BlockHeader.unpack(header.pack(), "here") == header


def test_a_header_of_another_kind_is_refused():
    raw = bytearray(BlockHeader(0, 0, 0, 0, 0, 0, 18, 0).pack())
    with pytest.raises(UnsupportedVersion, match="unknown flag bits 0x20"):
        BlockHeader.unpack(BlockHeader(33, 0, 0, 0, 0, 0, 18, 0).pack(), "here")
    raw[4] = 1
    with pytest.raises(UnsupportedVersion, match="block format 1, this code reads 2"):
        BlockHeader.unpack(bytes(raw), "here")
    raw[0] = 0
    with pytest.raises(CorruptBlock, match="magic"):
        BlockHeader.unpack(bytes(raw), "here")


@pytest.mark.parametrize("block_bytes", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("edge_ids", [0, 4, 8])
@pytest.mark.parametrize("others", [(0, 0), (4, 0), (0, 8), (4, 8)])
@pytest.mark.parametrize("bits", [1, 17, 24, 32, 56])
def test_a_column_fills_its_block_and_no_more(block_bytes, bits, edge_ids, others):
    layout = EdgeLayout("uint64", bits, 0, edge_ids, *others)
    capacity = layout.capacity(block_bytes)
    assert layout.sections(1, capacity)[-1] <= block_bytes
    assert layout.sections(1, capacity + 1)[-1] > block_bytes


def test_sections_begin_at_multiples_of_eight():
    """Sources are 8 bytes more than they need, in whole words."""
    assert EdgeLayout("uint32", 24, 0, 4, 4, 8).sections(1, 3) == [72, 96, 112, 128, 152]
    assert EdgeLayout("uint32", 21, 0, 0, 4, 0).sections(1, 3) == [72, 88, 88, 100, 100]
    assert EdgeLayout("uint32", 22, 0, 0, 0, 0).sections(1, 3) == [72, 96, 96, 96, 96]
    assert EdgeLayout("uint32", 56, 0, 4, 4, 8).sections(2, 0) == [80, 80, 80, 80, 80]


@pytest.mark.parametrize(("nodes", "bits"), [(0, 1), (1, 1), (2, 1), (3, 2), (256, 8), (257, 9)])
def test_a_source_has_the_bits_that_numbers_of_its_type_need(nodes, bits):
    assert id_bits(nodes) == bits
    assert id_bits(1 << fmt.MAX_ID_BITS) == fmt.MAX_ID_BITS
