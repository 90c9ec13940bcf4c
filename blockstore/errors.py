"""What can go wrong with a store, one class per thing a caller would do differently."""


class StoreError(Exception):
    """Base of everything that blockstore raises on its own account."""


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
    """The memory given cannot hold the work; the message says the least that would."""

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        """`least_bytes`: the same as a number, if whoever plans several works is to compare it."""
        super().__init__(message)
        self.least_bytes = least_bytes


class NotServed(StoreError):
    """The daemon of a store did not start."""


class StoreBusy(StoreError):
    """Another process is writing the same store."""


class PoolBroken(StoreError):
    """A defect of our own: slots of a pool are not free, or not pinned, as its caller was told."""
