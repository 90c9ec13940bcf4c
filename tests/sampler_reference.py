"""What samplers of subgraphs should choose, in plain Python that is meant to be read.

A graph is `indptr` and `indices`, as in `tests.reference`; a choice is a list of nodes, or of
(tree, node) where each root has a subgraph of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.reference import draw_below, make_key, neighbors, permute, sample_edges

CHOICES = 3 << 60  # in place of a relation, of keys of samplers


class Step(NamedTuple):
    """Which subgraph is chosen, and out of what."""

    indptr: Any
    indices: Any
    offsets: Sequence[int]  # of partitions
    fanouts: Sequence[int]
    seed: int
    epoch: int
    number: int
    total: int

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    def key(self, what: int = 0, hop: int = 0) -> int:
        return make_key(self.seed, self.epoch, self.number, hop, CHOICES + what)

    def below(self, bound: int, count: int, hop: int = 0) -> list[int]:
        return [draw_below(self.key(0, hop), i, 0, bound) for i in range(count)]

    def target(self, edge: int) -> int:
        return next(v for v in range(self.num_nodes) if edge < int(self.indptr[v + 1]))

    def degree(self, node: int) -> int:
        return int(self.indptr[node + 1]) - int(self.indptr[node])

    def walk(self, nodes: Sequence[int], key: int) -> list[int]:
        """A neighbor of each: the k-th walker at a node takes its k-th draw, 64 under one key."""
        seen: dict[int, int] = {}
        reached = []
        for node in nodes:
            k = seen.get(node, 0)
            seen[node] = k + 1
            degree = self.degree(node)
            if degree:
                pick = draw_below(key ^ (k // 64), node, k % 64, degree)
                node = neighbors(self.indptr, self.indices, node)[pick]
            reached.append(node)
        return reached


def cluster(step: Step, nodes: list[int], hop: int, partitions: int) -> list[int]:
    count = len(step.offsets) - 1
    key = make_key(step.seed, step.epoch, 0, 0, 2 * CHOICES)
    order = [permute(i, count, key) for i in range(count)]
    dealt = order[count * step.number // step.total : count * (step.number + 1) // step.total]
    return [v for p in dealt for v in range(step.offsets[p], step.offsets[p + 1])]


def saint_node(step: Step, nodes: list[int], hop: int, budget: int, **_: int) -> list[int]:
    return [step.target(edge) for edge in step.below(int(step.indptr[-1]), budget)]


def saint_edge(step: Step, nodes: list[int], hop: int, budget: int, **_: int) -> list[int]:
    edges = step.below(int(step.indptr[-1]), budget)
    return [v for edge in edges for v in (int(step.indices[edge]), step.target(edge))]


def saint_walk(
    step: Step, nodes: list[int], hop: int, roots: int, length: int, **_: int
) -> list[int]:
    at = seen = step.below(step.num_nodes, roots)
    for i in range(1, length + 1):
        at = step.walk(at, step.key(i))
        seen = seen + at
    return seen


def shadow(step: Step, nodes: list[int], hop: int) -> list[tuple[int, int]]:
    """Each root by itself."""
    found = []
    for tree, root in enumerate(nodes):
        known = frontier = {root}
        for h, fanout in enumerate(step.fanouts):
            drawn = {
                int(step.indices[edge])
                for node in frontier
                for edge in sample_edges(step.indptr, node, fanout, step.key(h))
            }
            frontier = drawn - known
            known = known | frontier
        found += [(tree, node) for node in known]
    return found


def induced(step: Step, nodes: list[int], hop: int) -> list[int]:
    """All roots together."""
    known = frontier = set(nodes)
    for h, fanout in enumerate(step.fanouts):
        drawn = {
            int(step.indices[edge])
            for node in frontier
            for edge in sample_edges(step.indptr, node, fanout, step.key(h))
        }
        frontier = drawn - known
        known = known | frontier
    return list(known)


def fastgcn(step: Step, nodes: list[int], hop: int) -> list[int]:
    targets = step.below(step.num_nodes, step.fanouts[hop], hop)
    return step.walk(targets, step.key(1, hop))


def ladies(step: Step, nodes: list[int], hop: int) -> list[int]:
    layer = [node for node in nodes if step.degree(node)]
    ends, end = [], 0.0
    for node in layer:
        end += 1.0 / step.degree(node)
        ends.append(end)
    targets = []
    for draw in step.below(1 << 53, step.fanouts[hop] if layer else 0, hop):
        at = (draw + 0.5) / (1 << 53) * end
        targets.append(next((v for v, e in zip(layer, ends, strict=True) if at < e), layer[-1]))
    return step.walk(targets, step.key(1, hop))


TWINS: dict[str, Callable[..., Any]] = {
    "cluster": cluster,
    "saint-node": saint_node,
    "saint-edge": saint_edge,
    "saint-walk": saint_walk,
    "shadow": shadow,
    "induced": induced,
    "fastgcn": fastgcn,
    "ladies": ladies,
}


class InducedBatch(NamedTuple):
    """A subgraph; edges hop by hop, by target, and among these in the order of the graph."""

    n_id: list[int]
    trees: list[int]
    nodes_per_hop: list[int]
    src_local: list[list[int]]
    dst_local: list[list[int]]
    edges: list[list[int]]


def induce(
    step: Step, roots: list[int], choices: Callable[[list[int], int], Any], trees: bool, hops: int
) -> InducedBatch:
    """The roots, the chosen nodes behind them, ascending, and all edges among both.

    choices   what is chosen, of the nodes that are there, by hop
    hops      0: edges lead to all nodes; else to those that were there before the hop
    """
    entries = [(tree if trees else 0, node) for tree, node in enumerate(roots)]
    batch = InducedBatch([], [], [len(entries)], [], [], [])
    for hop in range(max(1, hops)):
        before = len(entries)
        chosen = choices([node for _, node in entries], hop)
        new = set(chosen) if trees else {(0, int(node)) for node in chosen}
        entries += sorted(new - set(entries))
        place = {entry: i for i, entry in reversed(list(enumerate(entries)))}
        found = [
            (place[tree, int(step.indices[edge])], i, edge)
            for i, (tree, node) in enumerate(entries[: before if hops else len(entries)])
            for edge in range(int(step.indptr[node]), int(step.indptr[node + 1]))
            if (tree, int(step.indices[edge])) in place
        ]
        for into, values in zip(
            batch[3:], zip(*found, strict=True) if found else ((), (), ()), strict=True
        ):
            into.append(list(values))
        batch.nodes_per_hop.append(len(entries) - before)
    batch.n_id[:] = [node for _, node in entries]
    batch.trees[:] = [tree for tree, _ in entries]
    if not hops:
        batch.nodes_per_hop[:] = [len(entries), 0]
    return batch
