"""What splitting a batch by owner gives, in plain Python: the reference of the compiled kernel."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from clients.split import Exchange, SplitBatch
from clients.torch import Batch

Needs = dict[tuple[int, int], list[int]]  # (receiving, sending owner) -> nodes, as edges name them


def spans(counts: Sequence[int]) -> list[range]:
    """The places of each hop's nodes or edges."""
    return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


def needs(batch: Batch, owner: Sequence[int]) -> list[Needs]:
    """By hop: which nodes an owner needs of another one, in the order in which its edges do.

    With frontier "new" a node is sent once: at the first hop that needs it.
    """
    found: list[Needs] = []
    sent: set[tuple[int, int]] = set()
    edges = batch.edge_index.t().tolist()
    for span in spans(batch.num_sampled_edges):
        hop: Needs = {}
        if batch.frontier == "layer":
            sent = set()
        for place in span:
            src, dst = edges[place]
            if owner[src] != owner[dst] and (src, owner[dst]) not in sent:
                sent.add((src, owner[dst]))
                hop.setdefault((owner[dst], owner[src]), []).append(src)
        found.append(hop)
    return found


def remote_nodes(hops: list[Needs], own: int, num_owners: int) -> list[list[int]]:
    """By hop: remote nodes that it is the first to need, by owner and first occurrence."""
    seen: set[int] = set()
    found = []
    for hop in hops:
        wanted = [v for other in range(num_owners) for v in hop.get((own, other), [])]
        found.append([v for v in wanted if v not in seen])
        seen.update(wanted)
    return found


def split(
    batch: Batch,
    owner: Sequence[int],
    num_owners: int,
    mixed_rows: bool = False,
    wanted: Sequence[int] | None = None,
) -> list[SplitBatch]:
    """The pieces of a batch, one for each owner, or for each that is wanted.

    owner   of each node of the batch
    """
    hops = needs(batch, owner)
    nodes: list[list[int]] = [[] for _ in range(num_owners)]
    for v, own in enumerate(owner):
        nodes[own].append(v)
    return [
        _piece(batch, owner, own, nodes, hops, remote_nodes(hops, own, num_owners), mixed_rows)
        for own in (range(num_owners) if wanted is None else wanted)
    ]


def _piece(
    batch: Batch,
    owner: Sequence[int],
    own: int,
    nodes: list[list[int]],
    hops: list[Needs],
    remote: list[list[int]],
    mixed_rows: bool,
) -> SplitBatch:
    owners = range(len(nodes))
    arrived = [v for hop in remote for v in hop]
    local = {v: place for place, v in enumerate([*nodes[own], *arrived])}
    edges = batch.edge_index.t().tolist()
    kept = [
        [e for e in span if owner[edges[e][1]] == own] for span in spans(batch.num_sampled_edges)
    ]
    ends = [(local[edges[e][0]], local[edges[e][1]]) for hop in kept for e in hop]
    mine = torch.tensor(nodes[own], dtype=torch.int64)
    rows = torch.tensor(nodes[own] + (arrived if mixed_rows else []), dtype=torch.int64)
    seeds = mine[mine < batch.batch_size]
    return SplitBatch(
        epoch=batch.epoch,
        step=batch.step,
        owner=own,
        num_owners=len(nodes),
        batch_size=seeds.numel(),
        step_seeds=batch.batch_size,
        n_id=batch.n_id[mine],
        input_id=batch.input_id[seeds],
        edge_index=torch.tensor(ends, dtype=torch.int64).view(-1, 2).t().contiguous(),
        e_id=None,
        x=None if batch.x is None else batch.x[rows],
        y=None if batch.y is None else batch.y[mine],
        features={name: values[rows] for name, values in batch.features.items()},
        num_sampled_nodes=[sum(owner[v] == own for v in s) for s in spans(batch.num_sampled_nodes)],
        num_remote_nodes=[len(hop) for hop in remote],
        num_sampled_edges=[len(hop) for hop in kept],
        exchanges=[
            _exchange(
                [[local[v] for v in hop.get((other, own), [])] for other in owners],
                [[local[v] - len(mine) for v in hop.get((own, other), [])] for other in owners],
            )
            for hop in hops
        ],
        frontier=batch.frontier,
    )


def _exchange(sent: list[list[int]], received: list[list[int]]) -> Exchange:
    return Exchange(
        send=torch.tensor([v for group in sent for v in group], dtype=torch.int64),
        recv=torch.tensor([v for group in received for v in group], dtype=torch.int64),
        send_counts=[len(group) for group in sent],
        recv_counts=[len(group) for group in received],
    )
