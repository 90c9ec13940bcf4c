"""Pages and rows that are not on this disk: they come from other servers, or from object storage.

A reader asks its files where their pages are.  Tasks that may wait for others run in threads of
their own, so that the threads that read the disk never wait.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockstore.io.threads import Task


class Elsewhere(Protocol):
    """What all of these sources can do."""

    def put(self, task: Task) -> None:
        """Run a task, which raises nothing, in a thread that may wait for the source."""

    def hurry(self) -> None:
        """Wait for nobody any more: requests fail."""

    def close(self) -> None:
        """End its threads; nothing is asked for any more."""

    def counters(self) -> dict[str, int]:
        """What it has done so far."""


# Copies rows, uint8, one after the other; returns their crc32c.  If rows arrived with another one,
# it is called again when they have come again.
Take = Callable[[NDArray[np.uint8]], int]


class RemoteRows(Elsewhere, Protocol):
    """Source of rows that other servers have."""

    def num_rows(self, path: str) -> int:
        """Rows of an array, here and on all other servers together."""

    def max_rows(self, path: str) -> int:
        """Rows of an array that may be asked for at once."""

    def ask(self, server: int, path: str, rows: NDArray[np.int64], take: Take) -> None:
        """Have `take` copy rows of an array, ascending.  Raises StoreError: they do not come."""


class Arrived(NamedTuple):
    """Adjacent pages of an array that have just come, are verified, and still are in memory."""

    first: int  # number of the first, counted through all shards
    body: NDArray[np.uint8]


class PageSource(Elsewhere, Protocol):
    """Source of the pages of a store's files, which are kept in these files."""

    url: str
    memory_bytes: int  # that it takes

    @property
    def roomy(self) -> bool:
        """Whether threads that wait for a buffer may hold pages."""

    def hold(
        self, path: str, pages: NDArray[np.int64], crcs: NDArray[Any], early: bool
    ) -> AbstractContextManager[Sequence[Arrived]]:
        """Inside, these pages of an array are in its files, and stay there.

        Some of those that had to be fetched need not be read from the files: they are yielded,
        ascending.

        pages   int64   numbers of pages, counted through all shards as `crcs` counts them
        crcs    uint32  of all pages of the array
        early   the thread may wait inside for one that holds pages; only if there is room

        Raises StoreError: they do not come.
        """

    def expect(self, reader: object, path: str, pages: NDArray[np.int64], later: bool) -> None:
        """Announce pages of an array that a reader will want: others are evicted before them.

        reader   announces them, until it calls `forget`
        pages    int64   numbers of pages as `hold` takes them, in any order, some may repeat
        later    not in its coming pass, which ascends through the array, but after that
        """

    def had(self, reader: object, path: str, pages: NDArray[np.int64]) -> None:
        """A reader has read pages in its coming pass."""

    def forget(self, reader: object) -> None:
        """Drop all that a reader has announced."""

    def bring_again(self, path: str, pages: NDArray[np.int64], crcs: NDArray[Any]) -> None:
        """Fetch held pages again, which are not as they were written.  Raises StoreError."""
