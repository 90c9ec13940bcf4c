"""Hop after hop: sampling and renumbering together, against the reference's batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.random import make_key
from blockstore.kernels.renumber import NodeTable, clear_table, enter_seeds, renumber
from tests import reference
from tests.blockstore.kernels.sampling import sample_by_block, sample_present
from tests.graphs import hold, make_csc

POSITION = st.integers(0, 2**64 - 1), st.integers(0, 99), st.integers(0, 10**6)


def _table(hashed: bool, num_nodes: int, maximum: int) -> NodeTable:
    """With room for `maximum` nodes."""
    if not hashed:
        return NodeTable(None, np.full(num_nodes, -1, np.int32))
    size = 1 << (2 * maximum).bit_length()
    keys = np.full(size, 2**32 - 1, np.uint32)
    return NodeTable(keys, np.zeros(size, np.uint32))


def _batch(held, seeds, fanouts, position, hashed, together):
    """One batch by the kernels; blocks all present, or `together` at a time."""
    maximum = len(seeds) + held.graph.indices.size
    table = _table(hashed, held.graph.num_nodes, maximum)
    n_id = np.empty(maximum, np.uint32)
    n_id[: len(seeds)] = seeds
    low, high = 0, len(seeds)
    enter_seeds(n_id, high, table, None)
    batch = reference.SampledBatch([], [high], [], [], [])
    for hop, fanout in enumerate(fanouts):
        frontier, key = n_id[low:high], make_key(*position, hop, 0)
        found = (
            sample_by_block(held, frontier, fanout, key, False, together)
            if together
            else sample_present(held, frontier, fanout, key)
        )
        counts = np.array([len(column) for column in found.sources], np.uint32)
        draws = np.array([s for column in found.sources for s in column], np.uint32)
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        local = np.empty(draws.size, np.uint32)
        num_nodes, num_edges = renumber(
            draws, starts, counts, table, n_id, high, local, 0, None, None
        )
        assert num_edges == draws.size
        batch.src_local.append(local.tolist())
        batch.dst_local.append(np.repeat(np.arange(low, high), counts).tolist())
        batch.edges.append([edge for column in found.edge_ids for edge in column])
        batch.nodes_per_hop.append(num_nodes - high)
        low, high = high, num_nodes
    clear_table(n_id, high, table, None)
    kept = table.keys == 2**32 - 1 if hashed else table.values == -1
    assert kept.all()
    return batch._replace(n_id=n_id[:high].tolist())


@pytest.mark.parametrize("hashed", [False, True])
@given(
    degrees=st.lists(st.integers(0, 30), min_size=1, max_size=60), long_degree=st.integers(0, 2500),
    fanouts=st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 10, 70]), max_size=3),
    position=st.tuples(*POSITION), together=st.sampled_from([0, 1, 2]), data=st.data(),
)  # fmt: skip
def test_batches_are_those_of_the_reference(
    hashed, degrees, long_degree, fanouts, position, together, data
):
    """Seeds may be given twice; columns may be empty, or lie in several blocks."""
    graph = make_csc([*degrees, long_degree], 5, edge_id_dtype="uint32")
    seeds = data.draw(st.lists(st.integers(0, len(degrees)), max_size=8))
    held = hold(graph, 4096, "uint32", "uint32")
    expected = reference.sample_batch(graph.indptr, graph.indices, seeds, fanouts, *position)
    edges = [[int(graph.edge_ids[edge]) for edge in hop] for hop in expected.edges]
    found = _batch(held, seeds, fanouts, position, hashed, together)
    assert found == expected._replace(edges=edges)


def test_a_hop_expands_only_what_the_one_before_found():
    """The path 3 -> 2 -> 1 -> 0 and a loop at 0: nodes at distance h come with hop h."""
    indptr, indices = np.array([0, 2, 3, 4, 4]), np.array([0, 1, 2, 3], np.uint32)
    found = reference.sample_batch(indptr, indices, [0], [9, 9, 9, 9], 1, 0, 0)
    assert found.n_id == [0, 1, 2, 3]
    assert found.nodes_per_hop == [1, 1, 1, 1, 0]
    assert found.edges == [[0, 1], [2], [3], []]
    assert found.src_local == [[0, 1], [2], [3], []]
    assert found.dst_local == [[0, 0], [1], [2], []]
