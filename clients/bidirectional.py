"""Batches with each edge in both directions, as PyG's `subgraph_type="bidirectional"` has them."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import coalesce

from clients.torch import EdgeType

Edges = dict[str, Any]  # `edge_index`, and what else comes with the edges of a relation


def with_reverses(relations: Mapping[EdgeType, Edges]) -> dict[EdgeType, Edges]:
    """Add to each relation the reversed edges of its reverse relation.

    As in PyG, names decide which one that is: `rev_X` is the reverse of X, and both then get the
    same edges; without it, a relation within one type is its own reverse, and any other relation
    takes the only one in the other direction.  If there is none, it is unchanged, with a warning.
    Edge values are kept if a relation is its own reverse, else dropped, as either relation could
    provide them.  Source: PyG, `HeteroSamplerOutput.to_bidirectional`.
    """
    found = dict(relations)
    for relation, edges in relations.items():
        src, name, dst = relation
        named = (dst, f"rev_{name}", src)
        back = [r for r in relations if (r[0], r[2]) == (dst, src)]
        if name.startswith("rev_"):
            continue  # handled with its reverse
        if named in relations:
            both = _union(edges["edge_index"], relations[named]["edge_index"])
            found[relation], found[named] = {"edge_index": both}, {"edge_index": both.flip(0)}
        elif src == dst:
            found[relation] = _own_reverses(edges)
        elif len(back) == 1:
            reverse = relations[back[0]]["edge_index"]
            found[relation] = {"edge_index": _union(edges["edge_index"], reverse)}
        else:
            warnings.warn(
                f"subgraph_type='bidirectional': found no reverse of {relation}, expected a "
                f"relation {named}, or one relation back; its edges stay as they are: ingest with "
                "--undirected, which adds reverses",
                stacklevel=2,
            )
    return found


def _union(edges: Tensor, reverse: Tensor) -> Tensor:
    """(2, edges): each pair of nodes once, in the order of targets, then sources."""
    both: Tensor = coalesce(torch.cat([edges, reverse.flip(0)], 1), sort_by_row=False)
    return both


def _own_reverses(edges: Edges) -> Edges:
    """The edges of a relation and the reverse of each, with their values.

    As in PyG, each pair of nodes occurs once, in the order of targets, then sources, and hops are
    not told apart.  If a pair has edges in both directions, each keeps its own values; duplicate
    edges get those of the first.
    """
    one_way = edges["edge_index"]
    both = torch.cat([one_way, one_way.flip(0)], 1)
    places = torch.arange(both.size(1), device=both.device)
    both, first = coalesce(both, places, sort_by_row=False, reduce="min")
    own = first % max(1, one_way.size(1))
    values = {n: v[own] for n, v in edges.items() if n not in ("edge_index", "num_sampled_edges")}
    return {"edge_index": both} | values
