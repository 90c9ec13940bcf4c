"""The plan of an ingest: the least memory that is named is the least that does."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall
from blockstore.format import RowArray
from preprocess.errors import BadInput
from preprocess.options import IngestOptions
from preprocess.plan import Facts, check_longest, edge_id_dtype, plan_disk, plan_memory

MB = 1 << 20
SIZES = st.builds(
    lambda nodes, edges, width: Facts(
        nodes, edges, (RowArray("x", "float32", nodes, (width,)),), 8 * width
    ),
    nodes=st.integers(1, 10**8), edges=st.integers(0, 10**10), width=st.integers(1, 10**6),
)  # fmt: skip
OPTIONS = st.builds(
    IngestOptions,
    block_bytes=st.sampled_from([4096, 1 << 16, 1 << 20, 1 << 24]),
    order=st.sampled_from(["bfs", "source"]),
)


def least(error: BudgetTooSmall) -> int:
    """The bytes that a message says would do."""
    found = re.search(r"expected at least --mem (\d+)M ", str(error))
    assert found is not None
    return int(found[1]) * MB


@given(facts=SIZES, options=OPTIONS, column=st.integers(0, 1 << 32))
def test_the_least_that_is_named_does_and_less_does_not(facts, options, column):
    with pytest.raises(BudgetTooSmall) as caught:
        plan_memory(facts, replace(options, mem_bytes=1))
    enough = replace(options, mem_bytes=least(caught.value))
    memory = plan_memory(facts, enough)
    with pytest.raises(BudgetTooSmall):
        plan_memory(facts, replace(options, mem_bytes=enough.mem_bytes - MB))
    try:
        check_longest(facts, enough, memory, column)
    except BudgetTooSmall as error:
        more = replace(options, mem_bytes=least(error))
        assert more.mem_bytes > enough.mem_bytes
        check_longest(facts, more, plan_memory(facts, more), column)


@given(facts=SIZES, options=OPTIONS, spare=st.integers(0, 1 << 32))
def test_what_is_shared_out_is_there(facts, options, spare):
    with pytest.raises(BudgetTooSmall) as caught:
        plan_memory(facts, replace(options, mem_bytes=1))
    given_bytes = least(caught.value) + spare
    memory = plan_memory(facts, replace(options, mem_bytes=given_bytes))
    nodes = facts.num_nodes * (21 if options.order == "bfs" else 6)
    assert nodes + 6 * options.block_bytes + 2 * memory.buffer + memory.share <= given_bytes
    assert memory.buffer >= options.block_bytes
    assert memory.share >= 8 * facts.widest_source_row


def test_disk_counts_what_passes_through():
    rows = (RowArray("x", "float32", 1_000_000, (128,)),)
    facts = Facts(1_000_000, 30_000_000, rows, 512)
    large, small = IngestOptions(mem_bytes=4 << 30), IngestOptions(mem_bytes=128 * MB)
    roomy = plan_disk(facts, large, plan_memory(facts, large))
    tight = plan_disk(facts, small, plan_memory(facts, small))
    assert roomy.store == tight.store
    assert roomy.store > 30_000_000 * 4 + 512_000_000
    assert roomy.temporary == 4_000_000
    assert tight.temporary > 512_000_000


def test_options_that_no_graph_can_be_stored_with():
    for size in (0, 1000, 4095, 4097, 2 << 30):
        with pytest.raises(BadInput, match="--block-size: found"):
            IngestOptions(block_bytes=size).check()
    assert IngestOptions().node_dtype(2**31 - 2) == "uint32"
    assert IngestOptions(order="source").node_dtype(2**32 - 1) == "uint64"
    assert IngestOptions(ids="uint64").node_dtype(10) == "uint64"
    with pytest.raises(BadInput, match="--order"):
        IngestOptions().node_dtype(2**31)
    with pytest.raises(BadInput, match="--ids"):
        IngestOptions(order="source", ids="uint32").node_dtype(2**32)


def test_edge_ids_are_wide_where_reverses_would_not_fit():
    kept = IngestOptions(edge_ids=True)
    assert edge_id_dtype(2**31 - 1, kept) == "uint32"
    assert edge_id_dtype(2**31, kept) == "uint64"
    assert edge_id_dtype(2**40, IngestOptions()) is None
