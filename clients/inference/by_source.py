"""Edges by source: a store's reverse edges, or its edges sorted by source once for all layers.

Edges are read in the order of the store, as many as fit in memory at a time; each such tile is
sorted in memory and written as columns of sources.  So the graph is read once, whatever the memory;
reading the columns of some sources means reading them in each tile.  Edges into a node are ordered
by source before and after, so neither the number of tiles nor their bounds change a sum.
"""

from collections.abc import Mapping
from contextlib import closing

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import (
    FORMAT_VERSION,
    Manifest,
    NodeType,
    edge_layout,
    packed_bytes,
)
from blockstore.format import Relation as StoredRelation
from blockstore.pack import GraphPacker
from blockstore.store import Store
from blockstore.writer import StoreWriter
from clients.inference.edges import whole_columns
from clients.inference.model import Relation, by_relation
from clients.inference.plan import BUFFER_BYTES, MAX_TILES
from clients.inference.results import InferenceRun
from clients.inference.rows import SCAN_BYTES
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import Cost, Facts, Stage
from preprocess.stages.csc import ColumnSorter, Widths

STAGE = "edges by source"
_TILES = "tiles"  # key in the stage's facts
_FULL = 0.9  # least share of a block that is filled


def edges_by_source(
    run: InferenceRun, relation: Relation, reverses: Mapping[Relation, Relation]
) -> tuple[Store, list[StoredRelation]]:
    """The store and relations whose columns of sources together hold the edges of a relation."""
    if relation in reverses:
        return run.store, [by_relation(run.store.manifest)[reverses[relation]]]
    found = msgspec.convert(run.facts(STAGE)[_TILES], list[StoredRelation])
    known = run.store.manifest
    manifest = Manifest(
        format=FORMAT_VERSION, block_bytes=_block_bytes(known), id_dtype=known.id_dtype,
        types=known.types, relations=tuple(found), files=run.hidden.digests,
    )  # fmt: skip
    src, name, dst = relation
    tiles = [r for r in found if (r.src, r.reverse_of, r.dst) == (dst, name, src)]
    return Store(run.hidden.folder, manifest), tiles


def tile_bytes(manifest: Manifest, relation: StoredRelation, tile_edges: int) -> int:
    """Most bytes that all tiles of a relation take."""
    tiles = tile_relations(relation, 0, tile_edges)
    nodes = next(t.num_nodes for t in manifest.types if t.name == relation.src)
    bits = edge_layout(manifest, tiles[0]).source_bits if tiles else 0
    edges = int((packed_bytes(relation.num_edges, bits) + 4 * nodes * len(tiles)) / _FULL)
    return edges + len(tiles) * _block_bytes(manifest)


def _block_bytes(manifest: Manifest) -> int:
    """Block size of tiles: one block of each of MAX_TILES is read at the same time."""
    return min(manifest.block_bytes, SCAN_BYTES // MAX_TILES)


def tile_relations(relation: StoredRelation, number: int, tile_edges: int) -> list[StoredRelation]:
    """The tiles of a relation's edges as planned, before any is written."""
    return [
        StoredRelation(
            relation.dst, f"{relation.name}-{tile}", relation.src,
            num_edges=min(tile_edges, relation.num_edges - first), num_blocks=0,
            path=f"{where}/blocks", first_node_path=f"{where}/first_node",
            first_edge_path=f"{where}/first_edge", reverse_of=relation.name,
        )
        for tile, first in enumerate(range(0, relation.num_edges, tile_edges))
        for where in [f"by_source/relation{number}/tile{tile}"]
    ]  # fmt: skip


def sorting_stage(store: Store, tile_edges: int) -> Stage[InferenceRun]:
    """The stage that sorts the edges of all relations by source."""
    manifest = store.manifest
    read = sum(r.num_blocks for r in manifest.relations) * manifest.block_bytes
    written = sum(tile_bytes(manifest, r, tile_edges) for r in manifest.relations)
    planned = [tile_relations(r, i, tile_edges) for i, r in enumerate(manifest.relations)]

    def run(run: InferenceRun) -> Facts:
        with StoreWriter(
            run.hidden.folder, block_bytes=_block_bytes(manifest), buffer_bytes=BUFFER_BYTES
        ) as out:
            made = [
                sort_by_source(store, relation, tiles, out, run.progress)
                for relation, tiles in zip(manifest.relations, planned, strict=True)
            ]
            run.hidden.restore(out.digests)
        return {_TILES: msgspec.to_builtins([tile for tiles in made for tile in tiles])}

    paths = [
        path
        for tiles in planned
        for t in tiles
        for path in (t.path, t.first_node_path, t.first_edge_path)
    ]
    return Stage(STAGE, Cost(read, written), run, arrays=paths)


def sort_by_source(
    store: Store,
    relation: StoredRelation,
    tiles: list[StoredRelation],
    out: StoreWriter,
    progress: Progress,
) -> list[StoredRelation]:
    """Write the edges of a relation as `tiles`; returns these with their blocks."""
    types = {t.name: t for t in store.manifest.types}
    src, dst = types[relation.src], types[relation.dst]
    widths = Widths.of(store.manifest.id_dtype, store.manifest.num_nodes, None, 0)
    bits, sorter = np.uint64(widths.node_bits), ColumnSorter(widths, drop_equal=False)
    keys = np.empty(max((t.num_edges for t in tiles), default=0), np.uint64)
    made: list[StoredRelation] = []
    held, target = 0, dst.first
    with (
        progress.stage(f"sort edges {relation.name}", relation.num_edges, "edges") as stage,
        closing(whole_columns(store, relation, src)) as pieces,
    ):
        for degrees, ids in pieces:
            ends = np.repeat(np.arange(degrees.size, dtype=np.uint64), degrees)
            ends += np.uint64(target)
            ends |= ids.view(np.uint64) << bits
            target, done = target + degrees.size, 0
            while done < ends.size:
                tile = tiles[len(made)]
                count = min(ends.size - done, tile.num_edges - held)
                keys[held : held + count] = ends[done : done + count]
                held, done = held + count, done + count
                if held == tile.num_edges:
                    made.append(_write_tile(store.manifest, tile, src, sorter, keys[:held], out))
                    held = 0
            stage.advance(ends.size)
    return made


def _write_tile(
    manifest: Manifest,
    tile: StoredRelation,
    src: NodeType,
    sorter: ColumnSorter,
    keys: NDArray[np.uint64],
    out: StoreWriter,
) -> StoredRelation:
    columns = sorter.from_bucket(keys, None, 0, src.num_nodes)
    blocks = out.graph(tile.path)
    layout = edge_layout(manifest, tile)
    packer = GraphPacker(out.block_bytes, layout, src.first, blocks.append)
    packer.append(columns.degrees, columns.sources)
    out.side(tile.first_node_path, packer.close())
    num_blocks = blocks.close()
    out.side(tile.first_edge_path, packer.first_edges())
    return msgspec.structs.replace(tile, num_blocks=num_blocks)
