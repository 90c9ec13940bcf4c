"""Plans `chunks` and `rows`: batches of rows of propagated features; nothing is sampled.

Rows of a split are stored in one seeded random order.  Plan `rows` (SGD-RR) takes them in a keyed
order.  Plan `chunks` (SGD-CR) takes whole chunks of consecutive rows in a keyed order; the chunk
that is shorter than the others comes last.  If rows are redealt every n epochs, strips of a
sixteenth of a chunk are first put into a keyed order too, and chunks are formed of these; the rows
after the last whole strip keep their places.
"""

import numpy as np
from numpy.typing import NDArray

from blockstore.format import HopSet, Manifest, NodeType
from blockstore.kernels.random import make_epoch_key, make_key, permute_each, permute_range
from loaderd.api.errors import Refused
from loaderd.api.protocol import SAMPLER_VERSION, Attach, HopBatches, Resolved
from loaderd.api.requests import check_global_batch
from loaderd.plans.base import Part, Unit, count_steps, drawn_epoch, share

STRIPS = 16  # of a chunk, by which rows are redealt
_DEAL = 5 << 60  # in place of a step in keys: no step has this number

Ranges = NDArray[np.int64]  # (n, 2): [first, stop) of consecutive rows


class HopPlan:
    """A batch is a range of positions in the epoch's order of rows."""

    def __init__(self, resolved: Resolved, part: Part) -> None:
        """Raises Refused: fewer rows than ranks."""
        assert resolved.hops is not None
        self.resolved, self.part, self.hops = resolved, part, resolved.hops
        self.name = PLAN_OF[resolved.hops.method]
        # global batches of an epoch
        self.num_steps = count_steps(resolved.num_seeds, resolved.batch_size, part.world_size)

    @property
    def max_rows(self) -> int:
        world = self.part.world_size
        largest = min(self.resolved.num_seeds, self.resolved.batch_size + world - 1)
        return -(-largest // world)

    @property
    def max_ranges(self) -> int:
        rows, hops = self.max_rows, self.hops
        if not self.resolved.shuffle:
            return 1
        if hops.method == "rr":
            return rows
        chunks = (rows - 1) // hops.chunk + 2
        if self.part.world_size == 1 and hops.chunk % self.resolved.batch_size == 0:
            chunks = 1  # the tail is a batch of its own
        if hops.redeal == 0:
            return min(rows, chunks)
        return min(rows, 2 * chunks + rows // self._strip)

    @property
    def _strip(self) -> int:
        return max(1, self.hops.chunk // STRIPS)

    def unit(self, epoch: int, step: int) -> Unit:
        """This part's share of a step: positions in the epoch's order."""
        r = self.resolved
        own = share(step, self.num_steps, r.num_seeds, r.batch_size, self.part)
        return Unit(epoch, step, own.start, own.stop)

    def ranges(self, unit: Unit) -> Ranges:
        """Rows of a unit in order, as ranges of the stored order."""
        found = np.array([[unit.start, unit.stop]], np.int64)
        if not self.resolved.shuffle:
            return found
        size, seed = self.resolved.num_seeds, self.resolved.seed
        epoch = drawn_epoch(self.resolved, unit.epoch)
        order = int(make_epoch_key(seed, epoch))
        found = deal(found, max(1, self.hops.chunk), size, order)
        redeal = self.hops.redeal
        if redeal and epoch >= redeal:
            key = make_key(seed, epoch // redeal, _DEAL, 0, 0)
            found = deal(found, self._strip, size, key)
        return found

    def rows(self, unit: Unit, out: NDArray[np.int64]) -> None:
        """out[i] = row i of the unit in the stored order; int64 (num_seeds of the unit,)."""
        if self.hops.method == "rr" and self.resolved.shuffle:
            epoch = drawn_epoch(self.resolved, unit.epoch)
            key = np.uint64(make_epoch_key(self.resolved.seed, epoch))
            permute_range(unit.start, unit.stop, self.resolved.num_seeds, key, out)
            return
        ranges = self.ranges(unit)
        counts = ranges[:, 1] - ranges[:, 0]
        before = np.cumsum(counts) - counts
        out[:] = np.repeat(ranges[:, 0] - before, counts) + np.arange(out.size)


PLAN_OF = {"cr": "chunks", "rr": "rows"}  # method -> plan
METHOD_OF = {plan: method for method, plan in PLAN_OF.items()}


def deal(ranges: Ranges, piece: int, size: int, key: int) -> Ranges:
    """Ranges of positions after the whole pieces of [0, size) are permuted under a key.

    ranges   of positions, in the order wanted
    piece    items of a piece; those after the last whole piece stay where they are
    """
    low, high = ranges[:, 0], ranges[:, 1]
    first = low // piece
    counts = (high - 1) // piece - first + 1
    before = np.cumsum(counts) - counts
    number = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    moved = np.empty_like(number)
    permute_each(number, size // piece, np.uint64(key), moved)
    inside = np.maximum(np.repeat(low, counts), number * piece)
    stop = np.minimum(np.repeat(high, counts), (number + 1) * piece)
    shift = (moved - number) * piece
    return _joined(np.stack([inside + shift, stop + shift], axis=1))


def _joined(ranges: Ranges) -> Ranges:
    """The same rows in the same order, in as few ranges as possible."""
    apart = ranges[1:, 0] != ranges[:-1, 1]
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.flatnonzero(np.concatenate([apart, [True]]))
    return np.stack([ranges[first, 0], ranges[last, 1]], axis=1)


def hop_set(manifest: Manifest, request: Attach) -> tuple[NodeType, HopSet]:
    """The node type and hop set that a request names.  Raises Refused, naming what there is."""
    types = [t for t in manifest.types if t.hops and request.seed_type in ("", t.name)]
    if not types:
        of = f" of type {request.seed_type!r}" if request.seed_type else ""
        raise Refused(f"the store has no hop-wise features{of}: make them by `blockstore hops`")
    if len(types) > 1:
        names = ", ".join(t.name for t in types)
        raise Refused(f"types {names} have hop-wise features: name one of them as seed_type")
    found = types[0].hops.get(request.split)
    if found is None:
        named = f"split {request.split!r}" if request.split else "seeds by id"
        raise Refused(
            f"{named}: the store has hop-wise features of {', '.join(types[0].hops)}; name one of "
            "these splits, or make more by `blockstore hops`"
        )
    return types[0], found


def resolve_hops(manifest: Manifest, request: Attach) -> Resolved:
    """The semantic parameters of a session of hop-wise batches.  Raises Refused."""
    node_type, hops = hop_set(manifest, request)
    method, of = METHOD_OF[request.plan], f"split {request.split!r}"
    operators = tuple(_operator(hops, o, of) for o in request.operators or hops.operators)
    if len(set(operators)) != len(operators):
        raise Refused(f"operators {', '.join(operators)}: one is named twice, expected each once")
    for operator in operators:
        maximum = len(hops.operators[operator]) - 1
        if request.hops > maximum:
            raise Refused(
                f"hops is {request.hops}: operator {operator!r} of {of} has hops 0 to {maximum}"
            )
    num_hops = min(len(hops.operators[o]) for o in operators) - 1
    if request.labels and hops.label is None:
        raise Refused(f"{of} has no labels: ask for labels=False, or ingest labels first")
    num_rows = hops.nodes.num_rows
    if num_rows < 1:
        raise Refused(f"{of}: there are no rows")
    check_global_batch(request)
    return Resolved(
        family="hops",
        fingerprint=manifest.fingerprint,
        sampler=SAMPLER_VERSION,
        seeds=f"split:{request.split}",
        seed_type=node_type.name,
        num_seeds=num_rows,
        fanouts=(),
        frontier="",
        replace=False,
        weighted=False,
        batch_size=request.batch_size,
        shuffle=request.shuffle,
        seed=request.seed,
        edge_ids=False,
        hops=HopBatches(
            operators=operators,
            hops=num_hops if request.hops < 0 else request.hops,
            method=method,
            chunk=_resolve_chunk(request, method, num_rows),
            redeal=request.redeal,
            labels=request.labels,
        ),
        cycle=request.cycle,
    )


def _operator(hops: HopSet, name: str, of: str) -> str:
    """The operator of this name, or the only one whose name begins with it: "sym" may be
    "sym+loops".  Raises Refused."""
    if name in hops.operators:
        return name
    found = [o for o in hops.operators if o.startswith(name) and o[len(name)] in "+:@"]
    if len(found) == 1 and name:
        return found[0]
    names = ", ".join(hops.operators)
    raise Refused(f"operator {name!r} is not among those of {of}: it has {names}")


def _resolve_chunk(request: Attach, method: str, num_rows: int) -> int:
    """Rows of a chunk; 0 for plan `rows`.  Raises Refused."""
    if method == "rr":
        if request.chunk or request.redeal:
            raise Refused("chunk and redeal belong to plan 'chunks': leave them 0 for plan 'rows'")
        return 0
    if request.chunk > num_rows:
        raise Refused(
            f"chunk is {request.chunk}, expected 1 to the {num_rows} rows of split "
            f"{request.split!r}, or 0 for batch_size"
        )
    if request.redeal and not request.shuffle:
        raise Refused("redeal needs shuffle: without it rows stay in the order of the store")
    return request.chunk or min(request.batch_size, num_rows)
