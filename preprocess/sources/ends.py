"""The ends of edges, checked as they are read."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.kernels.edges import first_outside

Ends = tuple[NDArray[Any], NDArray[Any]]


def checked(
    pieces: Iterable[Ends],
    num_nodes: tuple[int, int],
    place: Callable[[int, int], str],
    remark: Callable[[int], str],
) -> Iterator[Ends]:
    """The pieces, (src, dst) each, as they are.  Raises BadInput: a node that there is not.

    num_nodes   of the types of both ends
    place       where an end (0 or 1) of an edge, counted from 0, stands
    remark      what to say of an end's nodes
    """
    done = 0
    for piece in pieces:
        for end, ids in enumerate(piece):
            bad = int(first_outside(ids, num_nodes[end]))
            if bad >= 0:
                raise BadInput.at(
                    place(end, done + bad), f"node id {ids[bad]}", f"0 to {num_nodes[end] - 1}",
                    remark(end),
                )  # fmt: skip
        yield piece
        done += piece[0].size
