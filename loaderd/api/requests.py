"""What clients may ask for: bounds on the fields of their messages, in one place."""

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import Attach, RowChoice, RowsWanted, SeedEdges, Start, Temporal

MAX_WINDOW = 1024
MAX_HYPERBATCH = 1 << 16
MAX_PARTITIONS = 1 << 32
MAX_REUSE = 4
MAX_WORLD = 1 << 16
MAX_BATCH = 1 << 24
MAX_IDS = 1 << 24  # seeds given by id
MAX_NAME = 256  # characters of a split, plan, operator or node type
MAX_OPERATORS = 64
MAX_OPTIONS = 64
MAX_RELATIONS = 1 << 12
MAX_NEGATIVES = 1 << 16  # for an edge
MAX_POSITION = 1 << 62  # kernels count in int64
MAX_ROW_IDS = 1 << 14  # of one request of a peer
MAX_ROW_BYTES = 1 << 20  # of the answer


def _within(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise Refused(f"{name} is {value}, expected {minimum} to {maximum}")


def check_attach(request: Attach) -> None:
    """Raises Refused.  What depends on the store (split, fanouts, ids) is checked by the engine."""
    _within("batch_size", request.batch_size, 1, MAX_BATCH)
    _within("world_size", request.world_size, 1, MAX_WORLD)
    _within("rank", request.rank, 0, request.world_size - 1)
    _within("window", request.window, 0, MAX_WINDOW)
    _within("hyperbatch", request.hyperbatch, 0, MAX_HYPERBATCH)
    _within("macro_partitions", request.macro_partitions, 0, MAX_PARTITIONS)
    _within("reuse", request.reuse, 1, MAX_REUSE)
    _within("seed", request.seed, 0, 2**63 - 1)
    _within("mask_size", request.mask_size, 0, 2**63 - 1)
    _within("hops", request.hops, -1, MAX_POSITION)
    _within("chunk", request.chunk, 0, MAX_POSITION)
    _within("redeal", request.redeal, 0, MAX_POSITION)
    _within("cycle", request.cycle, 0, MAX_POSITION)
    if request.home is not None:
        _within("home.time_steps", request.home.time_steps, 0, request.world_size)
    _within("number of operators", len(request.operators), 0, MAX_OPERATORS)
    for name in request.operators:
        if len(name) > MAX_NAME:
            raise Refused(f"an operator has {len(name)} characters, expected at most {MAX_NAME}")
    for name in ("plan", "store", "split", "seed_type", "frontier", "owners"):
        if len(value := getattr(request, name)) > MAX_NAME:
            raise Refused(f"{name} has {len(value)} characters, expected at most {MAX_NAME}")
    _within("number of relations in fanouts", len(request.fanouts), 0, MAX_RELATIONS)
    _within("number of options in subgraph", len(request.subgraph), 0, MAX_OPTIONS)
    for name in request.subgraph:
        _within("characters of an option in subgraph", len(name), 0, MAX_NAME)
    if request.rows is not None:
        _check_choice(request.rows)
    if request.edges is not None:
        _check_edges(request.edges)
    if request.temporal is not None:
        _check_temporal(request.temporal)
    if request.labor is not None:
        _within("labor.batch_dependency", request.labor.batch_dependency, 1, MAX_POSITION)
    parts = num_parts(request)
    if not parts:
        if request.ids:
            raise Refused(f"split {request.split!r} and ids were both given, expected one of them")
        return
    if not request.ids:
        raise Refused("seeds: found neither a split nor ids, expected one of them")
    if request.ids % parts:
        names = ", ".join(_parts(request))
        raise Refused(f"ids: {request.ids} in all, expected {parts} a seed: {names}")
    _within("number of ids", request.ids // parts, 1, MAX_IDS)


def check_global_batch(request: Attach) -> None:
    """Raises Refused: a rank's share of a batch would be empty."""
    if request.batch_size < request.world_size:
        raise Refused(
            f"batch_size {request.batch_size} is the global batch and must be at least "
            f"world_size {request.world_size}"
        )


def _parts(request: Attach) -> list[str]:
    """The arrays that the numbers of a request form, with one number for each seed."""
    parts = []
    if not request.split:
        parts = ["sources", "targets"] if request.edges is not None else ["ids"]
    if request.temporal is not None and request.temporal.times == "given":
        parts.append("times")
    return parts


def num_parts(request: Attach) -> int:
    """How many numbers of each seed follow a request."""
    return len(_parts(request))


def split_frame(
    request: Attach, frame: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """Split what followed a request into (ids, times); None and (0,) if there are none."""
    parts = num_parts(request)
    if frame is None or not parts:
        return None, np.empty(0, np.int64)
    timed = request.temporal is not None and request.temporal.times == "given"
    cut = frame.size // parts * (parts - timed)
    return (None if request.split else frame[:cut]), frame[cut:]


def _check_choice(choice: RowChoice) -> None:
    _within("number of types in features", len(choice.arrays), 0, MAX_RELATIONS)
    for own in choice.arrays:
        _within("number of features of a type", len(own.names), 0, MAX_RELATIONS)
        for name in (own.owner, *own.names):
            _within("characters of a name in features", len(name), 0, 4 * MAX_NAME)
    _within("characters of the name of labels", len(choice.label), 0, MAX_NAME)


def _check_temporal(temporal: Temporal) -> None:
    for name, known in (("strategy", ("uniform", "last")), ("times", ("given", "edges"))):
        if (value := getattr(temporal, name)) not in known:
            raise Refused(f"temporal.{name} is {value[:MAX_NAME]!r}, expected {' or '.join(known)}")


def _check_edges(edges: SeedEdges) -> None:
    for name in ("relation", "negatives", "exclude", "reverse"):
        if len(value := getattr(edges, name)) > MAX_NAME:
            raise Refused(f"edges.{name} has {len(value)} characters, expected at most {MAX_NAME}")
    if not 0 <= edges.amount <= MAX_NEGATIVES:  # nor a NaN
        raise Refused(f"edges.amount is {edges.amount}, expected 0 to {MAX_NEGATIVES}")


def max_rows(row_bytes: int) -> int:
    """Rows of so many bytes that a peer may ask for at once; 0: one is too long."""
    return min(MAX_ROW_IDS, MAX_ROW_BYTES // row_bytes)


def check_rows(wanted: RowsWanted, first: int, num_rows: int, row_bytes: int) -> NDArray[np.int64]:
    """The rows that a peer asks for, of an array whose first row is that of store id `first`.

    Raises BadMessage: too many or none, not ascending, or of other nodes.
    """
    where = f"rows of {wanted.array}"
    if len(wanted.ids) % 8 or not 0 < len(wanted.ids) // 8 <= max_rows(row_bytes):
        raise BadMessage(
            f"{where}: {len(wanted.ids)} bytes of ids, expected 8 each, 1 to {max_rows(row_bytes)}"
        )
    ids = np.frombuffer(wanted.ids, "<u8")
    if (ids[1:] <= ids[:-1]).any() or int(ids[0]) < first or int(ids[-1]) >= first + num_rows:
        raise BadMessage(
            f"{where}: ids {ids[0]} to {ids[-1]}, expected ascending ones from {first} to "
            f"{first + num_rows - 1}"
        )
    return ids.astype(np.int64) - first


def check_start(start: Start) -> None:
    """Raises Refused: a position that no epoch has, or that kernels cannot count to."""
    _within("epoch", start.epoch, 0, MAX_POSITION)
    _within("step", start.step, 0, MAX_POSITION)
    _within("stride", start.stride, 1, MAX_POSITION)
    _within("run", start.run, 0, MAX_POSITION - 1)
