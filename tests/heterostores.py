"""Stores of several node types written directly from graphs in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from blockstore.format import (
    FORMAT_VERSION,
    EdgeLayout,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    id_bits,
)
from blockstore.io.files import appearing
from blockstore.pack import GraphPacker
from blockstore.writer import StoreWriter

EdgeType = tuple[str, str, str]


class HeteroGraph(NamedTuple):
    """Types by name, each with its number of nodes; in-edges by relation."""

    num_nodes: dict[str, int]
    relations: dict[EdgeType, tuple[Any, Any]]  # indptr of dst's columns, indices within src
    widths: dict[str, int]  # float32 a node of `x`, of the types that have it
    labels: dict[str, Any]
    train: dict[str, Any]  # of the types that have a split
    x_of: Mapping[str, Any] = MappingProxyType({})  # features that are not made up
    times: Mapping[EdgeType, Any] = MappingProxyType({})  # int64 (edges,), of some relations
    edge_rows: Mapping[EdgeType, Mapping[str, Any]] = MappingProxyType({})  # arrays (edges, ...)
    weights: Mapping[EdgeType, Any] = MappingProxyType({})  # float32 (edges,), of some relations

    @property
    def first(self) -> dict[str, int]:
        """Store id of node 0 of each type."""
        starts = np.cumsum([0, *self.num_nodes.values()])
        return dict(zip(self.num_nodes, starts.tolist(), strict=False))

    def x(self, name: str) -> Any:
        """Features: row i begins with i."""
        if name in self.x_of:
            return self.x_of[name]
        return (np.arange(self.num_nodes[name])[:, None] + np.arange(self.widths[name])).astype(
            "f4"
        )


def random_hetero(
    rng: np.random.Generator,
    num_nodes: Mapping[str, int],
    relations: Sequence[EdgeType],
    max_degree: int,
    widths: Mapping[str, int],
    seed_type: str,
    long_degree: int = 0,
) -> HeteroGraph:
    """Random columns, empty ones included; `long_degree`: degree of one column of each relation."""
    found = {}
    for src, name, dst in relations:
        degrees = rng.integers(0, max_degree + 1, num_nodes[dst])
        degrees[rng.random(degrees.size) < 0.2] = 0
        if long_degree and degrees.size:
            degrees[rng.integers(degrees.size)] = long_degree
        if not num_nodes[src]:
            degrees[:] = 0
        indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
        indices = rng.integers(0, max(1, num_nodes[src]), int(indptr[-1]))
        found[src, name, dst] = (indptr, indices)
    count = num_nodes[seed_type]
    train = rng.permutation(count)[: max(1, count // 2)]
    labels = {seed_type: rng.integers(0, 5, count)}
    return HeteroGraph(dict(num_nodes), found, dict(widths), labels, {seed_type: train})


def with_reverses(graph: HeteroGraph) -> HeteroGraph:
    """As `--undirected` has it: duplicates go, between two types there is a relation more."""
    found: dict[EdgeType, tuple[Any, Any]] = {}

    def add(relation: EdgeType, pairs: Any) -> None:  # (edges, 2): targets, sources
        pairs = np.unique(pairs, axis=0)
        counts = np.bincount(pairs[:, 0], minlength=graph.num_nodes[relation[2]])
        found[relation] = np.concatenate([[0], np.cumsum(counts)]), pairs[:, 1]

    for (src, name, dst), (indptr, indices) in graph.relations.items():
        pairs = np.stack([np.repeat(np.arange(indptr.size - 1), np.diff(indptr)), indices], 1)
        if src == dst:
            add((src, name, dst), np.vstack([pairs, pairs[:, ::-1]]))
        else:
            add((src, name, dst), pairs)
            add((dst, f"rev_{name}", src), pairs[:, ::-1])
    return graph._replace(relations=found)


def write_hetero_store(
    path: Path,
    graph: HeteroGraph,
    offsets: Mapping[str, Sequence[int]] | None = None,
    splits: Mapping[str, Mapping[str, Any]] | None = None,
    undirected: bool = False,
) -> Manifest:
    """Blocks of 4 KiB, with edge ids.

    offsets     of the partitions of each type, within it
    splits      more than "train", by type
    undirected  the graph has all reverses, as `with_reverses` adds them
    """
    splits = splits or {}
    with appearing(path) as folder, StoreWriter(folder, block_bytes=4096) as writer:
        types = [
            _write_type(writer, graph, name, offsets, splits.get(name, {}))
            for name in graph.num_nodes
        ]
        relations = [_write_relation(writer, graph, relation) for relation in graph.relations]
        return writer.settle(
            Manifest(
                format=FORMAT_VERSION, block_bytes=4096, id_dtype="uint32", types=tuple(types),
                relations=tuple(relations), undirected=undirected,
            )
        )  # fmt: skip


def _write_type(
    writer: StoreWriter,
    graph: HeteroGraph,
    name: str,
    offsets: Mapping[str, Sequence[int]] | None,
    more: Mapping[str, Any],
) -> NodeType:
    folder, first, count = f"nodes/{name}", graph.first[name], graph.num_nodes[name]
    ids = np.arange(count)

    def rows(path: str, values: Any) -> RowArray:
        array = RowArray(
            f"{folder}/{path}", str(values.dtype), values.shape[0], tuple(values.shape[1:])
        )
        with writer.rows(array) as out:
            out.append(values)
        return array

    splits = ({"train": graph.train[name]} if name in graph.train else {}) | dict(more)
    if offsets is not None:
        own = np.array(offsets[name], np.uint64) + np.uint64(first)
        writer.side(f"{folder}/partition_offsets", own)
    return NodeType(
        name=name, first=first, num_nodes=count,
        original_id=rows("original_id", ids.astype(np.uint32)),
        store_id=rows("store_id", (ids + first).astype(np.uint32)),
        features={"x": rows("features/x", graph.x(name))} if name in graph.widths else {},
        label=rows("label", graph.labels[name]) if name in graph.labels else None,
        splits={s: rows(f"splits/{s}", ids) for s, ids in splits.items()},
        num_partitions=0 if offsets is None else len(offsets[name]) - 1,
        partition_offsets_path="" if offsets is None else f"{folder}/partition_offsets",
    )  # fmt: skip


def _write_relation(writer: StoreWriter, graph: HeteroGraph, relation: EdgeType) -> Relation:
    src, name, dst = relation
    indptr, indices = graph.relations[relation]
    folder = f"edges/{src}___{name}___{dst}"
    blocks = writer.graph(f"{folder}/blocks")
    times, weights = graph.times.get(relation), graph.weights.get(relation)
    bits = id_bits(graph.num_nodes[src])
    beside = 4 * (weights is not None), 8 * (times is not None)
    layout = EdgeLayout("uint32", bits, graph.first[src], 4, *beside)
    packer = GraphPacker(4096, layout, graph.first[dst], blocks.append)
    packer.append(
        np.diff(indptr), (indices + graph.first[src]).astype(np.uint32),
        np.arange(indices.size, dtype=np.uint32), weights, times,
    )  # fmt: skip
    features = {}
    for array, values in graph.edge_rows.get(relation, {}).items():
        path = f"{folder}/features/{array}"
        kind = str(values.dtype)
        features[array] = RowArray(path, kind, values.shape[0], tuple(values.shape[1:]))
        with writer.rows(features[array]) as out:
            out.append(values)
    writer.side(f"{folder}/first_node", packer.close())
    writer.side(f"{folder}/first_edge", packer.first_edges())
    return Relation(
        src=src, name=name, dst=dst, num_edges=indices.size, num_blocks=blocks.close(),
        path=f"{folder}/blocks", first_node_path=f"{folder}/first_node", edge_id_dtype="uint32",
        num_source_edges=indices.size, first_edge_path=f"{folder}/first_edge",
        has_weights=weights is not None, has_times=times is not None, features=features,
    )  # fmt: skip
