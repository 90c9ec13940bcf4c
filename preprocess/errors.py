"""What can be wrong with an input."""


class BadInput(ValueError):
    """A source cannot be taken as it is; the message names file, place, found and expected."""

    @classmethod
    def at(cls, where: object, found: object, expected: object, remedy: str) -> "BadInput":
        """The one form of message: `<file>: <place>: found X, expected Y; what to do`."""
        return cls(f"{where}: found {found}, expected {expected}; {remedy}")


class ExecutorLost(Exception):
    """The processes that run tasks are gone, or a task has ended too many of them."""
