"""Objects that have to be closed, as context managers."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A `with` that ends by `close`, also if an error leaves it."""

    @abstractmethod
    def close(self) -> None:
        """End it; it is used no more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
