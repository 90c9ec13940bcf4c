"""Errors of stores: one class for each case that a caller would handle differently."""


class StoreError(Exception):
    """Base of all errors that blockstore itself raises."""


class NotAStore(StoreError):
    """The path does not hold a store."""


class StoreExists(StoreError):
    """The path to be written is already taken."""


class UnsupportedVersion(StoreError):
    """The store, or a block in it, has a format version that this code does not read."""


class CorruptBlock(StoreError):
    """Bytes on disk are not what was written: wrong checksum, short file, impossible header."""


class AbsentRows(StoreError):
    """Rows that are not in this part of a store but with another server."""


class OutOfSpace(StoreError):
    """The disk has no room for what is to be written."""


class BudgetTooSmall(StoreError):
    """The memory given cannot hold the work; the message names the least that would."""

    def __init__(self, message: str, min_bytes: int = 0) -> None:
        """`min_bytes`: the same as a number, for callers that compare several of these."""
        super().__init__(message)
        self.min_bytes = min_bytes


class NotServed(StoreError):
    """The daemon of a store did not start."""


class StoreBusy(StoreError):
    """Another process is writing the same store."""


class PoolBroken(StoreError):
    """A defect of our own: slots of a pool are not free, or not pinned, as its caller believes."""
