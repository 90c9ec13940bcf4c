"""Batches against the reference's: the first number that differs, told in one line."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple


class At(NamedTuple):
    """Which batch is compared."""

    epoch: int
    step: int

    def same(self, field: str, found: Any, expected: Any, nodes: Sequence[Any] = ()) -> None:
        """Fails with epoch, step, field, position, node, and what was found and expected there.

        found, expected   tensors, arrays or lists, of any number of axes
        nodes             the node that each position along the first axis is about
        """
        __tracebackhide__ = True
        found, expected = _plain(found), _plain(expected)
        if found == expected:
            return
        if not isinstance(found, list) or not isinstance(expected, list):
            raise AssertionError(f"{self}, {field}: found {found!r}, expected {expected!r}")
        pairs = enumerate(zip(found, expected, strict=False))
        short = min(len(found), len(expected))
        place = next((i for i, (a, b) in pairs if a != b), short)
        node = f", node {nodes[place]}" if place < len(nodes) else ""
        said = [repr(v[place]) if place < len(v) else "nothing" for v in (found, expected)]
        length = f" (of {len(found)}, expected {len(expected)})" * (len(found) != len(expected))
        raise AssertionError(
            f"{self}, {field}[{place}]{node}: found {said[0]}, expected {said[1]}{length}"
        )

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def flat(hops: Iterable[Sequence[Any]]) -> list[Any]:
    """All hops, one after the other."""
    return list(chain.from_iterable(hops))


def same_batch(at: At, batch: Any, expected: Any, edges: Any = None) -> None:
    """A batch of one type is the reference's; its features are those of `tests.stores`.

    edges   original ids of the edges that the reference names by their places
    """
    __tracebackhide__ = True
    n_id = expected.n_id
    at.same("epoch and step", [batch.epoch, batch.step], list(at))
    at.same("n_id", batch.n_id, n_id, n_id)
    at.same("num_sampled_nodes", list(batch.num_sampled_nodes), list(expected.nodes_per_hop))
    targets = [n_id[place] for place in flat(expected.dst_local)]
    at.same("edge_index[0]", batch.edge_index[0], flat(expected.src_local), targets)
    at.same("edge_index[1]", batch.edge_index[1], flat(expected.dst_local), targets)
    ids = flat(expected.edges)
    at.same("e_id", batch.e_id, ids if edges is None else [int(edges[e]) for e in ids], targets)
    at.same("x[:, 1]", batch.x[:, 1], [2.0 * node for node in n_id], n_id)


def same_hetero_batch(
    at: At, batch: Any, expected: Any, hops: Any, x: Any, edges: Any = None
) -> None:
    """A batch of several types is the reference's.

    hops    by relation: the hops' (sources, targets, places), each a list of lists
    x       by type: features of its nodes
    edges   by relation: original ids, where the reference names edges by their places
    """
    __tracebackhide__ = True
    n_id = expected.n_id
    at.same("types", list(batch.n_id), list(n_id))
    for name, ids in n_id.items():
        at.same(f"n_id[{name}]", batch.n_id[name], ids, ids)
        found, counts = batch.num_sampled_nodes[name], expected.nodes_per_hop[name]
        at.same(f"num_sampled_nodes[{name}]", list(found), list(counts))
    for relation, parts in hops.items():
        name = "__".join(relation)
        src, dst, places = (flat(part) for part in parts)
        targets = [n_id[relation[2]][place] for place in dst]
        at.same(f"edge_index[{name}][0]", batch.edge_index[relation][0], src, targets)
        at.same(f"edge_index[{name}][1]", batch.edge_index[relation][1], dst, targets)
        ids = places if edges is None else [int(edges[relation][e]) for e in places]
        at.same(f"e_id[{name}]", batch.e_id[relation], ids, targets)
        counts = [len(hop) for hop in parts[2]]
        at.same(f"num_sampled_edges[{name}]", list(batch.num_sampled_edges[relation]), counts)
    at.same("types with x", sorted(batch.x), sorted(x))
    for name, rows in x.items():
        at.same(f"x[{name}]", batch.x[name], rows[n_id[name]], n_id[name])
