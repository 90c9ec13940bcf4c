"""Sizes of a bench in a test, and what it found."""

TINY = ["--nodes", "3000", "--degree", "8", "--features", "16"]


def by_side(lines):
    return {line["side"]: line for line in lines}
