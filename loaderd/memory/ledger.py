"""How `--mem` is divided: permanent tables, arena slots, and the slots that a session takes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blockstore.errors import BudgetTooSmall
from blockstore.format import ITEM_BYTES, Manifest, NodeType, RowArray, graph_geometry, row_geometry
from blockstore.kernels.records import EdgeRecord
from blockstore.store import Store
from blockstore.units import format_bytes, format_mem
from loaderd.api.protocol import LedgerEntry, Resolved
from loaderd.memory.residency import min_slots
from loaderd.memory.workspace import ALIGN, RowName, Sizes, TableKind, workspace_bytes
from loaderd.plans.base import Shape
from loaderd.plans.home import RANK_BYTES

MAX_TRANSIT = 16  # slots a worker may use to pass blocks through
_MAX_REQUESTS, _REQUESTS_PART = 1 << 20, 16  # bytes; or a 16th of --mem, if that is less
MIN_SESSION = 12  # slots: with fewer, no session is possible at all


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Physical settings: none of them changes a bit of a batch."""

    mem_bytes: int
    workers: int = 4
    readers: int = 8
    session_share: float = 0.95  # largest part of free slots that a hyperbatch session takes
    trace: Path | None = None  # where to record what hyperbatches needed
    reserve_bytes: int = 0  # for tables of stores that are opened later
    peer_bytes: int = 0  # for rows requested from peers, and served to them
    object_bytes: int = 0  # for ranges of objects in flight, and the state of pages


class EdgeItems(NamedTuple):
    """The edges of a relation as items: numbered after all nodes, relation by relation."""

    name: str  # "src__name__dst"
    first: int  # item of the first edge, in the order of the blocks
    num_nodes: int  # number of edges, under the name that a node type has for it


class ServedRows(NamedTuple):
    """A row array that comes with every batch; one of edges only if the session asks for it."""

    name: str  # "x", "y", ...
    node_type: NodeType | EdgeItems
    array: RowArray
    number: int  # index among all row arrays of the store


def session_entry_name(sessions: Sequence[int]) -> str:
    """Name of the ledger entry for slots that sessions took together."""
    first, others = sessions[:1], sessions[1:]
    more = f" with {', '.join(map(str, others))}" if others else ""
    return f"session {first[0] if first else '-'}{more}, out of the pools"


def is_session_entry(entry: LedgerEntry) -> bool:
    """Whether an entry tells what sessions took from the pools, whose entries count it already."""
    return entry.name.startswith("session ")


def served_rows(manifest: Manifest) -> list[ServedRows]:
    """Row arrays of a batch: features, then labels, of every type that has them."""
    found = list[ServedRows]()
    several = len(manifest.types) > 1
    for t in manifest.types:
        prefix = f"{t.name}." if several else ""
        for name, array in arrays_of(t).items():
            found.append(ServedRows(prefix + name, t, array, len(found)))
    return found


def arrays_of(t: NodeType) -> dict[str, RowArray]:
    """Row arrays of a type by the names that batches give them: features, then "y" for labels."""
    arrays = {"x" if len(t.features) == 1 else name: array for name, array in t.features.items()}
    return arrays if t.label is None else {**arrays, "y": t.label}


def served_edges(manifest: Manifest) -> list[ServedRows]:
    """Row arrays of edges, relation by relation, numbered after those of nodes."""
    found, number = list[ServedRows](), len(served_rows(manifest))
    for r, first in zip(manifest.relations, first_items(manifest), strict=True):
        items = EdgeItems("__".join((r.src, r.name, r.dst)), first, r.num_edges)
        for name, array in r.features.items():
            found.append(ServedRows(f"{items.name}.{name}", items, array, number + len(found)))
    return found


def rows_of(manifest: Manifest, edges: bool) -> list[ServedRows]:
    """All row arrays, with those of edges or without."""
    return served_rows(manifest) + (served_edges(manifest) if edges else [])


def chosen_rows(manifest: Manifest, resolved: Resolved) -> list[ServedRows]:
    """Row arrays that come with a session's batches: features and labels, then those of edges."""
    served, choice = rows_of(manifest, resolved.edge_features), resolved.rows
    if choice is None:
        return served
    several, found = len(manifest.types) > 1, list[ServedRows]()
    names = {own.owner: own.names for own in choice.arrays}
    for rows in served:
        owner, bare = rows.node_type.name, rows.name
        if several or isinstance(rows.node_type, EdgeItems):
            bare = bare.removeprefix(f"{owner}.")
        if isinstance(rows.node_type, NodeType) and bare == "y":
            wanted = choice.labels and not choice.label
        else:
            wanted = bare in names.get(owner, (bare,))
            if choice.label and bare == choice.label:
                as_labels = rows.name.removesuffix(bare) + "y"
                found.append(rows._replace(name=as_labels))
                wanted = False
        if wanted:
            found.append(rows)
    return found


def has_edge_rows(manifest: Manifest) -> bool:
    return any(r.features for r in manifest.relations)


def first_items(manifest: Manifest) -> list[int]:
    """Item of the first edge of each relation: items are the nodes, by store id, then the edges."""
    counts = [manifest.num_nodes, *(r.num_edges for r in manifest.relations)]
    return list(itertools.accumulate(counts))[:-1]


def num_items(manifest: Manifest, edges: bool) -> int:
    return manifest.num_nodes + sum(r.num_edges for r in manifest.relations) * edges


def finest_rows(manifest: Manifest) -> int:
    """Fewest rows per block among all row arrays, of nodes and of edges."""
    served = rows_of(manifest, edges=True)
    return min(
        [row_geometry(r.array, manifest.block_bytes).rows_per_block for r in served], default=1
    )


def copied_rows(rows: ServedRows) -> RowArray | None:
    if isinstance(rows.node_type, EdgeItems) or rows.node_type.halo is None:
        return None
    halo = rows.node_type.halo
    if rows.array is rows.node_type.label:
        return halo.label
    names = [n for n, array in rows.node_type.features.items() if array is rows.array]
    return halo.features[names[0]]


class Budget(NamedTuple):
    """How the memory is divided at the start."""

    table_entries: tuple[LedgerEntry, ...]
    slot_bytes: int
    num_slots: int
    graph_slots: int  # of these, those of the graph pool
    graph_min: int  # slots that the graph pool always keeps
    graph_blocks: int
    row_blocks: int
    unused_bytes: int = 0  # remainder of --mem, less than a slot

    def entries(self, graph_slots: int = -1, num_slots: int = -1) -> tuple[LedgerEntry, ...]:
        """The ledger as `serve --dry-run` prints it, or with the slots that the store has now."""
        slot = self.slot_bytes
        graph_slots = self.graph_slots if graph_slots < 0 else graph_slots
        graph = "all of" if graph_slots >= self.graph_blocks else "of"
        rest = (self.num_slots if num_slots < 0 else num_slots) - graph_slots
        return (
            *self.table_entries,
            LedgerEntry(
                "graph pool",
                graph_slots * slot,
                f"{graph_slots:,} slots x {slot:,} B, {graph} {self.graph_blocks:,} blocks",
            ),
            LedgerEntry(
                "row pool and sessions",
                rest * slot,
                f"{rest:,} slots x {slot:,} B, {self.row_blocks:,} blocks; sessions take "
                "workspaces, seeds, structure and row areas from it",
            ),
        )


def table_entries(manifest: Manifest) -> tuple[LedgerEntry, ...]:
    """Tables that stay in memory beside the arena."""
    graphs = [c for r in manifest.relations for c in (r, r.halo) if c is not None]
    rows = [a for r in rows_of(manifest, edges=True) for a in (r.array, copied_rows(r)) if a]
    rows += manifest.hop_arrays()
    geometries = [graph_geometry(columns.num_blocks, manifest.block_bytes) for columns in graphs]
    geometries += [row_geometry(array, manifest.block_bytes) for array in rows]
    pages = sum(geometry.num_pages for geometry in geometries)
    blocks = sum(columns.num_blocks for columns in graphs)
    item = ITEM_BYTES[manifest.id_dtype]
    nodes, each = manifest.num_nodes, 36 if has_edge_rows(manifest) else 28
    return (
        LedgerEntry("page checksums", 4 * pages, f"4 B x {pages:,} pages of 4 KiB"),
        LedgerEntry(
            "object index", each * blocks, f"{each} B x {blocks:,} graph blocks, with its guide"
        ),
        LedgerEntry("original ids", item * nodes, f"{item} B x {nodes:,} nodes"),
    )


def table_bytes(manifest: Manifest) -> int:
    """Bytes that `StoreTables` needs for all tables, each array aligned."""
    graphs = 2 * len(manifest.relations)
    arrays = len(rows_of(manifest, edges=True)) * 2 + len(manifest.hop_arrays())
    return sum(e.num_bytes for e in table_entries(manifest)) + ALIGN * (4 * graphs + arrays + 1)


def slot_bytes(manifest: Manifest) -> int:
    """Bytes of an arena slot: the widest slot on disk, so that every block fits one."""
    widths = [
        row_geometry(r.array, manifest.block_bytes).slot_bytes
        for r in rows_of(manifest, edges=True)
    ]
    return max([manifest.block_bytes, *widths])


def make_budget(manifest: Manifest, settings: EngineSettings) -> Budget:
    """Divide the memory for one store.  Raises BudgetTooSmall, with the least that would do."""
    return make_budgets([manifest], settings)[0]


def make_budgets(manifests: Sequence[Manifest], settings: EngineSettings) -> list[Budget]:
    """Divide the memory: each store gets its minimum, and a part of the rest by its blocks.

    Slots may move between stores later.  Raises BudgetTooSmall, with the least that would do.
    """
    fixed = settings.reserve_bytes + settings.peer_bytes + settings.object_bytes
    fixed += request_bytes(settings.mem_bytes)
    fixed += sum(e.num_bytes for m in manifests for e in table_entries(m))
    slot = max(slot_bytes(m) for m in manifests)
    num_slots = (settings.mem_bytes - fixed) // slot
    leasts = [graph_min(m, settings) + MIN_SESSION for m in manifests]
    if num_slots < sum(leasts):
        tables = fixed - request_bytes(settings.mem_bytes)
        need = format_mem(mem_of(tables + sum(leasts) * slot))
        raise BudgetTooSmall(
            f"--mem {format_bytes(settings.mem_bytes)}: tables take {format_bytes(fixed)} and the "
            f"arena at least {sum(leasts)} slots of {format_bytes(slot)}; give at least --mem "
            f"{need}"
        )
    spare, wanted = num_slots - sum(leasts), [sum(_num_blocks(m)) for m in manifests]
    shares = [
        minimum + spare * w // max(1, sum(wanted))
        for minimum, w in zip(leasts, wanted, strict=True)
    ]
    shares[-1] += num_slots - sum(shares)
    unused = settings.mem_bytes - fixed - num_slots * slot
    return [
        size_pools(m, settings, slot, n, unused) for m, n in zip(manifests, shares, strict=True)
    ]


def enough_mem(settings: EngineSettings, unused_bytes: int, more_bytes: int) -> str:
    """The least --mem, in whole MiB, that would give the arena `more_bytes` more of slots."""
    own = request_bytes(settings.mem_bytes)
    return format_mem(mem_of(settings.mem_bytes - own - unused_bytes + more_bytes))


def request_bytes(mem_bytes: int) -> int:
    """Part of --mem for client messages that are being received, and for ids kept from them."""
    return min(_MAX_REQUESTS, mem_bytes // _REQUESTS_PART)


def mem_of(num_bytes: int) -> int:
    """The least --mem that leaves `num_bytes` beside the bytes of requests."""
    minimum = -(-num_bytes * _REQUESTS_PART // (_REQUESTS_PART - 1))
    return min(minimum, num_bytes + _MAX_REQUESTS)


def size_pools(
    manifest: Manifest, settings: EngineSettings, slot: int, num_slots: int, unused_bytes: int
) -> Budget:
    """Divide a store's slots between its graph and its rows."""
    graph_blocks, row_blocks = _num_blocks(manifest)
    minimum = graph_min(manifest, settings)
    graph_slots = graph_preferred(graph_blocks, row_blocks, minimum, num_slots)
    return Budget(
        table_entries(manifest), slot, num_slots, graph_slots, minimum, graph_blocks, row_blocks,
        unused_bytes,
    )  # fmt: skip


def graph_preferred(graph_blocks: int, row_blocks: int, minimum: int, num_slots: int) -> int:
    """Preferred number of slots of the graph pool, out of `num_slots`."""
    # The whole graph if at most a third of the arena holds it, or if beside it and all rows as many
    # slots as it takes are left for sessions: with fewer, several sessions take some of its own,
    # and sample block by block.  Else little.  What is read of the graph is shared by all batches
    # that are sampled together, and a smaller graph pool leaves room for more of them: with 599 of
    # 1,305 slots 424 KB a seed were read, with 108 slots 223 KB.
    whole = 3 * graph_blocks <= num_slots or 2 * graph_blocks + row_blocks <= num_slots
    share = graph_blocks if whole else num_slots // 12
    return min(max(share, minimum), num_slots - MIN_SESSION)


def graph_min(manifest: Manifest, settings: EngineSettings) -> int:
    """Slots that the graph of a store always keeps."""
    return min_slots(_num_blocks(manifest)[0], settings.workers)


def _num_blocks(manifest: Manifest) -> tuple[int, int]:
    rows = [row_geometry(r.array, manifest.block_bytes) for r in served_rows(manifest)]
    return sum(r.num_blocks for r in manifest.relations), sum(g.num_blocks for g in rows)


def plan_budget(stores: Sequence[Store], settings: EngineSettings) -> tuple[LedgerEntry, ...]:
    """The ledger of a daemon that would serve these stores.  Raises BudgetTooSmall."""
    found: list[LedgerEntry] = []
    budgets = make_budgets([store.manifest for store in stores], settings)
    for store, budget in zip(stores, budgets, strict=True):
        prefix = f"{store.path.resolve().name}: " if len(stores) > 1 else ""
        found += [LedgerEntry(prefix + e.name, e.num_bytes, e.basis) for e in budget.entries()]
    found.append(requests_entry(settings))
    if settings.reserve_bytes:
        basis = "for tables of stores that are opened later"
        found.append(LedgerEntry("reserve", settings.reserve_bytes, basis))
    return (*found, *elsewhere_entries(settings))


def elsewhere_entries(settings: EngineSettings) -> list[LedgerEntry]:
    """Entries for memory of peers and object storage, if stores are served from there."""
    found = []
    if settings.peer_bytes:
        basis = "16 x 1 MiB of rows and 2 MiB of pages and ids for each peer, owners of blocks"
        found.append(LedgerEntry("peers", settings.peer_bytes, basis))
    if settings.object_bytes:
        basis = "ranges on their way, an 8th of --mem or 64 MiB for each store; 2.25 B a page"
        found.append(LedgerEntry("objects", settings.object_bytes, basis))
    return found


def requests_entry(settings: EngineSettings) -> LedgerEntry:
    """The ledger entry of `request_bytes`."""
    basis = "messages that are being received, ids that are kept; those of an attach: arena slots"
    return LedgerEntry("requests", request_bytes(settings.mem_bytes), basis)


class SessionNeed(NamedTuple):
    """Arena slots that a session needs."""

    workspace: int  # contiguous, per worker
    seeds: int  # contiguous; with the owner map
    lookup: int  # contiguous, for the seeds' original ids until their store ids are looked up
    structure: int  # of one batch, worst case
    addresses: int  # of one batch, worst case, in several groups
    area: int  # row area of one batch, worst case
    min_area: int  # one slot per row array

    @property
    def minimum(self) -> int:
        """Fewest slots with which the session can be served: one worker with its transit slots.

        The slots of original ids are given back before any others are taken.
        """
        return self.seeds + max(self.lookup, self.workspace + 2 + self.min_quota)

    @property
    def min_quota(self) -> int:
        """Slots for one batch at a time, its rows in as many groups as it takes."""
        return self.structure + self.addresses + self.min_area


def structure_bytes(shape: Shape, sizes: Sizes) -> int:
    """Bytes of a batch's structure blob in the worst case, alignment included."""
    id_bytes = ITEM_BYTES[sizes.id_dtype]
    relations, trees = len(shape.edges[0]), sizes.trees
    arrays = 6 + len(shape.edges) * relations + (sizes.owner_bytes > 0)
    arrays += (shape.placed > 0) + (shape.named > 0)
    arrays += sizes.record.weights + (sizes.record.times > 0)
    total = (
        (shape.nodes + shape.named) * id_bytes
        + 8 * shape.seeds
        + 4 * sum(shape.frontier) * relations
    )
    total += 4 * shape.ends + (4 * shape.nodes + 8 * shape.seeds) * trees
    total += shape.nodes * sizes.owner_bytes + RANK_BYTES * shape.placed
    return total + 4 * shape.total_edges * (1 + sizes.record.size) + 64 * arrays


def session_need(
    shape: Shape, sizes: Sizes, rows: list[ServedRows], num_seeds: int, lookup_bytes: int, slot: int
) -> SessionNeed:
    """Slots that a session with this plan needs.

    num_seeds      ids in the session's table of seeds
    lookup_bytes   size of the original ids to look up
    """

    def slots(num_bytes: int) -> int:
        return -(-num_bytes // slot)

    item = ITEM_BYTES[sizes.id_dtype]
    items = shape.nodes + shape.total_edges * sizes.edge_rows
    return SessionNeed(
        workspace=slots(workspace_bytes(shape, sizes)),
        seeds=slots(num_seeds * item + sizes.num_nodes * sizes.owner_bytes),
        lookup=slots(lookup_bytes),
        structure=slots(structure_bytes(shape, sizes)),
        addresses=slots(items * (8 * len(rows) + 4) + 64 * (len(rows) + 1)),
        area=sum(-(-items // (slot // r.array.row_bytes)) for r in rows),
        min_area=len(rows),
    )


def edge_record(manifest: Manifest, resolved: Resolved) -> EdgeRecord:
    """The record of each edge of a batch; ids are as wide as the widest relation has them."""
    ids = max(ITEM_BYTES[r.edge_id_dtype or "uint32"] for r in manifest.relations) // 4
    return EdgeRecord(
        ids * resolved.edge_ids, int(resolved.edge_weights), 2 * resolved.edge_times,
        ITEM_BYTES[manifest.id_dtype] // 4 * resolved.edge_features,
    )  # fmt: skip


def make_sizes(
    manifest: Manifest, resolved: Resolved, table: TableKind, owner_bytes: int = 0
) -> Sizes:
    """Sizes that the store and the request add to a plan's shape.

    table   that is wanted; a subgraph, and nodes that differ from tree to tree, have a hash table
    """
    record, served = edge_record(manifest, resolved), chosen_rows(manifest, resolved)
    in_macro = resolved.family == "macro"
    items = num_items(manifest, record.items > 0)
    rows = [row_geometry(r.array, manifest.block_bytes) for r in served]
    finest = min((r.rows_per_block for r in rows), default=items)
    blocks = [r.num_blocks for r in manifest.relations] + [g.num_blocks for g in rows]
    return Sizes(
        num_nodes=manifest.num_nodes,
        id_dtype=manifest.id_dtype,
        record=record,
        rows=tuple(
            RowName(r.number, r.name, in_macro and isinstance(r.node_type, NodeType))
            for r in served
        ),
        max_blocks=max(blocks, default=1),
        row_keys=items // max(1, finest) + 1,
        table=TableKind.HASHED if resolved.subgraph or resolved.has_trees else table,
        trees=resolved.has_trees,
        owner_bytes=owner_bytes,
    )
