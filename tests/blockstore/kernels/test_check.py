"""Graph blocks against the object index, and a naive twin of what is checked of them."""

import struct
from random import Random

import numpy as np
import pytest

from blockstore.format import (
    BLOCK_HEADER,
    BLOCK_VERSION,
    BlockHeader,
    EdgeLayout,
    edges_start_bytes,
    id_bits,
)
from blockstore.kernels.check import (
    GOOD,
    Expected,
    check_head,
    check_pages,
    check_sources,
    find_bad_block,
)
from blockstore.kernels.crc import page_crcs
from tests import reference
from tests.graphs import lay_out, make_csc, pack

BLOCK = 4096
BITS = {"uint32": 27, "uint64": 53}  # more than the nodes need: some numbers are of no node


class Packed:
    """A graph in blocks with columns over several of them, and what its tables say."""

    def __init__(self, id_dtype: str) -> None:
        degrees = np.array([3, 0, 5000, 0, 7, 2000, 40, 900, 0, 1, 1006, 2])
        self.graph = make_csc(np.tile(degrees, 3), 3, id_dtype)
        self.blocks, self.first_node = pack(self.graph, BLOCK, id_dtype, bits=BITS[id_dtype])
        counts = [BlockHeader.unpack(b.tobytes(), "").num_edges for b in self.blocks]
        self.first_edge = np.cumsum([0, *counts]).astype(np.uint64)
        self.layout = lay_out(self.graph, id_dtype, bits=BITS[id_dtype])
        self.capacity, self.stop = self.layout.capacity(BLOCK), self.graph.num_nodes
        self.expected = Expected(
            self.first_node, self.first_edge, self.layout.flags, self.capacity,
            self.layout.source_bits, self.layout.source_base, self.stop,
        )  # fmt: skip

    def found(self, number, block):
        """Whether the kernels find the block good."""
        crcs = np.empty(block.size // 4096, np.uint32)
        page_crcs(block, crcs.size, crcs)
        bad, sound = check_pages(block, crcs, number, self.expected)
        assert bad < 0
        head = check_head(block.view(np.uint32), number, self.expected)
        good, first = sound and head == GOOD, max(0, number - 1)
        together = [*self.blocks[first:number], block, *self.blocks[number + 1 : number + 2]]
        bad = find_bad_block(np.concatenate(together), BLOCK, first, self.expected)
        assert bad == (-1 if good else number - first)
        return good

    def is_good(self, number, block):
        """The naive twin."""
        magic, version, *fields = BLOCK_HEADER.unpack_from(block.tobytes())
        header = BlockHeader(*fields)
        nodes = np.diff(self.first_node.astype(np.int64))
        edges = np.diff(self.first_edge.astype(np.int64))
        if (magic, version) != (b"GBLK", BLOCK_VERSION):
            return False
        told = header.flags, header.first_node, header.num_nodes, header.num_edges
        known = self.layout.flags, self.first_node[number], nodes[number], edges[number]
        width = header.source_bits, header.source_base
        if told != known or width != (self.layout.source_bits, self.layout.source_base):
            return False
        offsets = block[64 : 64 + 4 * (header.num_nodes + 1)].view(np.uint32).astype(np.int64)
        sound = offsets[0] == header.num_carried
        sound &= offsets[-1] == header.num_edges and (np.diff(offsets) >= 0).all()
        if not sound or not self._carries(number, header.num_carried, nodes, edges):
            return False
        here = int(offsets[-1] - offsets[-2]) if header.num_nodes else 0
        if header.last_degree != here and not self._goes_on(number, header, here, nodes, edges):
            return False
        sources = reference.unpack_bits(
            block[edges_start_bytes(header.num_nodes) :].tobytes(), *width, header.num_edges
        )
        return all(source < self.stop for source in sources)

    def _carries(self, number, carried, nodes, edges):
        """Blocks before it hold one column, and nothing but that."""
        if carried > min(edges[number], self.capacity):
            return False
        if not nodes[number] and carried != edges[number]:
            return False
        before = number - 1
        while carried and before >= 0 and nodes[before] == 0:
            if edges[before] != self.capacity:
                return False
            before -= 1
        return not carried or (
            before >= 0 and nodes[before] == 1 and edges[before] == self.capacity
        )

    def _goes_on(self, number, header, here, nodes, edges):
        """Blocks after it hold the rest of the column."""
        if here != self.capacity or header.num_nodes != 1 or header.num_carried:
            return False
        left = header.last_degree - self.capacity
        at = number + 1
        while left > self.capacity:
            if at >= len(nodes) or nodes[at] or edges[at] != self.capacity:
                return False
            left, at = left - self.capacity, at + 1
        return left > 0 and at < len(nodes) and edges[at] >= left


@pytest.fixture(scope="module", params=["uint32", "uint64"])
def packed(request):
    return Packed(request.param)


def test_blocks_as_they_are_written_are_good(packed):
    carried = 0
    for number, block in enumerate(packed.blocks):
        assert packed.found(number, block)
        assert packed.is_good(number, block)
        carried += BlockHeader.unpack(block.tobytes(), "").num_carried > 0
    assert carried > 8


FIELDS = (
    (0, "<I"), (4, "<H"), (6, "<H"), (8, "<Q"), (16, "<Q"), (24, "<I"), (28, "<I"), (32, "<I"),
    (36, "<I"), (40, "<Q"), (64, "<I"), (68, "<I"), (72, "<I"), (72, "<Q"), (80, "<Q"),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_changed_block_is_judged_as_its_naive_twin_judges_it(packed, seed):
    random, judged = Random(seed), []
    for _ in range(400):
        number = random.randrange(len(packed.blocks))
        block = packed.blocks[number].copy()
        at, form = random.choice(FIELDS)
        old = struct.unpack_from(form, block, at)[0]
        near = (old + 1, old - 1, old + packed.capacity, old + BLOCK, 0, 1, 2**63, 2**64 - 1)
        full = packed.capacity
        value = random.choice((*near, full, 2 * full, random.getrandbits(12)))
        struct.pack_into(form, block, at, value & (1 << 8 * struct.calcsize(form)) - 1)
        judged.append(packed.is_good(number, block))
        assert packed.found(number, block) == judged[-1], (number, at, form, value)
    assert True in judged
    assert judged.count(False) > 200


@pytest.mark.parametrize("num_sources", [1, 2, 5, 8, 9, 100, 2**20 + 1, 2**40 + 7])
def test_sources_up_to_the_last_node_of_their_type_are_in_range(num_sources):
    layout = EdgeLayout("uint64", id_bits(num_sources), 1000, 0, 0, 0)
    last, maximum = num_sources - 1, (1 << layout.source_bits) - 1
    values = [0, last, last // 2, last, maximum, 0, last, maximum, last]
    data = np.frombuffer(reference.pack_bits(values, layout.source_bits) + bytes(16), np.uint8)
    table = np.zeros(2, np.uint64)
    expected = Expected(table, table, 0, 1, layout.source_bits, 1000, num_sources)
    for low in range(len(values)):
        for high in range(low, len(values) + 1):
            sound = all(value <= last for value in values[low:high])
            assert check_sources(data, 0, low, high, expected) == sound
