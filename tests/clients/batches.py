"""Batches compared field by field, to the bit and the dtype."""

import hashlib
from dataclasses import fields
from typing import Any

from tests.golden_cases import update


def digest(value: Any) -> str:
    """sha256 of a batch or a field of one, dtypes and shapes included."""
    found = hashlib.sha256()
    update(found, "", value)
    return found.hexdigest()


def different_fields(found: Any, expected: Any) -> list[str]:
    """The fields in which two records differ."""
    names = [f.name for f in fields(expected)]
    return [n for n in names if digest(getattr(found, n)) != digest(getattr(expected, n))]
