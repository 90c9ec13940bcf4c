"""What a dataset tells of its store; of several node types and relations as dicts."""

from abc import abstractmethod
from math import prod
from typing import Any, TypeVar

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Attached

K = TypeVar("K")
V = TypeVar("V")
_UNSAID = {"token", "request"}  # fields of a request that mean nothing to a script
_FIELDS = [name for name in Attach.__struct_fields__ if name not in _UNSAID]


class Describing:
    """A dataset that is asked about its store; what is not of its own request connects."""

    endpoint: str
    _request: Attach

    @abstractmethod
    def attached(self) -> Attached:
        """What the daemon resolved the request to; connects."""

    @abstractmethod
    def counted(self) -> Attached:
        """The same, with the number of classes, which the daemon counts when it is first asked."""

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
        """Edges of the store; of an undirected one each counts twice."""
        found = self.attached()
        counts = (r.num_edges for r in found.relation_info)
        return _only(dict(zip(found.relations, counts, strict=True)))

    @property
    def num_features(self) -> int | dict[str, int]:
        """Numbers of a row of `x`; 0 of a type without."""
        arrays = self._by_type("arrays")
        return _only({t: prod(own["x"]) if "x" in own else 0 for t, own in arrays.items()})

    @property
    def num_classes(self) -> int | dict[str, int]:
        """Classes of the labels, or columns of rows of labels; 0 of a type without.

        The first to ask has the daemon read the labels once.
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
        """The endpoint, and what was asked for in another way than by default; connects nowhere."""
        words = [repr(self.endpoint)]
        for name in _FIELDS:
            value = getattr(self._request, name)
            if value != getattr(_PLAIN, name) or name == "batch_size":
                words.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"


_PLAIN = Attach(token=0, request=0)


def _only(found: dict[K, V]) -> V | dict[K, V]:
    """The value of the only type or relation, or all by their names."""
    return next(iter(found.values())) if len(found) == 1 else found
