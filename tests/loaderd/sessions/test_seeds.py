"""Seeds that a client names: bounds, before anything is read."""

import numpy as np
import pytest

from blockstore.format import FORMAT_VERSION, Manifest, NodeType, Relation, RowArray
from loaderd.api.errors import Refused
from loaderd.sessions.seeds import MAX_LISTED, count_edges, count_seeds, table_items
from tests.loaderd.samples import RESOLVED

IDS = RowArray("ids", "uint32", 10)
NODE = NodeType("node", 0, 10, IDS, IDS, splits={"train": RowArray("train", "int64", 4)})
ITEM = NodeType("item", 10, 3, IDS, IDS)
LISTED = RowArray("listed", "int64", 7)
TO = Relation(
    src="node", name="to", dst="item", num_edges=40, num_blocks=2, path="e", first_node_path="f",
    edge_id_dtype="uint32", num_source_edges=40, has_weights=False, has_times=False,
    first_edge_path="g",
    splits={"listed": LISTED, "pairs": RowArray("pairs", "int64", 6, (2,)),
            "many": RowArray("many", "int64", MAX_LISTED + 1)},
)  # fmt: skip
MANIFEST = Manifest(
    format=FORMAT_VERSION, block_bytes=4096, id_dtype="uint32", types=(NODE, ITEM), relations=(TO,)
)


@pytest.mark.parametrize(
    ("ids", "said"),
    [([0, 9], ""), ([3, 10], r"input_nodes\[1\] is 10, outside \[0, 10\)"),
     ([-1], r"input_nodes\[0\] is -1, outside \[0, 10\)"), ([2**62], "outside")],
)  # fmt: skip
def test_ids_are_those_of_nodes(ids, said):
    given = np.array(ids, np.int64)
    if not said:
        assert count_seeds(NODE, "", given) == len(ids)
        return
    with pytest.raises(Refused, match=said):
        count_seeds(NODE, "", given)


@pytest.mark.parametrize(("split", "count"), [("train", 4), ("all", 10)])
def test_splits_have_their_size(split, count):
    assert count_seeds(NODE, split, None) == count


@pytest.mark.parametrize(
    ("split", "mask", "said"),
    [("test", 0, "split 'test' is not in the store: it has train, all"),
     ("train", 9, "a mask over 9 nodes, expected one over the 10"),
     ("", 0, "neither a split nor ids")],
)  # fmt: skip
def test_what_is_not_there_is_refused(split, mask, said):
    with pytest.raises(Refused, match=said):
        count_seeds(NODE, split, None, mask)


@pytest.mark.parametrize(
    ("sources", "targets", "said"),
    [([0, 9], [0, 2], ""), ([0, 10], [0, 2], r"edge_label_index\[0, 1\] is 10, outside \[0, 10\)"),
     ([0, 1], [3, 0], r"edge_label_index\[1, 0\] is 3, outside \[0, 3\)"),
     ([0, 1], [0, -1], r"edge_label_index\[1, 1\] is -1")],
)  # fmt: skip
def test_ends_of_edges_are_nodes_of_their_types(sources, targets, said):
    given = np.array([*sources, *targets], np.int64)
    if not said:
        assert count_edges(MANIFEST, TO, "", given) == 2
        return
    with pytest.raises(Refused, match=said):
        count_edges(MANIFEST, TO, "", given)


def test_splits_of_edges_have_their_size_and_bounds():
    assert [count_edges(MANIFEST, TO, s, None) for s in ("all", "listed", "pairs")] == [40, 7, 6]
    with pytest.raises(Refused, match=f"lists {MAX_LISTED + 1} edge ids, expected at most"):
        count_edges(MANIFEST, TO, "many", None)
    with pytest.raises(Refused, match="split 'x' of edges is not in the store: it has listed"):
        count_edges(MANIFEST, TO, "x", None)


def test_the_table_of_seeds_has_room_for_what_it_is_made_of():
    assert table_items(MANIFEST, None, "train", RESOLVED) == RESOLVED.num_seeds
    assert table_items(MANIFEST, TO, "pairs", RESOLVED) == 2 * RESOLVED.num_seeds
    assert table_items(MANIFEST, TO, "all", RESOLVED) * 4 >= 8 * (TO.num_blocks + 1)
