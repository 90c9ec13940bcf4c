"""How often a test tries what it tries: some times in each run, more with `--long`."""

is_long = False  # set by conftest.py before any test is imported


def tries(ordinary: int, long: int) -> int:
    return long if is_long else ordinary
