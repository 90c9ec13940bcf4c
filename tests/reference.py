"""What the kernels should give, in plain Python that is meant to be read.

Nothing here knows blocks, slots or numpy tricks: a graph is `indptr` and `indices`, column v's
edges are indices[indptr[v] : indptr[v + 1]], and numbers are Python's own, cut to 64 bits.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

BITS = 2**64 - 1
GOLDEN, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: int) -> int:
    """splitmix64's finalizer."""
    x = ((x ^ (x >> 30)) * M1) & BITS
    x = ((x ^ (x >> 27)) * M2) & BITS
    return x ^ (x >> 31)


def make_key(seed: int, epoch: int, step: int, hop: int, relation: int) -> int:
    """Key of one hop's draws over one relation."""
    key = mix((seed + GOLDEN) & BITS)
    for part in (epoch, step, hop, relation):
        key = mix(key ^ ((part + GOLDEN) & BITS))
    return key


def make_epoch_key(seed: int, epoch: int) -> int:
    """Key of the order of seeds in an epoch."""
    return mix(mix((seed + M1) & BITS) ^ ((epoch + M2) & BITS))


def draw_below(key: int, node: int, draw: int, bound: int) -> int:
    """Draw number `draw` of `node`: the top of (64-bit hash * bound)."""
    return draw_hash(key, node, draw) * bound >> 64


def draw_hash(key: int, node: int, draw: int) -> int:
    """64 random bits of draw number `draw` of `node`."""
    node_key = mix(key ^ ((node * GOLDEN + M1) & BITS))
    return mix((node_key + draw * GOLDEN) & BITS)


def permute(index: int, size: int, key: int) -> int:
    """Six Feistel rounds over halves of an even number of bits, until the value is in range."""
    half = 3
    while 1 << (2 * half) < size:
        half += 1
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for r in range(6):
            left, right = right, left ^ (mix((right * GOLDEN + key + r * M2) & BITS) & mask)
        value = left << half | right
        if value < size:
            return value


def neighbors(indptr: Any, indices: Any, node: int) -> list[int]:
    """Sources of a node's in-edges, by position."""
    return [int(source) for source in indices[int(indptr[node]) : int(indptr[node + 1])]]


def pick_positions(degree: int, fanout: int, replace: bool, key: int, node: int) -> list[int]:
    """Positions, among a column's edges, that its draws pick, by draw slot."""
    if fanout < 0 or (degree <= fanout and not replace):
        return list(range(degree))
    if degree == 0:
        return []
    if replace:
        return [draw_below(key, node, k, degree) for k in range(fanout)]
    picks: list[int] = []
    for k in range(fanout):  # Floyd: Bentley, CACM 30(9), 1987
        last = degree - fanout + k
        pick = draw_below(key, node, k, last + 1)
        picks.append(last if pick in picks else pick)
    return picks


def sample_edges(
    indptr: Any, node: int, fanout: int, key: int, replace: bool = False, first: int = 0
) -> list[int]:
    """Edges (places in `indices`) that the draws of one column pick.

    `first` is the store id of column 0: draws are keyed by store ids.
    """
    start, stop = int(indptr[node]), int(indptr[node + 1])
    picks = pick_positions(stop - start, fanout, replace, key, first + node)
    return [start + pick for pick in picks]


def weigh_edges(
    indptr: Any, weights: Any, node: int, fanout: int, key: int, replace: bool = False
) -> list[int]:
    """Places in `indices` of a weighted draw, ascending: the least keys.

    With replacement an edge has `fanout` keys, each more than the one before it.
    """
    start, stop = int(indptr[node]), int(indptr[node + 1])
    keys = []
    for edge in range(start, stop):
        mark, weight = 0.0, float(weights[edge])
        for meeting in range(fanout if replace else 1) if weight > 0 else ():
            hashed = draw_hash(key, node, edge - start + (meeting << 44))
            mark += -math.log(((hashed >> 11) + 0.5) * 2.0**-53) / weight
            keys.append((mark, edge))
    return sorted(edge for _, edge in sorted(keys)[:fanout])


def rank_sources(
    indptr: Any, indices: Any, node: int, fanout: int, key: int, first: int = 0
) -> list[int]:
    """Places in `indices` of a LABOR draw, ascending: the least hashes of the edges' sources.

    An edge from the source of the edge before it has a hash of its own.  `first` is the store id of
    column 0; sources are store ids.
    """
    start, stop = int(indptr[node]), int(indptr[node + 1])
    ranked = []
    for edge in range(start, stop):
        source = int(indices[edge])
        hashed = mix(key ^ ((source * GOLDEN + M1) & BITS))
        if edge > start and source == int(indices[edge - 1]):
            hashed = draw_hash(key, first + node, edge - start)
        ranked.append((hashed >> 1, edge))
    return sorted(edge for _, edge in sorted(ranked)[:fanout])


SOURCES = 7 << 60  # in place of a relation, of keys of ranks of sources


class Labor(NamedTuple):
    """Under which key LABOR ranks sources."""

    layer_dependency: bool = False
    batch_dependency: int = 1

    @classmethod
    def of(cls, options: Any) -> "Labor | None":
        """What the options of a dataset say."""
        if options.get("sampler") != "labor":
            return None
        return cls(**{name: options[name] for name in cls._fields if name in options})

    def key(self, seed: int, epoch: int, step: int, hop: int) -> int:
        """Of a hop over any relation."""
        hop = 0 if self.layer_dependency else hop
        return make_key(seed, epoch, step // self.batch_dependency, hop, SOURCES)


class SampledBatch(NamedTuple):
    """One batch; edges by hop, nodes in order of first occurrence, seeds first."""

    n_id: list[int]
    nodes_per_hop: list[int]  # seeds, then those that each hop found
    src_local: list[list[int]]  # per hop: place in n_id of each edge's source
    dst_local: list[list[int]]  # and of its target
    edges: list[list[int]]  # and the edge's place in `indices`


def sample_batch(
    indptr: Any,
    indices: Any,
    seeds: Any,
    fanouts: Any,
    seed: int,
    epoch: int,
    step: int,
    frontier: str = "new",
    replace: bool = False,
    weights: Any = None,
    banned: Any = (),
    labor: Labor | None = None,
) -> SampledBatch:
    """Neighbor sampling of one relation: a hop expands newly found nodes only, or all so far.

    Seeds keep their places even where one is given twice; edges then lead from its first place.
    banned   pairs (source, target): such edges are taken out of what was drawn
    """
    batch = SampledBatch([int(s) for s in seeds], [len(seeds)], [], [], [])
    local: dict[int, int] = {}
    for place, node in enumerate(batch.n_id):
        local.setdefault(node, place)
    low = 0
    for hop, fanout in enumerate(fanouts):
        key = make_key(seed, epoch, step, hop, 0)
        expanded = range(low if frontier == "new" else 0, len(batch.n_id))
        low = len(batch.n_id)
        src: list[int] = []
        dst: list[int] = []
        edges: list[int] = []
        for place in expanded:
            node = batch.n_id[place]
            if labor is not None and fanout >= 0:
                ranked = labor.key(seed, epoch, step, hop)
                picks = rank_sources(indptr, indices, node, fanout, ranked)
            elif weights is None or fanout < 0:
                picks = sample_edges(indptr, node, fanout, key, replace)
            else:
                picks = weigh_edges(indptr, weights, node, fanout, key, replace)
            for edge in picks:
                source = int(indices[edge])
                if (source, node) in banned:
                    continue
                if source not in local:
                    local[source] = len(batch.n_id)
                    batch.n_id.append(source)
                src.append(local[source])
                dst.append(place)
                edges.append(edge)
        batch.src_local.append(src)
        batch.dst_local.append(dst)
        batch.edges.append(edges)
        batch.nodes_per_hop.append(len(batch.n_id) - low)
    return batch


class HeteroSampled(NamedTuple):
    """One batch of several types; nodes by type in order of first occurrence, seeds first."""

    n_id: dict[str, list[int]]  # ids within the type
    nodes_per_hop: dict[str, list[int]]
    src_local: dict[Any, list[list[int]]]  # by relation and hop
    dst_local: dict[Any, list[list[int]]]
    edges: dict[Any, list[list[int]]]  # places in `indices`


def sample_hetero_batch(
    first: dict[str, int],
    relations: dict[Any, Any],
    seed_type: str,
    seeds: Any,
    fanouts: dict[Any, Any],
    position: tuple[int, int, int],
    frontier: str = "new",
    banned: Any = None,
    labor: Labor | None = None,
) -> HeteroSampled:
    """Neighbor sampling over several relations, in their order.

    first      by type: store id of its node 0, in ascending order
    relations  (src, name, dst) -> (indptr, indices): columns of `dst`, ids within `src`
    fanouts    by relation, per hop
    position   seed, epoch, step
    seeds      ids; of seed type "" (type, id)
    banned     by relation: pairs (source, target) that are taken out of what was drawn
    """
    found = [(seed_type, int(s)) for s in seeds] if seed_type else list(seeds)
    banned = {} if banned is None else banned
    local: dict[tuple[str, int], int] = {}
    count = dict.fromkeys(first, 0)
    own: list[int] = []  # places within the type
    for node in found:
        local.setdefault(node, count[node[0]])
        own.append(count[node[0]])
        count[node[0]] += 1
    batch = HeteroSampled(
        {t: [] for t in first}, {t: [count[t]] for t in first},
        *({r: [] for r in relations} for _ in range(3)),
    )  # fmt: skip
    low = 0
    for hop in range(len(next(iter(fanouts.values())))):
        expanded = range(low if frontier == "new" else 0, len(found))
        low = len(found)
        before = dict(count)
        for number, ((src, name, dst), (indptr, indices)) in enumerate(relations.items()):
            key = make_key(*position, hop, number)
            fanout = fanouts[src, name, dst][hop]
            draw = partial(sample_edges, indptr, fanout=fanout, key=key)
            if labor is not None and fanout >= 0:
                stored = [int(source) + first[src] for source in indices]
                ranked = labor.key(*position, hop)
                draw = partial(rank_sources, indptr, stored, fanout=fanout, key=ranked)
            edges = [
                (place, edge)
                for place in expanded
                if found[place][0] == dst and fanout
                for edge in draw(node=found[place][1], first=first[dst])
                if (int(indices[edge]), found[place][1]) not in banned.get((src, name, dst), ())
            ]
            for _, edge in edges:
                node = (src, int(indices[edge]))
                if node not in local:
                    local[node] = count[src]
                    own.append(count[src])
                    count[src] += 1
                    found.append(node)
            sources = [local[src, int(indices[edge])] for _, edge in edges]
            batch.src_local[src, name, dst].append(sources)
            batch.dst_local[src, name, dst].append([own[place] for place, _ in edges])
            batch.edges[src, name, dst].append([edge for _, edge in edges])
        for t in first:
            batch.nodes_per_hop[t].append(count[t] - before[t])
    for t, node in found:
        batch.n_id[t].append(node)
    return batch


def renumber(columns: list[list[int]], seeds: list[int]) -> tuple[list[int], list[int]]:
    """(n_id, local id of every draw): ids in order of first occurrence, the seeds first."""
    n_id = list(seeds)
    local: dict[int, int] = {}
    for place, node in enumerate(seeds):
        local.setdefault(node, place)
    found = []
    for node in (node for column in columns for node in column):
        if node not in local:
            local[node] = len(n_id)
            n_id.append(node)
        found.append(local[node])
    return n_id, found


def pack_bits(values: Sequence[int], bits: int) -> bytes:
    """Numbers as a stream of bits, the first in the lowest, filled up to whole bytes."""
    stream = sum(value << k * bits for k, value in enumerate(values))
    return stream.to_bytes(-(-len(values) * bits // 8), "little")


def unpack_bits(raw: bytes, bits: int, base: int, count: int) -> list[int]:
    """The first numbers of such a stream, `base` added to each."""
    stream = int.from_bytes(raw, "little")
    return [base + (stream >> k * bits & (1 << bits) - 1) for k in range(count)]


def pack_columns(degrees: list[int], capacity: int, fits: Any) -> list[tuple[int, int, int]]:
    """(columns, edges, carried edges) of each block that a run of columns fills.

    `fits(columns, edges)` says whether a block can hold so much.
    """
    blocks: list[tuple[int, int, int]] = []
    columns = edges = carried = 0
    for degree in degrees:
        if degree > capacity or not fits(columns + 1, edges + degree):
            if columns or edges:
                blocks.append((columns, edges, carried))
            columns = edges = carried = 0
        left = degree
        columns += 1
        while left > capacity:
            blocks.append((columns, capacity, capacity if columns == 0 else 0))
            columns, left = 0, left - capacity
        edges += left
        carried = left if degree > capacity else carried
    if columns or edges:
        blocks.append((columns, edges, carried))
    return blocks


def hop_order(
    rows: int, seed: int, epoch: int, method: str, chunk: int, shuffle: bool, redeal: int
) -> list[int]:
    """Rows of an epoch of hop-wise batches, in order."""
    order = list(range(rows))
    if not shuffle:
        return order
    key = make_epoch_key(seed, epoch)
    if method == "rr":
        return [permute(i, rows, key) for i in order]
    if redeal and epoch >= redeal:
        deal = make_key(seed, epoch // redeal, 5 << 60, 0, 0)
        order = _dealt(order, max(1, chunk // 16), deal)
    return _dealt(order, chunk, key)


def _dealt(items: list[int], piece: int, key: int) -> list[int]:
    """Whole pieces in a keyed order, then what is left."""
    whole = len(items) // piece
    places = [permute(j, whole, key) for j in range(whole)]
    moved = [item for p in places for item in items[p * piece : (p + 1) * piece]]
    return moved + items[whole * piece :]


NEGATIVE = 1 << 61  # in place of a hop, of keys of negatives


def draw_negatives(
    seed: int, epoch: int, step: int, start: int, num: int, count: int, end: int, nodes: range
) -> list[int]:
    """Random nodes for edges start, start + 1, ... of an epoch's order, `num` of them in turn."""
    key = make_key(seed, epoch, step, NEGATIVE, end)
    return [
        nodes.start + draw_below(key, start + j % num, j // num, len(nodes)) for j in range(count)
    ]


def sample_link_batch(
    indptr: Any,
    indices: Any,
    edges: list[tuple[int, int]],
    start: int,
    fanouts: Any,
    seed: int,
    epoch: int,
    step: int,
    negatives: str = "none",
    amount: float = 0,
    exclude: str = "none",
    frontier: str = "new",
    replace: bool = False,
    labor: Labor | None = None,
) -> tuple[SampledBatch, list[int]]:
    """A batch of seed edges (source, target), the first of them at `start` of the epoch's order.

    Returns the batch of their ends and of the negatives' ends, and the place in n_id of each:
    sources, then targets; of triplets sources, targets, negative targets.
    """
    num, nodes = len(edges), range(len(indptr) - 1)
    count = math.ceil(num * amount) if negatives != "none" else 0

    def random_nodes(end: int) -> list[int]:
        return draw_negatives(seed, epoch, step, start, num, count, end, nodes)

    sources, targets = [s for s, _ in edges], [t for _, t in edges]
    if negatives == "binary":
        sources, targets = sources + random_nodes(0), targets + random_nodes(1)
    elif negatives == "triplet":
        targets = targets + random_nodes(1)
    ends = sources + targets
    n_id = list(dict.fromkeys(ends))
    banned = set(edges) if exclude != "none" else set()
    if exclude == "reverse":
        banned |= {(t, s) for s, t in edges}
    batch = sample_batch(
        indptr, indices, n_id, fanouts, seed, epoch, step, frontier, replace, banned=banned,
        labor=labor,
    )  # fmt: skip
    return batch, [n_id.index(node) for node in ends]


class TreeBatch(NamedTuple):
    """One batch of trees; edges by hop."""

    n_id: list[int]
    trees: list[int]  # of each node, numbered as the seed nodes
    nodes_per_hop: list[int]
    src_local: list[list[int]]
    dst_local: list[list[int]]
    edges: list[list[int]]


def tree_number(position: int, end: int = 0, draw: int = 0) -> int:
    """Of the tree of a seed node: of end 0 to 3 (negatives 1 and 3) of the seed at a position."""
    return (position << 20) + (end << 17) + draw


def pick_until(
    indptr: Any,
    times: Any,
    node: int,
    limit: int,
    fanout: int,
    key: int,
    number: int,
    last: bool,
    first: int = 0,
) -> list[int]:
    """Places in `indices`, ascending, of the picks among a column's edges up to a time.

    `first` is the store id of column 0.
    """
    start, stop = int(indptr[node]), int(indptr[node + 1])
    ranked = [
        (-int(times[e]) if last else draw_hash(key ^ mix(number), first + node, e - start) >> 1, -e)
        for e in range(start, stop)
        if times[e] <= limit
    ]
    return sorted(-e for _, e in sorted(ranked)[:fanout])


def sample_trees(
    indptr: Any,
    indices: Any,
    times: Any,
    seeds: list[int],
    limits: list[int],
    numbers: list[int],
    fanouts: Any,
    seed: int,
    epoch: int,
    step: int,
    last: bool = False,
    frontier: str = "new",
) -> TreeBatch:
    """Sampling up to each seed's limit, each seed a tree of its own."""
    batch = TreeBatch(list(seeds), list(range(len(seeds))), [len(seeds)], [], [], [])
    local = {(tree, node): tree for tree, node in enumerate(seeds)}
    low = 0
    for hop, fanout in enumerate(fanouts):
        key = make_key(seed, epoch, step, hop, 0)
        expanded = range(low if frontier == "new" else 0, len(batch.n_id))
        low = len(batch.n_id)
        hops: list[tuple[int, int, int]] = []
        for place in expanded:
            node, tree = batch.n_id[place], batch.trees[place]
            for edge in pick_until(
                indptr, times, node, limits[tree], fanout, key, numbers[tree], last
            ):
                found = (tree, int(indices[edge]))
                if found not in local:
                    local[found] = len(batch.n_id)
                    batch.n_id.append(found[1])
                    batch.trees.append(tree)
                hops.append((local[found], place, edge))
        for into, values in zip(
            batch[3:], zip(*hops, strict=True) if hops else ((), (), ()), strict=True
        ):
            into.append(list(values))
        batch.nodes_per_hop.append(len(batch.n_id) - low)
    return batch


class HeteroTrees(NamedTuple):
    """One batch of trees of several types; nodes in order of first occurrence."""

    n_id: dict[str, list[int]]  # ids within the type
    trees: dict[str, list[int]]  # of each node, numbered as the seed nodes
    nodes_per_hop: dict[str, list[int]]
    edges: dict[Any, list[list[tuple[int, int, int]]]]  # by relation and hop: local ids, place


def sample_hetero_trees(
    first: dict[str, int],
    relations: dict[Any, Any],
    times: dict[Any, Any],
    seeds: list[tuple[str, int]],
    limits: list[int],
    numbers: list[int],
    fanouts: dict[Any, Any],
    position: tuple[int, int, int],
    last: bool = False,
    frontier: str = "new",
) -> HeteroTrees:
    """Sampling over several relations, in their order, up to each seed's limit, a tree a seed.

    first      by type: store id of its node 0
    relations  (src, name, dst) -> (indptr, indices); `times`, `fanouts` by relation
    seeds      (type, id)
    position   seed, epoch, step
    """
    batch = HeteroTrees(
        {t: [] for t in first}, {t: [] for t in first}, {t: [] for t in first},
        {r: [] for r in relations},
    )  # fmt: skip
    found: list[tuple[int, str, int]] = []  # (tree, type, id), in order
    own: list[int] = []  # places within the type
    local: dict[tuple[int, str, int], int] = {}

    def enter(tree: int, kind: str, node: int) -> None:
        local[tree, kind, node] = len(batch.n_id[kind])
        own.append(len(batch.n_id[kind]))
        found.append((tree, kind, node))
        batch.n_id[kind].append(node)
        batch.trees[kind].append(tree)

    for tree, (kind, node) in enumerate(seeds):
        enter(tree, kind, node)
    counted = dict.fromkeys(first, 0)

    def count() -> None:
        for kind in first:
            batch.nodes_per_hop[kind].append(len(batch.n_id[kind]) - counted[kind])
            counted[kind] = len(batch.n_id[kind])

    count()
    low = 0
    for hop in range(len(next(iter(fanouts.values())))):
        expanded = range(low if frontier == "new" else 0, len(found))
        low = len(found)
        for number, ((src, name, dst), (indptr, indices)) in enumerate(relations.items()):
            relation, key = (src, name, dst), make_key(*position, hop, number)
            edges = []
            for place in expanded:
                tree, kind, node = found[place]
                if kind != dst or not fanouts[relation][hop]:
                    continue
                for edge in pick_until(
                    indptr, times[relation], node, limits[tree], fanouts[relation][hop], key,
                    numbers[tree], last, first[dst],
                ):  # fmt: skip
                    source = (tree, src, int(indices[edge]))
                    if source not in local:
                        enter(*source)
                    edges.append((local[source], own[place], edge))
            batch.edges[relation].append(edges)
        count()
    return batch
