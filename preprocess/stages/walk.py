"""Lazy reverse walks over a store's graph blocks (influence of nodes), and what macro-batches keep.

In a step half of a node's score stays, and the other half is divided equally among the sources of
its in-edges, of all relations; a node without in-edges keeps its score.  Contributions are added in
the order of the blocks, so scores depend on the store alone.

What macro-batches keep are shares of neighbors and of nodes, expected over random partitions.  The
expectation is exact, not sampled: B of k partitions are drawn, one of which is the target's; a node
in m other groups (its partition, and halos) is loaded if at least one of the m is drawn.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Kept, NodeType
from blockstore.kernels.intrinsics import LANES
from blockstore.store import Store, scan_rows
from preprocess.files.ahead import read_ahead
from preprocess.files.store import stored_columns
from preprocess.kernels.influence import (
    Loaded,
    Sums,
    add_kept,
    count_digits,
    end_column,
    keep_half,
    push_shares,
    take_top,
)
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import PassProgress
from preprocess.stages.product import new_columns

STEPS = 3
_THREADS = 4
_DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and bits: 31 bits of a positive float32
LANE_BYTES = 8  # for a node in one lane: its score before and after a step
WALK_NODE_BYTES = 5  # for a node beside the lanes: in-degree 4, mark of training nodes 1
SHARES = (8, 16)  # one in 8, or one in 16, of the partitions is loaded
REACH_NODE_BYTES = 10


class Lanes(NamedTuple):
    """The number of simultaneous walks: `groups` threads with `width` walks each."""

    width: int
    groups: int

    @property
    def num_walks(self) -> int:
        return self.width * self.groups


def plan_lanes(num_nodes: int, num_walks: int, room: int) -> Lanes:
    """As many lanes as `room` bytes hold, at least one; full cache lines per thread if they fit."""
    fitting = max(1, room // (LANE_BYTES * max(1, num_nodes)))
    width = LANES if min(fitting, num_walks) > LANES // 2 and fitting >= LANES else 1
    while width < min(fitting, num_walks, LANES) and 2 * width <= fitting:
        width *= 2
    groups = max(1, min(_THREADS, fitting // width, -(-num_walks // width)))
    return Lanes(width, groups)


class LazyWalk:
    """Walks over all relations of a store.  Raises CorruptBlock."""

    def __init__(self, store: Store, scan_bytes: int, progress: Progress) -> None:
        """Reads the graph once, for in-degrees, which take 4 bytes a node."""
        self._store, self._scan_bytes, self._progress = store, scan_bytes, progress
        self.num_nodes = store.manifest.num_nodes
        self.num_edges = sum(r.num_edges for r in store.manifest.relations)
        self.in_degrees: NDArray[np.uint32] = np.zeros(self.num_nodes, np.uint32)
        with progress.stage("count in-edges", self.num_edges, "edges") as stage:
            for head, degrees, sources in self._pieces(None):
                into = self.in_degrees[head[0] : head[0] + degrees.size]
                np.add(into, degrees, out=into, casting="unsafe")
                stage.advance(sources.size)

    def scores(self, marks: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Scores after all steps, from 1 at each marked node: float64 (num_nodes,)."""
        scores, out = (new_columns(self.num_nodes, np.float64) for _ in range(2))
        scores[:] = marks
        with (
            self._progress.stage("walk", STEPS * self.num_edges, "edges") as stage,
            ThreadPoolExecutor(1, thread_name_prefix="walk") as pool,
        ):
            for _ in range(STEPS):
                self._step([(scores, out)], 1, None, pool, stage)
                scores, out = out, scores
        return scores

    def top_of_parts(
        self,
        marks: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        wanted: NDArray[np.int64],
        never: NDArray[np.int64],
        lanes: Lanes,
    ) -> Iterator[NDArray[np.uint64]]:
        """For each part, the nodes outside it with the highest scores for its marked nodes.

        marks    uint8 (num_nodes,)
        offsets  int64 (types, parts + 1)   store ids of each part, type by type
        wanted   int64 (parts,)             number of nodes; fewer are chosen if fewer have a score
        never    int64                      nodes that are not chosen

        Nodes are ascending.  Of equal scores the smaller id is chosen.
        """
        num_parts = offsets.shape[1] - 1
        batches = [*range(0, num_parts, lanes.num_walks), num_parts]
        arrays = [
            tuple(new_columns(self.num_nodes * lanes.width) for _ in range(2))
            for _ in range(lanes.groups)
        ]
        total = (STEPS * (len(batches) - 1)) * self.num_edges
        with (
            self._progress.stage("walk", total, "edges") as stage,
            ThreadPoolExecutor(lanes.groups, thread_name_prefix="walk") as pool,
        ):
            for low, high in pairwise(batches):
                groups = [
                    range(first, min(first + lanes.width, high))
                    for first in range(low, high, lanes.width)
                ]
                pairs = [(a, b) for a, b in arrays[: len(groups)]]
                list(pool.map(lambda g, p: _start(marks, offsets, g, lanes.width, p[0]),
                              groups, pairs))  # fmt: skip
                spans = [(int(row[low]), int(row[high])) for row in offsets]
                for step in range(STEPS):
                    self._step(pairs, lanes.width, spans if step == 0 else None, pool, stage)
                    pairs = [(b, a) for a, b in pairs]

                def choose(parts: range, pair: tuple[Any, Any]) -> list[NDArray[np.uint64]]:
                    return _choose(pair[0], lanes.width, parts, offsets, wanted, never)

                for chosen in list(pool.map(choose, groups, pairs)):
                    yield from chosen

    def _step(
        self,
        pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]],
        width: int,
        spans: list[tuple[int, int]] | None,
        pool: ThreadPoolExecutor,
        stage: PassProgress,
    ) -> None:
        """Step from the first to the second array of each pair; `spans`: scored nodes by type."""
        list(pool.map(lambda pair: keep_half(self.in_degrees, pair[0], width, pair[1]), pairs))
        passed = 0
        for head, degrees, sources in self._pieces(spans):

            def push(pair: Any, first: Any = head[0], to: Any = degrees, of: Any = sources) -> None:
                push_shares(first, to, of, self.in_degrees, pair[0], width, pair[1])

            list(pool.map(push, pairs))
            stage.advance(sources.size)
            passed += sources.size
        stage.advance(self.num_edges - passed)

    def _pieces(self, spans: list[tuple[int, int]] | None) -> Iterator[Any]:
        """Columns of all relations; `spans`: the range of columns to read of each type."""
        types = {t.name: i for i, t in enumerate(self._store.manifest.types)}
        for relation in self._store.manifest.relations:
            columns = None if spans is None else spans[types[relation.dst]]
            if columns is not None and columns[0] == columns[1]:
                continue
            pieces = stored_columns(self._store, relation, self._scan_bytes, columns)
            with closing(read_ahead(pieces)) as ahead:
                yield from ahead


def training_marks(store: Store, types: Sequence[NodeType], split: str) -> NDArray[np.uint8]:
    """1 for each node of a split of any type, uint8 (num_nodes,), by store id."""
    marks = np.zeros(store.manifest.num_nodes, np.uint8)
    for t in types:
        if split not in t.splits:
            continue
        listed = np.zeros(t.num_nodes, np.uint8)
        for _, ids in scan_rows(store, t.splits[split]):
            listed[ids] = 1
        for first, ids in scan_rows(store, t.store_id):
            marks[ids] = listed[first : first + ids.size]
    return marks


def _start(
    marks: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    parts: range,
    width: int,
    scores: NDArray[np.float32],
) -> None:
    scores[:] = 0
    for lane, part in enumerate(parts):
        for row in offsets:
            marked = marks[row[part] : row[part + 1]]
            scores.reshape(-1, width)[row[part] : row[part + 1], lane] = marked


def _choose(
    scores: NDArray[np.float32],
    width: int,
    parts: range,
    offsets: NDArray[np.int64],
    wanted: NDArray[np.int64],
    never: NDArray[np.int64],
) -> list[NDArray[np.uint64]]:
    by_node = scores.reshape(-1, width)
    by_node[never] = 0
    for lane, part in enumerate(parts):
        for row in offsets:
            by_node[row[part] : row[part + 1], lane] = 0
    quota = np.zeros(width, np.int64)
    quota[: len(parts)] = wanted[parts.start : parts.stop]
    return top_nodes(scores, width, quota)[: len(parts)]


def top_nodes(
    scores: NDArray[np.float32], width: int, quota: NDArray[np.int64]
) -> list[NDArray[np.uint64]]:
    """Nodes with the highest positive scores of each lane, ascending; of equals the smaller id.

    scores  float32 (num_nodes * width,)
    quota   int64 (width,)                maximum number of nodes

    Reads the scores once for each digit of a radix select, and once to take the nodes.
    """
    bits, left = scores.view(np.uint32), quota.copy()
    prefix = np.zeros(width, np.uint32)
    for shift, digits in _DIGITS:
        counts = np.empty((width, 1 << digits), np.int64)
        count_digits(bits, width, prefix, shift, digits, counts)
        above = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # of this digit and higher ones
        for lane in range(width):
            digit = max(0, int(np.searchsorted(-above[lane], -left[lane], "right")) - 1)
            left[lane] -= int(above[lane, digit + 1]) if digit + 1 < 1 << digits else 0
            prefix[lane] = (int(prefix[lane]) << digits) | digit
    equal = counts[np.arange(width), prefix & np.uint32((1 << digits) - 1)]
    ties = np.minimum(left, equal)
    sizes = quota - left + ties
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]), np.uint64)
    take_top(bits, width, prefix, ties, ends - sizes, out)
    return np.split(out, ends[:-1])


def chances(num_groups: int, drawn: int, maximum: int) -> NDArray[np.float64]:
    """P(at least one of m given groups is among `drawn` of `num_groups`): float64 (most + 1,)."""
    none = np.ones(maximum + 1)
    for m in range(maximum):
        left = max(0, num_groups - drawn - m)
        none[m + 1] = none[m] * left / (num_groups - m) if num_groups > m else 0.0
    return 1 - none


def measure_kept(
    store: Store,
    marks: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    halo: NDArray[np.uint64],
    halo_starts: NDArray[np.int64],
    hubs: NDArray[np.int64],
    scan_bytes: int,
    progress: Progress,
) -> tuple[Kept, ...]:
    """What macro-batches keep, for each of SHARES; reads the graph once.

    marks        uint8 (num_nodes,)            training nodes; if there are none, all nodes count
    offsets      int64 (types, parts + 1)      store ids
    halo         uint64 (slots,)               nodes of all halos, part by part
    halo_starts  int64 (parts + 1,)
    hubs         int64                         store ids

    Raises CorruptBlock.
    """
    if not marks.any():
        marks = np.ones_like(marks)
    num_parts = offsets.shape[1] - 1
    is_hub = np.zeros(marks.size, np.uint8)
    is_hub[hubs] = 1
    times = np.bincount(halo.astype(np.int64), minlength=marks.size).astype(np.uint32)
    times += np.uint32(1)
    maximum = int(times.max(initial=1))
    drawn = [max(1, num_parts // share) for share in SHARES]
    others = np.stack([chances(num_parts - 1, count - 1, maximum) for count in drawn])
    state, totals = np.array([-1, -1, 0, 0, 0], np.int64), np.zeros((len(SHARES), 3, 2))
    sums = Sums(state, np.zeros((len(SHARES), 3)), totals)
    num_edges = sum(r.num_edges for r in store.manifest.relations)
    types = {t.name: i for i, t in enumerate(store.manifest.types)}
    with progress.stage("neighbors kept", num_edges, "edges") as stage:
        for relation in store.manifest.relations:
            state[1], stamps = -1, np.zeros(marks.size, np.uint32)
            loaded = Loaded(marks, is_hub, times, stamps, offsets, halo, halo_starts)
            with closing(read_ahead(stored_columns(store, relation, scan_bytes))) as ahead:
                for head, degrees, sources in ahead:
                    add_kept(head[0], degrees, sources, loaded, types[relation.dst], others, sums)
                    stage.advance(sources.size)
            end_column(sums)
    shares = [_loaded(times, is_hub, num_parts, count, maximum) for count in drawn]
    held = (marks.size + halo.size) / num_parts
    return tuple(
        Kept(
            num_partitions=count,
            nodes=tuple((totals[i, :, 0] / max(1, state[3])).tolist()),
            edges=tuple((totals[i, :, 1] / max(1, state[4])).tolist()),
            loaded=shares[i],
            rows=(count * held + hubs.size) / max(1, marks.size),
        )
        for i, count in enumerate(drawn)
    )


def _loaded(
    times: NDArray[np.uint32], is_hub: NDArray[np.uint8], num_parts: int, drawn: int, maximum: int
) -> tuple[float, float, float]:
    """Share of nodes that are loaded: with partitions alone, with hubs, with hubs and halos."""
    chance, size = chances(num_parts, drawn, maximum), max(1, times.size)
    counts: NDArray[Any] = np.bincount(times[is_hub == 0], minlength=maximum + 1)
    num_hubs = int(is_hub.sum(dtype=np.int64))
    hubs = (num_hubs + (times.size - num_hubs) * float(chance[1])) / size
    halos = (num_hubs + float(counts @ chance)) / size
    return float(chance[1]), hubs, halos
