"""Byte counts to and from text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.units import format_bytes, parse_bytes

FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096), ("64K", 65536), ("512M", 512 << 20), ("2G", 2 << 30), ("1T", 1 << 40),
        ("1.5G", 3 << 29), ("64KiB", 65536), ("64kb", 65536), ("7B", 7), ("  2 g ", 2 << 30),
        ("0.5K", 512), ("0.0009765625K", 1),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", " ", "G", "0", "0G", "0.0001", "-1", "+1", "1e3", "1,5G", ".5G", "5.G", "2GG", "2P",
     "nan", "inf", "0x10", "1 000", "2G 3M"],
)  # fmt: skip
def test_what_is_no_positive_size_is_refused_and_quoted(text):
    with pytest.raises(
        ValueError, match=f"^{re.escape(repr(text))} is not a size such as 64K, 512M or 2G$"
    ):
        parse_bytes(text)


@pytest.mark.parametrize("digits", ["9007199254740993", "9" * 400])
def test_sizes_that_no_float_holds(digits):
    assert parse_bytes(f"{digits}K") == int(digits) * 1024


@given(count=st.integers(1, 2**60), unit=st.sampled_from(sorted(FACTORS)))
def test_whole_counts_are_exact_in_every_unit(count, unit):
    assert parse_bytes(f"{count}{unit}") == count * FACTORS[unit]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"), (1, "1B"), (1023, "1023B"), (1024, "1K"), (1536, "1.5K"), (1 << 20, "1M"),
        (1_000_000, "977K"), (1 << 40, "1T"), ((1 << 20) - 1, "1024K"), (3 << 29, "1.5G"),
        (1_023_692, "1000K"),
        (12345 << 40, "12345T"),
    ],
)  # fmt: skip
def test_counts_as_people_read_them(count, text):
    assert format_bytes(count) == text


@given(count=st.integers(0, 2**53))
def test_what_is_shown_is_near_and_can_be_given_back(count):
    """Three digits: half a unit of the last one is at most 1 / 200 of the number."""
    text = format_bytes(count)
    assert re.fullmatch(r"\d+(\.\d+)?[BKMGT]", text)
    if count:
        assert abs(parse_bytes(text) - count) <= count / 200
