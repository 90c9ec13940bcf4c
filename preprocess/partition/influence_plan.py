"""Names, bytes and passes of the stages of hubs and halos, planned before they run.  Pure."""

from typing import NamedTuple

import msgspec

from blockstore.format import RowArray
from preprocess.files.store import PIECE_COPIES, scan_size
from preprocess.ingest.contents import (
    Contents,
    RelationContents,
    TypeContents,
    as_path,
    graph_bytes,
    row_disk_bytes,
)
from preprocess.ingest.options import IngestOptions
from preprocess.partition.partition import InfluenceOptions
from preprocess.stages.slots import SLOT_BYTES
from preprocess.stages.walk import LANE_BYTES, REACH_NODE_BYTES, WALK_NODE_BYTES, plan_lanes

HUBS, HALOS, KEPT = "find hubs", "find halos", "neighbors kept"  # names of stages
_HUB_NODE_BYTES = 24  # scores before and after a step, or a sorted copy: 16; in-degree, marks, room
_LONGER = 5  # assumed in-degree of influential nodes, relative to the mean


class HaloPaths(NamedTuple):
    """Paths of the arrays of a type's slots."""

    nodes: str
    offsets: str
    label: str
    features: str

    def feature(self, name: str) -> str:
        return f"{self.features}/{as_path(name)}"


def hubs_path(type_name: str) -> str:
    """Path of the ids of a type's hubs."""
    return f"nodes/{as_path(type_name)}/hubs"


def halo_paths(type_name: str) -> HaloPaths:
    folder = f"nodes/{as_path(type_name)}/halo"
    return HaloPaths(*(f"{folder}/{name}" for name in HaloPaths._fields))


def halo_relation_path(relation_path: str) -> str:
    """Path of a relation's slot columns; also the name of their stage."""
    return f"{relation_path}/halo"


def copies_nodes(options: IngestOptions) -> bool:
    """Whether there are hubs or halos."""
    influence = options.influence
    return bool(options.partition) and (influence.finds_hubs or influence.halo > 0)


def influence_node_bytes(options: IngestOptions) -> int:
    """Bytes of tables of these stages for each node."""
    if not copies_nodes(options):
        return 0
    influence = options.influence
    slots = influence.halo + (influence.hub_share if influence.finds_hubs else 0)
    tables = max(SLOT_BYTES, 8 + REACH_NODE_BYTES) * slots + REACH_NODE_BYTES
    walk = _HUB_NODE_BYTES if influence.finds_hubs else WALK_NODE_BYTES + LANE_BYTES
    return max(walk, round(tables + 0.5))


def walk_room(num_nodes: int, node_bytes: int, share: int, block_bytes: int) -> int:
    """Bytes for the lanes of walks; `node_bytes`: bytes a node of all tables of the ingest."""
    reading = PIECE_COPIES * scan_size(share, block_bytes)
    return (node_bytes - WALK_NODE_BYTES) * num_nodes + max(0, share - reading)


def halo_batches(contents: Contents, options: IngestOptions, share: int, node_bytes: int) -> int:
    """Number of walks over the graph, each for as many partitions as lanes fit in memory."""
    parts = options.partition.num_partitions if options.partition else 1
    room = walk_room(contents.num_nodes, node_bytes, share, options.block_bytes)
    return -(-parts // plan_lanes(contents.num_nodes, parts, room).num_walks)


def influence_bytes(contents: Contents, options: IngestOptions) -> int:
    """Bytes of copies in the store; edges are estimated, as influential nodes have more."""
    if not copies_nodes(options):
        return 0
    rows = [a for t in contents.types for a in copied_arrays(t, options, contents)]
    edges = sum(copied_graph_bytes(r, contents, options) for r in contents.relations)
    return edges + sum(row_disk_bytes(a, options.block_bytes) for a in rows)


def hub_share(contents: Contents, options: IngestOptions) -> float:
    """Share of all nodes that are hubs; if limited in bytes, estimated from mean row sizes."""
    influence: InfluenceOptions = options.influence
    if not influence.hub_bytes:
        return influence.hub_share if influence.finds_hubs else 0.0
    rows = sum(a.num_rows * a.row_bytes for t in contents.types for a in _arrays(t))
    edges = sum(r.max_edges * r.item_bytes for r in contents.relations)
    return min(1.0, influence.hub_bytes / max(1, rows + edges))


def _arrays(t: TypeContents) -> list[RowArray]:
    return [*([t.label.array] if t.label else []), *(r.array for r in t.features)]


def _slot_share(contents: Contents, options: IngestOptions) -> float:
    return options.influence.halo + hub_share(contents, options)


def copied_arrays(t: TypeContents, options: IngestOptions, contents: Contents) -> list[RowArray]:
    """Arrays of ids, label and features of slots, for the estimated number of slots."""
    paths, num_slots = halo_paths(t.name), round(_slot_share(contents, options) * t.num_nodes)
    found = [RowArray(paths.nodes, contents.id_dtype, num_slots)]
    if t.label is not None:
        label = t.label.array
        found.append(msgspec.structs.replace(label, path=paths.label, num_rows=num_slots))
    for rows in t.features:
        path = paths.feature(rows.source.name)
        found.append(msgspec.structs.replace(rows.array, path=path, num_rows=num_slots))
    return found


def copied_graph_bytes(
    relation: RelationContents, contents: Contents, options: IngestOptions
) -> int:
    share = _slot_share(contents, options)
    return int(_LONGER * share * graph_bytes(relation, options)) + options.block_bytes
