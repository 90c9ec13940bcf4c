"""Stores written directly from a graph in memory: store ids are those of the source."""

from pathlib import Path
from typing import Any

import numpy as np

from blockstore.format import FORMAT_VERSION, Manifest, NodeType, Relation, RowArray
from blockstore.pack import GraphPacker
from blockstore.writer import StoreWriter
from tests.graphs import Csc


def write_store(
    path: Path,
    graph: Csc,
    train: Any,
    block_bytes: int = 4096,
    weights: Any = None,
    edge_ids: bool = True,
) -> Manifest:
    """A store of one type "node" with rows of 8 bytes as features, and a split "train".

    weights   float32 (num_edges,)
    """
    count, node = graph.num_nodes, "nodes/node"
    ids = RowArray(f"{node}/original_id", "uint32", count)
    inverse = RowArray(f"{node}/store_id", "uint32", count)
    x = RowArray(f"{node}/features/x", "float32", count, (2,))
    split = RowArray(f"{node}/splits/train", "int64", len(train))
    folder = "edges/node___to___node"
    with StoreWriter(path, block_bytes=block_bytes) as writer:
        blocks = writer.graph(f"{folder}/blocks")
        packer = GraphPacker(
            block_bytes, "uint32", "uint32" if edge_ids else None, 0, blocks.append,
            weights=weights is not None,
        )  # fmt: skip
        packer.append(
            np.diff(graph.indptr), graph.indices,
            np.arange(graph.indices.size, dtype=np.uint32) if edge_ids else None, weights,
        )  # fmt: skip
        first_node = packer.close()
        num_blocks = blocks.close()
        writer.side(f"{folder}/first_node", first_node)
        everything = np.arange(count, dtype=np.uint32)
        rows = np.stack([everything, everything * 2], axis=1).astype(np.float32)
        seeds = np.asarray(train, np.int64)
        arrays = ((ids, everything), (inverse, everything), (x, rows), (split, seeds))
        for array, values in arrays:
            with writer.rows(array) as out:
                out.append(values)
        relation = Relation(
            src="node", name="to", dst="node", num_edges=graph.indices.size, num_blocks=num_blocks,
            path=f"{folder}/blocks", first_node_path=f"{folder}/first_node",
            edge_id_dtype="uint32" if edge_ids else None, num_source_edges=graph.indices.size,
            has_weights=weights is not None,
        )  # fmt: skip
        node_type = NodeType(
            name="node", first=0, num_nodes=count, original_id=ids, store_id=inverse,
            features={"x": x}, splits={"train": split},
        )  # fmt: skip
        return writer.commit(
            Manifest(
                format=FORMAT_VERSION, block_bytes=block_bytes, id_dtype="uint32",
                types=(node_type,), relations=(relation,),
            )
        )  # fmt: skip
