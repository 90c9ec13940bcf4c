"""Stores with hop-wise features, written directly: their numbers say where they belong."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockstore.format import (
    FORMAT_VERSION,
    EdgeLayout,
    HopSet,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    gapless_rows,
    id_bits,
)
from blockstore.io.files import appearing
from blockstore.pack import GraphPacker
from blockstore.store import numpy_dtype
from blockstore.writer import StoreWriter

NODE = "nodes/node"


class Hops(NamedTuple):
    """What a store holds of a split, as arrays in the stored order."""

    x: dict[tuple[str, int], np.ndarray]  # (operator, hop); hop 0 under every operator
    y: np.ndarray | None
    n_id: np.ndarray
    dtype: str = "float32"


def make_hops(
    rows: int, width: int, operators: dict[str, int], seed: int, dtype: str = "float32",
    labels: bool = True,
) -> Hops:  # fmt: skip
    """Random rows; operators: name -> last hop."""
    rng = np.random.default_rng(seed)

    def draw() -> np.ndarray:
        if dtype == "bfloat16":
            return rng.integers(0, 1 << 14, (rows, width)).astype(np.uint16)
        return (rng.standard_normal((rows, width)) * 50).astype(dtype)

    base = draw()
    x = {(o, h): base if h == 0 else draw() for o, r in operators.items() for h in range(r + 1)}
    y = rng.integers(0, 40, rows) if labels else None
    return Hops(x, y, rng.permutation(10 * rows)[:rows].astype(np.int64), dtype)


def write_hop_store(path: Path, splits: dict[str, Hops], block_bytes: int = 4096) -> Manifest:
    """A store of as many nodes as the splits name, with one edge, and these splits."""
    count = 1 + max([1, *(int(h.n_id.max(initial=0)) for h in splits.values())])
    with appearing(path) as folder, StoreWriter(folder, block_bytes=block_bytes) as writer:
        everything = np.arange(count, dtype=np.uint32)
        ids, inverse = (
            RowArray(f"{NODE}/original_id", "uint32", count),
            RowArray(f"{NODE}/store_id", "uint32", count),
        )
        _write(writer, ids, everything)
        _write(writer, inverse, everything)
        hops = {name: _write_split(writer, name, h, block_bytes) for name, h in splits.items()}
        relation = write_edge(writer, block_bytes, count)
        node_type = NodeType(
            name="node", first=0, num_nodes=count, original_id=ids, store_id=inverse, hops=hops
        )
        return writer.settle(
            Manifest(
                format=FORMAT_VERSION, block_bytes=block_bytes, id_dtype="uint32",
                types=(node_type,), relations=(relation,),
            )
        )  # fmt: skip


def _write_split(writer: StoreWriter, split: str, hops: Hops, block_bytes: int) -> HopSet:
    folder, rows = f"{NODE}/hops/{split}", hops.n_id.size

    def add(name: str, values: Any, kind: str) -> RowArray:
        width = values[:1].nbytes
        array = RowArray(
            f"{folder}/{name}", kind, rows, values.shape[1:],
            rows_per_block=gapless_rows(width, block_bytes, rows),
        )  # fmt: skip
        _write(writer, array, values)
        return array

    first = add("hop0", next(iter(hops.x.values())), hops.dtype)
    operators: dict[str, tuple[RowArray, ...]] = {}
    for (operator, hop), values in hops.x.items():
        array = add(f"{operator}/{hop}", values, hops.dtype) if hop else first
        operators[operator] = (*operators.get(operator, ()), array)
    return HopSet(
        split=split,
        nodes=add("nodes", hops.n_id, "int64"),
        label=None if hops.y is None else add("label", hops.y, "int64"),
        operators=operators,
    )


def _write(writer: StoreWriter, array: RowArray, values: Any) -> None:
    assert values.dtype == numpy_dtype(array.dtype)
    with writer.rows(array) as out:
        out.append(values)


def write_edge(writer: StoreWriter, block_bytes: int, num_nodes: int) -> Relation:
    """A relation of one edge: there is no store without."""
    folder = "edges/node___to___node"
    blocks = writer.graph(f"{folder}/blocks")
    layout = EdgeLayout("uint32", id_bits(num_nodes), 0, 0, 0, 0)
    packer = GraphPacker(block_bytes, layout, 0, blocks.append)
    packer.append((np.arange(num_nodes) < 1).astype(np.int64), np.array([1], np.uint32), None, None)
    writer.side(f"{folder}/first_node", packer.close())
    writer.side(f"{folder}/first_edge", packer.first_edges())
    return Relation(
        src="node", name="to", dst="node", num_edges=1, num_blocks=blocks.close(),
        path=f"{folder}/blocks", first_node_path=f"{folder}/first_node",
        first_edge_path=f"{folder}/first_edge",
    )  # fmt: skip
