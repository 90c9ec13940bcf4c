"""Byte counts as people write them: `2G`, `512M`, `64K`, `4096`."""

import re
from fractions import Fraction

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The number of bytes that `text` names; K, M, G, T are powers of 1024.

    Raises ValueError: not a positive number with an optional unit.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or (count := int(Fraction(match[1]) * _FACTORS[match[2].upper()])) <= 0:
        raise ValueError(f"{text!r} is not a size such as 64K, 512M or 2G")
    return count


def format_mem(num_bytes: int) -> str:
    """The least value of `--mem`, in whole units, that holds `num_bytes`: `1100M`.

    It is never less than `num_bytes`, unlike `format_bytes`, so that it can be given as the option.
    The unit is MiB, or the first larger one in which the number has five digits at most.
    """
    for unit in "MGT":
        count = -(-num_bytes // _FACTORS[unit])
        if count < 100_000:
            break
    return f"{count}{unit}"


def format_bytes(count: int) -> str:
    """`count` bytes for a person: three or four digits and a unit, `1.5G`."""
    if count < 1024:
        return f"{count}B"
    size = float(count)
    for unit in "KMGT":
        size /= 1024
        if size < 1024 or unit == "T":
            break
    return f"{size:.3g}{unit}" if size < 999.5 else f"{size:.0f}{unit}"
