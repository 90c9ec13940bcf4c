"""The plan of an ingest: the least memory that is named is the least that does."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall
from blockstore.units import parse_bytes
from preprocess.errors import BadInput
from preprocess.ingest.contents import Contents, edge_id_dtype, list_contents
from preprocess.ingest.ingest import IngestStages
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.plan import IngestJob, check_longest, node_bytes, plan_memory
from preprocess.pipeline.result import IngestPlan
from preprocess.sources.source import Source, SourceRows
from tests.preprocess.naive import ArraySource, HeldEdges

MB = 1 << 20


class Headers(ArraySource):
    """A source that has nothing but sizes."""

    def __init__(self, num_nodes: int, num_edges: int, width: int) -> None:
        super().__init__(num_nodes, [])
        edges = HeldEdges([], "edges")
        edges.num_edges = num_edges
        self.add_edges(("node", "to", "node"), edges)
        self._width = width

    def features(self, node_type: str) -> list[SourceRows]:
        rows = self.num_nodes["node"]
        return [SourceRows("x", np.dtype(np.float64), (self._width,), rows, "dense", "x")]


def plan_ingest(source: Source, options: IngestOptions) -> IngestPlan:
    """What an ingest says before it starts."""
    options.check()
    source = source.with_reverses(options.undirected)
    return IngestStages(source, list_contents(source, options), options).plan()


SIZES = st.builds(Headers, st.integers(1, 10**8), st.integers(0, 10**10), st.integers(1, 10**6))
OPTIONS = st.builds(
    IngestOptions,
    block_bytes=st.sampled_from([4096, 1 << 16, 1 << 20, 1 << 24]),
    order=st.sampled_from(["bfs", "degree", "random", "source"]),
    edge_ids=st.booleans(),
    undirected=st.booleans(),
)


def minimum(error: BudgetTooSmall) -> int:
    """The bytes that a message says would do."""
    found = re.search(r"expected at least --mem (\w+) ", str(error))
    assert found is not None
    return parse_bytes(found[1])


def minimum_of(contents: Contents, options: IngestOptions) -> int:
    """The least that a plan asks for."""
    with pytest.raises(BudgetTooSmall) as caught:
        plan_memory(contents, replace(options, mem_bytes=1))
    return minimum(caught.value)


@given(source=SIZES, options=OPTIONS, column=st.integers(0, 1 << 32))
def test_the_least_that_is_named_does_and_less_does_not(source, options, column):
    contents = list_contents(source, options)
    enough = replace(options, mem_bytes=minimum_of(contents, options))
    job = IngestJob(source, contents, enough, *plan_memory(contents, enough))
    unit = MB if enough.mem_bytes < 100_000 * MB else 1024 * MB  # that the least is named in
    with pytest.raises(BudgetTooSmall):
        plan_memory(contents, replace(options, mem_bytes=enough.mem_bytes - unit))
    try:
        check_longest(job, column)
    except BudgetTooSmall as error:
        more = replace(options, mem_bytes=minimum(error))
        assert more.mem_bytes > enough.mem_bytes
        job = IngestJob(source, contents, more, *plan_memory(contents, more))
        check_longest(job, column)


@given(source=SIZES, options=OPTIONS, spare=st.integers(0, 1 << 32))
def test_what_is_shared_out_is_there(source, options, spare):
    contents = list_contents(source, options)
    options = replace(options, mem_bytes=minimum_of(contents, options) + spare)
    buffer, share = plan_memory(contents, options)
    assert buffer >= options.block_bytes
    assert share >= 8 * max(r.source.row_bytes for r in contents.rows())
    found = plan_ingest(source, options)
    assert sum(line.bytes for line in found.memory) == options.mem_bytes
    assert all(line.bytes >= 0 for line in found.memory)
    assert found.memory[0].bytes == node_bytes(options) * source.num_nodes["node"]


def test_disk_counts_what_passes_through():
    source = Headers(1_000_000, 30_000_000, 128)
    roomy = plan_ingest(source, IngestOptions(mem_bytes=4 << 30))
    tight = plan_ingest(source, IngestOptions(mem_bytes=128 * MB))
    assert roomy.store_bytes == tight.store_bytes
    assert roomy.store_bytes > 30_000_000 * 20 // 8 + 512_000_000  # 20 bits a source
    assert roomy.temporary_bytes == 8_000_000  # counts and ranks
    assert tight.temporary_bytes > 512_000_000
    for moved in ("read_bytes", "written_bytes"):
        of_roomy, of_tight = (sum(getattr(s, moved) for s in p.stages) for p in (roomy, tight))
        assert of_roomy < of_tight
    names = [s.name for s in tight.stages]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.2, 0.1), (-0.1, 0.5, 0.5), (0, 0, 0)])
def test_splits_that_are_none(shares):
    with pytest.raises(BadInput, match="--split: found"):
        IngestOptions(split=shares).check()


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
    assert edge_id_dtype(2**31 - 1, True) == "uint32"
    assert edge_id_dtype(2**31, True) == "uint64"
    assert edge_id_dtype(2**40, False) is None
