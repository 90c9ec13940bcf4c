"""Nodes that have edges: nobody asks what the others would give, and it takes no memory."""

from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import NodeType, Relation
from blockstore.store import Store
from clients.inference.rows import SCAN_BYTES
from preprocess.files.ahead import read_ahead
from preprocess.pipeline.progress import Progress
from preprocess.stages.stored_columns import stored_columns

PLACE_BYTES = 4  # of a node, for the numbers that `find_senders` gives
_MOST = 0.9  # of all nodes: beyond it too little would be saved
_LOOKS = 32  # at how many there are, so that a graph where nearly all have edges is not read whole

Places = NDArray[np.int32]


def find_senders(
    store: Store, relation: Relation, source: NodeType, progress: Progress
) -> Places | None:
    """int32 (nodes + 1,): node v is number places[v] of the senders if places[v + 1] is greater.

    None: nearly all nodes are senders.  Reads the graph blocks in order.  Raises CorruptBlock.
    """
    if source.num_nodes > np.iinfo(np.int32).max:
        return None
    found = np.zeros(source.num_nodes, np.bool_)
    done, look = 0, relation.num_edges // _LOOKS
    with (
        progress.stage(f"sources of {relation.name}", relation.num_edges, "edges") as step,
        closing(read_ahead(stored_columns(store, relation, SCAN_BYTES))) as pieces,
    ):
        for _, _, edges in pieces:
            ids = edges.astype(np.int64) - source.first
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < found.size:
                raise CorruptBlock(
                    f"{store.path / relation.path}: found sources of another type than "
                    f"{source.name}; ingest again"
                )
            found[ids] = True
            done += ids.size
            step.advance(ids.size)
            if done >= look:
                look = done + relation.num_edges // _LOOKS
                if np.count_nonzero(found) > _MOST * found.size:
                    return None
    places = np.zeros(found.size + 1, np.int32)
    np.cumsum(found, out=places[1:])
    return places
