"""Objects that have to be closed, as context managers."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that ends with `close`, also after an error."""

    @abstractmethod
    def close(self) -> None:
        """Close it; it is not used any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
