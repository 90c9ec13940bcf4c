"""Properties of a dataset that describe its store; dicts if it has several types or relations."""

from abc import abstractmethod
from math import prod
from typing import Any, TypeVar

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Attached

K = TypeVar("K")
V = TypeVar("V")
_UNSAID = {"token", "request"}  # fields of a request without meaning for a script
_FIELDS = [name for name in Attach.__struct_fields__ if name not in _UNSAID]


class Describing:
    """A dataset's description of its store; all but its own request connects to the daemon."""

    endpoint: str
    _request: Attach

    @abstractmethod
    def attached(self) -> Attached:
        """What the daemon resolved the request to; connects."""

    @abstractmethod
    def counted(self) -> Attached:
        """As `attached`, with the number of classes; the daemon counts on the first request."""

    @property
    def node_types(self) -> tuple[str, ...]:
        return self.attached().types

    @property
    def edge_types(self) -> tuple[tuple[str, str, str], ...]:
        return self.attached().relations

    @property
    def num_nodes(self) -> int | dict[str, int]:
        return _only(self._by_type("num_nodes"))

    @property
    def num_edges(self) -> int | dict[tuple[str, str, str], int]:
        """Edges of the store; each edge of an undirected one counts twice."""
        found = self.attached()
        counts = (r.num_edges for r in found.relation_info)
        return _only(dict(zip(found.relations, counts, strict=True)))

    @property
    def num_features(self) -> int | dict[str, int]:
        """Numbers in a row of `x`; 0 for a type without features."""
        arrays = self._by_type("arrays")
        return _only({t: prod(own["x"]) if "x" in own else 0 for t, own in arrays.items()})

    @property
    def num_classes(self) -> int | dict[str, int]:
        """Classes of the labels, or columns of label rows; 0 for a type without labels.

        On the first request the daemon reads all labels once.
        """
        found = self.counted()
        counts = {t: info.num_classes for t, info in zip(found.types, found.type_info, strict=True)}
        if None in counts.values():
            raise Refused(
                f"{self.endpoint}: the daemon counts no classes, expected one of this version; "
                "start it again"
            )
        return _only({t: count or 0 for t, count in counts.items()})

    @property
    def features(self) -> dict[str, Any]:
        """Shapes of rows by the names that `features` and `labels` take; labels are "y"."""
        return _only(self._by_type("arrays"))

    @property
    def splits(self) -> dict[str, Any]:
        """Nodes of each split."""
        return _only(self._by_type("splits"))

    def _by_type(self, name: str) -> dict[str, Any]:
        found = self.attached()
        values = (getattr(info, name) for info in found.type_info)
        return dict(zip(found.types, values, strict=True))

    def __repr__(self) -> str:
        """The endpoint, and the options that differ from their defaults; does not connect."""
        words = [repr(self.endpoint)]
        for name in _FIELDS:
            value = getattr(self._request, name)
            if value != getattr(_PLAIN, name) or name == "batch_size":
                words.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"


_PLAIN = Attach(token=0, request=0)


def _only(found: dict[K, V]) -> V | dict[K, V]:
    """The value of the only type or relation, or a dict of all by name."""
    return next(iter(found.values())) if len(found) == 1 else found
