"""Names, bytes and passes of the stages of hubs and halos, decided before anything runs.  Pure."""

from typing import NamedTuple

import msgspec

from blockstore.format import RowArray
from preprocess.contents import Contents, RelationContents, TypeContents, as_path
from preprocess.influence import InfluenceOptions
from preprocess.options import IngestOptions
from preprocess.stages.reach import REACH_NODE_BYTES
from preprocess.stages.slots import SLOT_BYTES
from preprocess.stages.stored_columns import PIECE_COPIES, scan_size
from preprocess.stages.walk import LANE_BYTES, STEPS, WALK_NODE_BYTES, plan_lanes
from preprocess.steps import Step, graph_bytes, row_disk_bytes, scatter_bytes

HUBS, HALOS, KEPT = "find hubs", "find halos", "neighbors kept"  # names of stages
_HUB_NODE_BYTES = 24  # scores before and after a step, or a sorted copy: 16; in-degree, marks, room
_USUAL_PARTS = 64  # where a partition is given
_LONGER = 5  # in-edges of those who matter, times the mean: assumed


class HaloPaths(NamedTuple):
    """Of the arrays of a type's slots."""

    nodes: str
    offsets: str
    label: str
    features: str

    def feature(self, name: str) -> str:
        """Of one array."""
        return f"{self.features}/{as_path(name)}"


def hubs_path(type_name: str) -> str:
    """Of the ids of hubs of a type."""
    return f"nodes/{as_path(type_name)}/hubs"


def halo_paths(type_name: str) -> HaloPaths:
    """Of a type."""
    folder = f"nodes/{as_path(type_name)}/halo"
    return HaloPaths(*(f"{folder}/{name}" for name in HaloPaths._fields))


def halo_relation_path(relation_path: str) -> str:
    """Of the columns of slots; the name of their stage too."""
    return f"{relation_path}/halo"


def copies_nodes(options: IngestOptions) -> bool:
    """Whether there are hubs or halos."""
    influence = options.influence
    return options.in_partitions and (influence.finds_hubs or influence.halo > 0)


def influence_node_bytes(options: IngestOptions) -> int:
    """Of tables of these stages, for each node."""
    if not copies_nodes(options):
        return 0
    influence = options.influence
    slots = influence.halo + (influence.hub_share if influence.finds_hubs else 0)
    tables = max(SLOT_BYTES, 8 + REACH_NODE_BYTES) * slots + REACH_NODE_BYTES
    walk = _HUB_NODE_BYTES if influence.finds_hubs else WALK_NODE_BYTES + LANE_BYTES
    return max(walk, round(tables + 0.5))


def walk_room(num_nodes: int, node_bytes: int, share: int, block_bytes: int) -> int:
    """Bytes for the lanes of walks; `node_bytes`: of all tables of the ingest."""
    reading = PIECE_COPIES * scan_size(share, block_bytes)
    return (node_bytes - WALK_NODE_BYTES) * num_nodes + max(0, share - reading)


def halo_batches(contents: Contents, options: IngestOptions, share: int, node_bytes: int) -> int:
    """How often the graph is walked through: as many partitions at a time as lanes fit."""
    parts = options.partition.num_partitions if options.partition else _USUAL_PARTS
    room = walk_room(contents.num_nodes, node_bytes, share, options.block_bytes)
    return -(-parts // plan_lanes(contents.num_nodes, parts, room).num_walks)


def influence_bytes(contents: Contents, options: IngestOptions) -> int:
    """Of copies in the store: of edges an estimate, as those who matter have more of them."""
    if not copies_nodes(options):
        return 0
    rows = [a for t in contents.types for a in _copied_arrays(t, options, contents)]
    edges = sum(_copied_graph_bytes(r, contents, options) for r in contents.relations)
    return edges + sum(row_disk_bytes(a, options.block_bytes) for a in rows)


def influence_steps(
    contents: Contents, options: IngestOptions, share: int, node_bytes: int
) -> list[Step]:
    """The stages in order, and what they move."""
    if not copies_nodes(options):
        return []
    influence, block = options.influence, options.block_bytes
    graph = sum(graph_bytes(r, options) for r in contents.relations)
    ids = sum(row_disk_bytes(t.store_id, block) for t in contents.types)
    steps, held = [], 0
    if influence.finds_hubs:
        held = 8 * round(_hub_share(contents, options) * contents.num_nodes)
        steps.append(Step(HUBS, (1 + STEPS) * graph + ids, held, made=held))
    if influence.halo:
        found = 8 * round(influence.halo * contents.num_nodes)
        batches = halo_batches(contents, options, share, node_bytes)
        read = graph + batches * (STEPS - 1) * graph + graph  # first steps read their own parts
        steps.append(Step(HALOS, read + ids, found, made=found))
        held += found
    for t in contents.types:
        steps += _type_steps(contents, t, options, share)
    for r in contents.relations:
        written = _copied_graph_bytes(r, contents, options)
        edges = written // r.item_bytes
        passing = scatter_bytes(edges, r.item_bytes, 0, share)
        read = 2 * graph_bytes(r, options) + passing
        steps.append(Step(halo_relation_path(r.path), read, written + passing, passing=passing))
    return [*steps, Step(KEPT, graph + ids, 0, spent=held)]


def _type_steps(
    contents: Contents, t: TypeContents, options: IngestOptions, share: int
) -> list[Step]:
    steps = []
    if options.influence.finds_hubs:
        num_hubs = round(_hub_share(contents, options) * t.num_nodes)
        hubs = RowArray(hubs_path(t.name), contents.id_dtype, num_hubs)
        steps.append(Step(hubs.path, 0, row_disk_bytes(hubs, options.block_bytes)))
    nodes, *copies = _copied_arrays(t, options, contents)
    steps.append(Step(nodes.path, 0, row_disk_bytes(nodes, options.block_bytes)))
    for copy in copies:
        passing = scatter_bytes(copy.num_rows, copy.row_bytes, 4, share)
        read = t.num_nodes * copy.row_bytes + passing
        written = row_disk_bytes(copy, options.block_bytes) + passing
        steps.append(Step(copy.path, read, written, passing=passing))
    return steps


def _hub_share(contents: Contents, options: IngestOptions) -> float:
    """Of all nodes: where they are told in bytes, those that mean rows and columns would give."""
    influence: InfluenceOptions = options.influence
    if not influence.hub_bytes:
        return influence.hub_share if influence.finds_hubs else 0.0
    rows = sum(a.num_rows * a.row_bytes for t in contents.types for a in _arrays(t))
    edges = sum(r.most_edges * r.item_bytes for r in contents.relations)
    return min(1.0, influence.hub_bytes / max(1, rows + edges))


def _arrays(t: TypeContents) -> list[RowArray]:
    return [*([t.label.array] if t.label else []), *(r.array for r in t.features)]


def _slot_share(contents: Contents, options: IngestOptions) -> float:
    return options.influence.halo + _hub_share(contents, options)


def _copied_arrays(t: TypeContents, options: IngestOptions, contents: Contents) -> list[RowArray]:
    """Ids, label and features of slots, about as many slots as there will be."""
    paths, num_slots = halo_paths(t.name), round(_slot_share(contents, options) * t.num_nodes)
    found = [RowArray(paths.nodes, contents.id_dtype, num_slots)]
    if t.label is not None:
        label = t.label.array
        found.append(msgspec.structs.replace(label, path=paths.label, num_rows=num_slots))
    for rows in t.features:
        path = paths.feature(rows.source.name)
        found.append(msgspec.structs.replace(rows.array, path=path, num_rows=num_slots))
    return found


def _copied_graph_bytes(
    relation: RelationContents, contents: Contents, options: IngestOptions
) -> int:
    share = _slot_share(contents, options)
    return int(_LONGER * share * graph_bytes(relation, options)) + options.block_bytes
