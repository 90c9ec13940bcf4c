"""Errors of preprocessing: bad input, and lost executors."""


class BadInput(ValueError):
    """An input cannot be used as it is; the message names file, place, found and expected."""

    @classmethod
    def at(cls, where: object, found: object, expected: object, remedy: str) -> "BadInput":
        """Build a message of the form `<file>: <place>: found X, expected Y; what to do`."""
        return cls(f"{where}: found {found}, expected {expected}; {remedy}")


class ExecutorLost(Exception):
    """The worker processes are gone, or one task has killed too many of them."""
