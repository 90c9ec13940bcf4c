"""Random changes to plain values, such as a decoded message or manifest."""

from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 50, 63, 64, 255, 256, 1000, 4095, 4096, 4097, 8192, 2**16, 2**16 + 1,
    2**20, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**53, 2**62 - 1,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
FLOATS = (0.0, -1.0, -1.5, float("nan"), float("inf"), float("-inf"), 1e308, 1e-320)
TEXTS = (
    "", ".", "..", "/", "../x", "../../../../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b",
    "nodes/../../x", "x" * 300, "x/" * 3000, "\ud7ff\U0010ffff", "${HOME}", "%s%n", "uint8", "int8",
    "int64", "uint32", "uint64", "float64", "bfloat16", "object", "all", "train", "valid", "test",
    "auto", "minibatch", "hyperbatch", "macrobatch", "chunks", "rows", "new", "layer", "sym", "ppr",
    "node", "nodes", "./nodes", ".extend", "zarr.json",
)  # fmt: skip


def number(random: Random, old: int, more: Sequence[int] = ()) -> int:
    """Another number, near the old one or a limit; `more`: numbers with a meaning here."""
    near = (old - 1, old + 1, old * 2, old // 2, old ^ 1 << random.randrange(33), -old)
    return random.choice((*NUMBERS, *more, *near, *near, *near))


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value, at any depth."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in pairs:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += leaves(inner)
    return found


def change_value(tree: Any, random: Random, more: Sequence[int] = ()) -> str:
    """Replace one value, mostly by one of its type; returns a description."""
    ends = [(a, b) for a, b in leaves(tree) if not isinstance(a[b], dict | list)]
    inside, key = random.choice(ends)
    old = inside[key]
    if random.random() < 0.15:  # by one of another type
        inside[key] = random.choice((None, True, -5, 2**63, 1.5, "", [], {}, [1] * 1000))
    elif random.random() < 0.25:  # by one from elsewhere in the tree
        inside[key] = random.choice([a[b] for a, b in ends if type(a[b]) is type(old)])
    else:
        inside[key] = _alike(old, random, more)
    return f"{key} {old!r:.60} -> {inside[key]!r:.60}"


def _alike(old: Any, random: Random, more: Sequence[int]) -> Any:
    match old:
        case bool() | None:
            return not old
        case int():
            return number(random, old, more)
        case float():
            return random.choice(FLOATS)
        case bytes():  # 8-byte numbers: reorder, replace, add or drop some
            parts = [old[at : at + 8] for at in range(0, len(old), 8)]
            chosen = random.choices([*parts, random.randbytes(8)], k=random.randrange(6))
            return b"".join(random.choice((chosen, sorted(set(chosen)))))
        case _:
            return random.choice((*TEXTS, f"../{old}", f"/{old}", f"{old}/..", old[:-1]))


def change_shape(tree: Any, random: Random) -> str:
    """Remove, repeat, rename or replace a part; returns a description."""
    places = leaves(tree)
    inside, key = random.choice(places)
    how = random.choice(("remove", "swap", "repeat", "rename"))
    if how == "repeat" and isinstance(inside, list):
        inside += [inside[key]] * random.choice((1, 1, 15))
    elif how == "swap":
        other, at = random.choice(
            [(a, b) for a, b in places if isinstance(a[b], type(inside[key]))]
        )
        inside[key] = deepcopy(other[at])  # a copy, not an exchange: one part may contain the other
    elif how == "rename" and isinstance(inside, dict):
        inside[random.choice((*TEXTS, *inside))] = inside.pop(key)
    else:
        del inside[key]
    return f"{how} {key!r:.60}"
