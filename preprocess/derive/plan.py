"""Resolve the names of a derivation, and plan its memory, passes and disk space.  Pure."""

from dataclasses import MISSING, dataclass
from typing import ClassVar, Literal, NamedTuple

import msgspec

from blockstore.flags import flag
from blockstore.format import (
    ITEM_BYTES,
    PAGE_BYTES,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    crc_path,
    row_geometry,
    side_arrays,
)
from blockstore.units import format_bytes
from preprocess.errors import BadInput
from preprocess.files.store import SlicedPlan, choose_feature, result_dtype
from preprocess.ingest.contents import as_path, row_disk_bytes
from preprocess.ingest.options import FeatureDtype
from preprocess.ingest.plan import (
    buffer_bytes,
    interpreter_bytes,
    minimum_bytes,
    too_little_memory,
)
from preprocess.partition.influence_plan import halo_paths
from preprocess.stages.csc import COLUMN_BYTES, Widths
from preprocess.stages.slots import SLOT_BYTES

Op = Literal["mean", "sum", "max"]

_FIXED_BYTES = 4 << 20  # Zarr metadata, small buffers
_EDGE_BLOCKS = 6  # a graph block being read, its targets, degrees and offsets
_CRC_BYTES = 16  # for each page of the array being written
_MIN_SHARE = 4 << 20
_LINE_ITEMS = 16  # float32 in a cache line
_MAX_PIECE = 8 << 20
_MAX_EDGES = 1 << 18
_PIECE_EDGE_BYTES = 96  # memory of an edge in all its copies


@dataclass(frozen=True, slots=True)
class Derivation:
    """Options of a derivation, with names that are looked up in the store."""

    panel: ClassVar = "Features"
    node_type: str = flag(MISSING, "of the nodes that get features", "--type")
    origin: str = flag(MISSING, "type whose features are taken", "--from")
    relation: str = flag(MISSING, "between them: its name, or src-name-dst")
    op: Op = flag("mean", "over the rows of a node's neighbors")
    name: str = flag("x", "of the new array")
    # of the origin type; empty: "x", or its only one
    feature: str = flag("", "which of several features", show_default=False)
    dtype: FeatureDtype | None = flag(None, "of the new array; else as the origin's")


class ResolvedDerivation(NamedTuple):
    """A `Derivation` whose names were found in a manifest."""

    target: NodeType
    origin: NodeType
    relation: Relation
    outward: bool  # targets are the relation's sources, so its edges are ordered by origin
    feature: RowArray
    array: RowArray  # the new one
    name: str
    copies: RowArray | None  # copies of its rows for the halo of the target type

    @property
    def origin_dtype(self) -> str:
        """Dtype of an origin's number in its type."""
        return "uint32" if self.origin.num_nodes < 2**32 else "uint64"

    @property
    def widths(self) -> Widths:
        """Widths of edges while they are sorted by origin."""
        num_nodes = self.target.num_nodes
        return Widths.of("uint32" if num_nodes < 2**32 else "uint64", num_nodes, None, 0)

    def extended(self, manifest: Manifest) -> Manifest:
        """The manifest with the new array, without an updated fingerprint."""
        features = {**self.target.features, self.name: self.array}
        target = msgspec.structs.replace(self.target, features=features)
        if self.copies is not None and target.halo is not None:
            held = {**target.halo.features, self.name: self.copies}
            halo = msgspec.structs.replace(target.halo, features=held)
            target = msgspec.structs.replace(target, halo=halo)
        types = tuple(target if t.name == target.name else t for t in manifest.types)
        return msgspec.structs.replace(manifest, types=types)


@dataclass(frozen=True, slots=True)
class DerivePlan(SlicedPlan):
    share: int  # bytes for sums, or sorting
    buffer: int  # bytes of each of the two buffers of the array being written
    scan_bytes: int  # bytes of row blocks to read at a time
    lanes: int  # threads that read row blocks
    piece_rows: int  # rows to process at a time, except while blocks are read
    piece_edges: int
    sort_bytes: int  # bytes for sorting edges
    array_bytes: int  # permanent bytes on disk


def resolve(manifest: Manifest, derivation: Derivation, where: str) -> ResolvedDerivation:
    """Look up the names in a store's manifest; `where`: path of the store.  Raises BadInput."""
    target = _find_type(manifest, derivation.node_type, f"{where}: --type")
    origin = _find_type(manifest, derivation.origin, f"{where}: --from")
    relation = _find_relation(manifest, derivation, f"{where}: --relation")
    if not origin.features:
        raise BadInput.at(
            f"{where}: --from", f"type {origin.name!r} without features", "a type with features",
            "derive its own first",
        )  # fmt: skip
    feature = origin.features[choose_feature(origin, derivation.feature, where)]
    array = _new_array(manifest, target, feature, derivation, where)
    outward = relation.src == target.name and relation.dst != target.name
    copies = None
    if target.halo is not None:  # one row for each slot, with the array's own int8 scale
        path = halo_paths(target.name).feature(derivation.name)
        copies = msgspec.structs.replace(array, path=path, num_rows=target.halo.nodes.num_rows)
    return ResolvedDerivation(
        target, origin, relation, outward, feature, array, derivation.name, copies
    )


def _find_type(manifest: Manifest, name: str, where: str) -> NodeType:
    found = [t for t in manifest.types if t.name == name]
    if not found:
        names = ", ".join(t.name for t in manifest.types)
        raise BadInput.at(where, f"type {name!r}", f"one of {names}", "choose one")
    return found[0]


def _find_relation(manifest: Manifest, derivation: Derivation, where: str) -> Relation:
    """Find a relation between both types by name; if they are the same, in-edges are used."""
    ends = {derivation.node_type, derivation.origin}
    named = [r for r in manifest.relations if derivation.relation in (r.name, r.title)]
    joining = [r.title for r in manifest.relations if {r.src, r.dst} == ends]
    found = [r for r in named if {r.src, r.dst} == ends]
    if len(found) == 1:
        return found[0]
    between = f"a relation between {derivation.node_type} and {derivation.origin}"
    if joining:
        between += f": {', '.join(joining)}"
    if found:
        names = " and ".join(r.title for r in found)
        raise BadInput.at(
            where, names, f"one relation, not {len(found)}", "name it as src-name-dst"
        )
    text = ", ".join(r.title for r in named) or f"relation {derivation.relation!r}"
    remedy = "choose one" if joining else "no relation joins them: derive by a type between them"
    raise BadInput.at(where, text, between, remedy)


def _new_array(
    manifest: Manifest, target: NodeType, feature: RowArray, derivation: Derivation, where: str
) -> RowArray:
    path = f"nodes/{as_path(target.name)}/features/{as_path(derivation.name)}"
    dtype = result_dtype(feature, derivation.dtype)
    scale = f"{path}.scale" if dtype == "int8" else ""
    taken = {a.path for a in manifest.row_arrays()} | {s[0] for s in side_arrays(manifest)}
    if not derivation.name or {path, crc_path(path), f"{path}.scale"} & taken:
        found = f"name {derivation.name!r}, which {target.name} has already"
        raise BadInput.at(
            f"{where}: --name", found if derivation.name else "no name", "a name that is free",
            "choose another",
        )  # fmt: skip
    return RowArray(path, dtype, target.num_nodes, feature.row_shape, "dense", scale)


def plan_derivation(
    manifest: Manifest, resolved: ResolvedDerivation, mem_bytes: int, longest: int = 0
) -> DerivePlan:
    """Divide --mem.

    longest   most edges of one origin, if edges must be sorted and it is known

    Raises BudgetTooSmall with the minimum.
    """
    feature, num_nodes, sort_need = resolved.feature, resolved.target.num_nodes, 0
    if not resolved.outward:
        sort_need = longest * resolved.widths.sort_bytes + COLUMN_BYTES
    out_slot = row_geometry(resolved.array, manifest.block_bytes).slot_bytes
    slot = row_geometry(feature, manifest.block_bytes).slot_bytes
    tables = _table_bytes(manifest, resolved)
    share = max(_MIN_SHARE, 6 * num_nodes, 3 * _reading(feature, slot))  # a column of sums
    minimum = minimum_bytes(tables, max(share, 3 * sort_need), out_slot)
    if mem_bytes < minimum:
        rows = format_bytes(feature.row_bytes)
        why = f"a column of {num_nodes:,} targets, rows of {rows} and buffers"
        if 3 * sort_need > share:
            why = f"sorting the {longest:,} edges of one node"
        raise too_little_memory(mem_bytes, minimum, why)
    spare = mem_bytes - tables - interpreter_bytes(mem_bytes)
    buffer = buffer_bytes(out_slot, spare)
    share = spare - 2 * buffer
    piece = min(_MAX_PIECE, share // 96)
    scan = max(slot, piece * ITEM_BYTES[feature.dtype] // 4)
    lanes = 2 if 2 * _reading(feature, scan) <= share // 6 else 1
    share -= lanes * _reading(feature, scan)
    num_slices = _num_slices(feature.row_items, share // 8 * 7 // max(4, 4 * num_nodes))
    array = row_disk_bytes(resolved.array, manifest.block_bytes)
    if resolved.copies is not None:
        array += row_disk_bytes(resolved.copies, manifest.block_bytes)
    return DerivePlan(
        share=share,
        buffer=buffer,
        scan_bytes=scan,
        lanes=lanes,
        piece_rows=max(1, piece // (4 * feature.row_items)),
        piece_edges=max(1, min(_MAX_EDGES, share // 24 // _PIECE_EDGE_BYTES)),
        sort_bytes=share // 2,
        width=-(-feature.row_items // num_slices),
        num_slices=num_slices,
        array_bytes=array,
    )


def _num_slices(columns: int, fitting: int) -> int:
    """Number of slices, such that a slice has whole cache lines if at least one line fits."""
    if columns <= fitting:
        return 1
    width = fitting // _LINE_ITEMS * _LINE_ITEMS or max(1, fitting)
    return -(-columns // width)


def _reading(feature: RowArray, scan_bytes: int) -> int:
    """Memory of a thread that reads ahead: 2 copies of stored rows, and 4 of rows in float32."""
    return 2 * scan_bytes + 4 * (scan_bytes * 4 // ITEM_BYTES[feature.dtype])


def _table_bytes(manifest: Manifest, resolved: ResolvedDerivation) -> int:
    """Bytes in memory beside the share: counts, checksums, blocks of edges."""
    counts = 4 * resolved.target.num_nodes
    if not resolved.outward:
        counts += 4 * resolved.origin.num_nodes
    pages = row_disk_bytes(resolved.array, manifest.block_bytes) // PAGE_BYTES
    largest = max(ITEM_BYTES[dtype] * size for _, dtype, size in side_arrays(manifest))
    graph = resolved.relation.num_blocks * (manifest.block_bytes // PAGE_BYTES * 4 + 8)
    blocks = _EDGE_BLOCKS * manifest.block_bytes
    if resolved.copies:  # made after the counts have been freed
        counts = max(counts, SLOT_BYTES * resolved.copies.num_rows)
    return counts + _CRC_BYTES * pages + largest + graph + blocks + _FIXED_BYTES
