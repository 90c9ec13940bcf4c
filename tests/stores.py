"""Stores written directly from a graph in memory: store ids are those of the source."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from blockstore.format import (
    FORMAT_VERSION,
    EdgeLayout,
    Halo,
    HaloColumns,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    id_bits,
)
from blockstore.io.files import appearing
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
    offsets: Sequence[int] = (),
    hubs: Sequence[int] = (),
    halos: Sequence[Sequence[int]] = (),
    times: Any = None,
    edge_rows: Mapping[str, Any] = MappingProxyType({}),
    width: int = 2,
) -> Manifest:
    """A store of one type "node" with `width` numbers a node as features, and a split "train".

    weights   float32 (num_edges,)
    times     int64 (num_edges,)
    edge_rows arrays (num_edges, ...) by name
    offsets   first node of each partition, then the number of nodes; empty: no partitions
    halos     of each partition, ascending; empty: none
    """
    count, node = graph.num_nodes, "nodes/node"
    ids = RowArray(f"{node}/original_id", "uint32", count)
    inverse = RowArray(f"{node}/store_id", "uint32", count)
    x = RowArray(f"{node}/features/x", "float32", count, (width,))
    split = RowArray(f"{node}/splits/train", "int64", len(train))
    folder = "edges/node___to___node"
    with appearing(path) as root, StoreWriter(root, block_bytes=block_bytes) as writer:
        nodes = np.arange(count)
        num_blocks = _pack(writer, folder, graph, nodes, block_bytes, weights, edge_ids, times)
        everything = np.arange(count, dtype=np.uint32)
        rows = np.outer(everything, np.arange(1, width + 1)).astype(np.float32)
        seeds = np.asarray(train, np.int64)
        arrays = ((ids, everything), (inverse, everything), (x, rows), (split, seeds))
        for array, values in arrays:
            with writer.rows(array) as out:
                out.append(values)
        halo, columns, ranked = None, None, None
        if hubs or halos:
            groups = [np.array(g, np.int64) for g in (*halos, *([[]] * (len(offsets) - 1)))]
            groups = [*groups[: len(offsets) - 1], np.sort(np.array(hubs, np.int64))]
            slots = np.concatenate(groups)
            halo_blocks = _pack(
                writer, f"{folder}/halo", graph, slots, block_bytes, weights, edge_ids, times
            )
            halo = Halo(
                nodes=RowArray(f"{node}/halo/nodes", "uint32", slots.size),
                offsets_path=f"{node}/halo/offsets",
                features={
                    "x": RowArray(f"{node}/halo/features/x", "float32", slots.size, (width,))
                },
            )
            ranked = RowArray(f"{node}/hubs", "uint32", len(hubs)) if hubs else None
            writer.side(halo.offsets_path, np.cumsum([0, *map(len, groups)]).astype(np.uint64))
            kept = [(halo.nodes, slots.astype(np.uint32)), (halo.features["x"], rows[slots])]
            kept += [(ranked, np.array(hubs, np.uint32))] if ranked else []
            for array, values in kept:
                with writer.rows(array) as out:
                    out.append(values)
            columns = HaloColumns(
                num_edges=int(np.diff(graph.indptr)[slots].sum()), num_blocks=halo_blocks,
                path=f"{folder}/halo/blocks", first_node_path=f"{folder}/halo/first_node",
                first_edge_path=f"{folder}/halo/first_edge",
            )  # fmt: skip
        if offsets:
            writer.side(f"{node}/partition_offsets", np.array(offsets, np.uint64))
        features = {}
        for name, values in edge_rows.items():
            where, kind = f"{folder}/features/{name}", str(values.dtype)
            features[name] = RowArray(where, kind, len(values), tuple(values.shape[1:]))
            with writer.rows(features[name]) as out:
                out.append(values)
        relation = Relation(
            src="node", name="to", dst="node", num_edges=graph.indices.size, num_blocks=num_blocks,
            path=f"{folder}/blocks", first_node_path=f"{folder}/first_node",
            edge_id_dtype="uint32" if edge_ids else None, num_source_edges=graph.indices.size,
            has_weights=weights is not None, has_times=times is not None,
            first_edge_path=f"{folder}/first_edge", halo=columns, features=features,
        )  # fmt: skip
        node_type = NodeType(
            name="node", first=0, num_nodes=count, original_id=ids, store_id=inverse,
            features={"x": x}, splits={"train": split},
            num_partitions=max(0, len(offsets) - 1), hubs=ranked, halo=halo,
            partition_offsets_path=f"{node}/partition_offsets" if offsets else "",
        )  # fmt: skip
        return writer.settle(
            Manifest(
                format=FORMAT_VERSION, block_bytes=block_bytes, id_dtype="uint32",
                types=(node_type,), relations=(relation,),
            )
        )  # fmt: skip


def _pack(
    writer: StoreWriter,
    folder: str,
    graph: Csc,
    nodes: Any,
    block_bytes: int,
    weights: Any,
    edge_ids: bool,
    times: Any = None,
) -> int:
    """Columns of some nodes as blocks, numbered 0, 1, ...; returns how many blocks."""
    blocks = writer.graph(f"{folder}/blocks")
    layout = EdgeLayout(
        "uint32", id_bits(graph.num_nodes), 0, 4 * edge_ids, 4 * (weights is not None),
        8 * (times is not None),
    )  # fmt: skip
    packer = GraphPacker(block_bytes, layout, 0, blocks.append)
    spans = [np.arange(graph.indptr[v], graph.indptr[v + 1]) for v in nodes]
    edges = np.concatenate([*spans, np.empty(0, np.int64)]).astype(np.int64)
    packer.append(
        np.diff(graph.indptr)[nodes], graph.indices[edges],
        edges.astype(np.uint32) if edge_ids else None, None if weights is None else weights[edges],
        None if times is None else times[edges],
    )  # fmt: skip
    writer.side(f"{folder}/first_node", packer.close())
    writer.side(f"{folder}/first_edge", packer.first_edges())
    return blocks.close()
