"""Checks of a script's options when they are given: a daemon gets no value of a wrong type."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach

MAX_EPOCH = 2**63 - 1
_FIELDS = msgspec.structs.fields(Attach)
_CALLED = {"seed_type": "input_type"}  # fields that have another name in datasets


def checked_request(request: Attach) -> Attach:
    """The request with NumPy integers as plain ones.  Raises Refused: a field of a wrong type."""
    plain: dict[str, Any] = {}
    for field in _FIELDS:
        value = getattr(request, field.name)
        try:
            sent = msgspec.msgpack.encode(value, enc_hook=operator.index)
            plain[field.name] = msgspec.msgpack.decode(sent, type=field.type)
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            name = _CALLED.get(field.name, field.name)
            raise Refused(f"{name}: found {value!r}: {error}") from error
    return Attach(**plain)


def checked_epoch(epoch: Any) -> int:
    """The epoch as an integer.  Raises Refused."""
    try:
        number = operator.index(epoch)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_EPOCH:
        raise Refused(f"epoch: found {epoch!r}, expected an integer from 0 to {MAX_EPOCH}")
    return number


def fanouts_of_hops(fanouts: Any, option: str = "num_neighbors") -> tuple[int, ...]:
    """Fanouts, hop by hop, as integers.  Raises Refused: a text, a single number, a fraction."""
    try:
        if isinstance(fanouts, str) or not isinstance(fanouts, Iterable):
            raise TypeError
        return tuple(operator.index(k) for k in fanouts)
    except TypeError as error:
        raise Refused(
            f"{option}: found {fanouts!r}, expected an integer for each hop, such as [15, 10]"
        ) from error


def relation_name(relation: Any) -> str:
    """A relation as the protocol names it.  Raises Refused."""
    parts = tuple(relation) if isinstance(relation, Iterable) else ()
    if isinstance(relation, str) or len(parts) != 3 or not all(isinstance(p, str) for p in parts):
        raise Refused(
            f"relation: found {relation!r}, expected (source type, name, target type), such as "
            "('paper', 'cites', 'paper')"
        )
    return "__".join(parts)


def fanout_fields(num_neighbors: Any) -> dict[str, Any]:
    """Fields of `Attach` for a list of fanouts, or one for each relation; the daemon refuses
    relations that its store does not have."""
    if not isinstance(num_neighbors, Mapping):
        return {"num_neighbors": fanouts_of_hops(num_neighbors)}
    items = num_neighbors.items()
    return {"fanouts": {relation_name(r): fanouts_of_hops(fanouts) for r, fanouts in items}}
