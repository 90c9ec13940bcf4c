"""What a session takes of the arena: each part has room for the worst case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.format import NodeType, RowArray
from blockstore.kernels.records import EdgeRecord
from loaderd.memory.ledger import MIN_SESSION, ServedRows, graph_preferred, session_need
from loaderd.memory.workspace import RowName, Sizes, TableKind, workspace_bytes
from loaderd.plans.base import Shape

SLOT = 4096
IDS = RowArray("ids", "uint32", 1000)
NODE = NodeType(name="node", first=0, num_nodes=1000, original_id=IDS, store_id=IDS)
NAMES = RowName(0, "x"), RowName(1, "y")
SIZES = Sizes(1000, "uint32", EdgeRecord(), NAMES, 50, 50, TableKind.HASHED)


def rows(*widths: int) -> list[ServedRows]:
    return [
        ServedRows(str(i), NODE, RowArray(str(i), "uint8", 1000, (width,)), i)
        for i, width in enumerate(widths)
    ]


@given(
    st.integers(1, 2000), st.integers(0, 9000), st.lists(st.integers(1, SLOT), max_size=3),
    st.integers(0, 5000), st.integers(0, 20_000), st.sampled_from(["uint32", "uint64"]),
)  # fmt: skip
def test_every_part_has_room(nodes, edges, widths, seeds, lookup, id_dtype):
    shape = Shape(10, (10, 20), ((edges,), (edges // 2,)), nodes)
    sizes = SIZES._replace(id_dtype=id_dtype)
    served = rows(*widths)
    need = session_need(shape, sizes, served, seeds, lookup, SLOT)
    left, area = need.area, 0
    for width in widths:
        own = -(-nodes // (SLOT // width))  # rows do not go over the end of a slot
        assert own * (SLOT // width) >= nodes
        left, area = left - own, area + own
    assert left == 0
    item = 4 if id_dtype == "uint32" else 8
    assert need.seeds * SLOT >= seeds * item > (need.seeds - 1) * SLOT
    assert need.lookup * SLOT >= lookup > (need.lookup - 1) * SLOT
    work = workspace_bytes(shape, sizes)
    assert need.workspace * SLOT >= work > (need.workspace - 1) * SLOT
    assert need.addresses * SLOT >= nodes * (8 * len(widths) + 4)
    assert need.structure * SLOT >= nodes * item + shape.total_edges * 4 + 30 * 4
    served_at_once = need.workspace + 2 + need.structure + need.addresses + len(widths)
    assert need.minimum == need.seeds + max(need.lookup, served_at_once)


@pytest.mark.parametrize("edge_rows", [False, True])
def test_rows_of_edges_have_room_too(edge_rows):
    shape = Shape(10, (10,), ((300,),), 200)
    need = session_need(
        shape, SIZES._replace(record=EdgeRecord(items=int(edge_rows))), rows(1024), 5, 0, SLOT
    )
    assert need.area == (500 if edge_rows else 200) // 4


@pytest.mark.parametrize(
    ("graph", "rows", "expected"),
    [
        (100, 10_000, 100),  # a third
        (101, 10_000, 25),  # a twelfth
        (101, 98, 101),  # with all rows, 101 slots are left
        (101, 99, 25),
        (150, 0, 150),
        (151, 0, 25),
        (5000, 0, 25),
    ],
)
def test_the_graph_is_whole_where_sessions_have_room_too(graph: int, rows: int, expected: int):
    assert graph_preferred(graph, rows, 4, 300) == expected


@pytest.mark.parametrize(("graph", "minimum"), [(100, 40), (13, 40), (5000, 90)])
def test_the_graph_keeps_its_minimum_and_a_session_its_own(graph: int, minimum: int):
    found = graph_preferred(graph, graph, minimum, 100)
    assert found == min(minimum, 100 - MIN_SESSION)
