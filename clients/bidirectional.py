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
    """The edges of each relation, and the reverse of those of the relation that is its reverse.

    Which one that is PyG decides by names: `rev_X` is the reverse of X, both then have the same
    edges; a relation within a type is its own reverse if there is none of that name; otherwise the
    only relation back is.  A relation without is left as it is, with a warning.  What comes with
    edges stays where a relation is its own reverse, and is left out elsewhere: of a pair of nodes
    it may be that of either relation.  Source: PyG, `HeteroSamplerOutput.to_bidirectional`.
    """
    found = dict(relations)
    for relation, edges in relations.items():
        src, name, dst = relation
        named = (dst, f"rev_{name}", src)
        back = [r for r in relations if (r[0], r[2]) == (dst, src)]
        if name.startswith("rev_"):
            continue  # made with the other one
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
    """The edges of a relation and the reverse of each, with all that comes with them.

    As with PyG each pair of nodes is there once, in the order of targets, then sources, and hops
    are not told apart.  Of a pair in both directions each has its own values, of equal edges those
    of the first.
    """
    one_way = edges["edge_index"]
    both = torch.cat([one_way, one_way.flip(0)], 1)
    places = torch.arange(both.size(1), device=both.device)
    both, first = coalesce(both, places, sort_by_row=False, reduce="min")
    own = first % max(1, one_way.size(1))
    values = {n: v[own] for n, v in edges.items() if n not in ("edge_index", "num_sampled_edges")}
    return {"edge_index": both} | values
