"""Operators of propagation, and the plan of its memory, passes and disk space.  Pure."""

from dataclasses import dataclass
from math import ceil, exp, log
from typing import NamedTuple

import msgspec

from blockstore.format import (
    ITEM_BYTES,
    PAGE_BYTES,
    HopSet,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    gapless_rows,
    row_geometry,
    side_arrays,
)
from preprocess.errors import BadInput
from preprocess.files.store import SlicedPlan, choose_feature, result_dtype
from preprocess.ingest.contents import as_path, row_disk_bytes
from preprocess.ingest.options import HopsRequest
from preprocess.ingest.plan import interpreter_bytes, too_little_memory, with_interpreter

ALL = "all"  # the split that contains every node

SERIES_ERROR = 1e-7  # bound of the truncated rest of a series, relative to the features
_MAX_T = 20.0  # maximum t of the heat kernel, whose terms must fit in float32
_MIN_ALPHA = 0.005

_FIXED_BYTES = 8 << 20  # Zarr metadata, small buffers
_INTERPRETER_BYTES = 128 << 20  # Python, numpy and compiled kernels: a quarter of --mem at most
_MAX_SCAN, _MAX_PIECE, _MAX_BUFFER = 2 << 20, 1 << 20, 8 << 20
_MIN_PIECE = 16 << 10
_CRC_BYTES = 16  # for each page of the array being written
_LINE_ITEMS = 16  # float32 in a cache line
_MAX_WIDTH = 1 << 10  # columns of a slice


class Operator(NamedTuple):
    """A matrix B: hop r is B**r times the features."""

    kind: str  # of `ingest.options.OperatorKind`
    loops: bool
    parameter: float  # alpha or t; 0: none
    weighted: bool
    relation: str  # name; empty if it is the only relation of the type with itself

    @property
    def name(self) -> str:
        """A name with all parameters."""
        text = f"{self.kind}:{self.parameter:g}" if self.parameter else self.kind
        text += "+loops" * self.loops + "+weights" * self.weighted
        return f"{text}@{self.relation}" if self.relation else text

    def steps(self) -> list[tuple[float, float]]:
        """The products that make a hop: (scale, share) of each out = scale * T rows + share * x.

        T is the normalised matrix, x the features of the previous hop; `rows` is x in the first
        product, then the output of the previous product.
        """
        if self.kind == "ppr":
            count = max(1, ceil(log(SERIES_ERROR / 2) / log(1 - self.parameter)))
            return [(1 - self.parameter, self.parameter)] * count
        if self.kind == "heat":
            t = self.parameter
            pairs = [(t / k, 1.0) for k in range(_heat_terms(t), 0, -1)]
            last, share = pairs[-1]
            return [*pairs[:-1], (last * exp(-t), share * exp(-t))]
        return [(1.0, 0.0)]


def _heat_terms(t: float) -> int:
    """Terms of the series of exp(-t (I - T)), such that the rest is at most SERIES_ERROR."""
    term, total, k = exp(-t), exp(-t), 0
    while 1 - total > SERIES_ERROR / 2:
        k += 1
        term *= t / k
        total += term
    return max(1, k)


class ResolvedHops(NamedTuple):
    """A `HopsRequest` whose names were found in a manifest."""

    nodes: NodeType
    relation: Relation
    feature: RowArray
    feature_name: str
    operators: tuple[Operator, ...]
    hops: int
    dtype: str
    sizes: dict[str, int]  # maximum rows of each split
    held: dict[str, int]  # hops that exist already, by name of the operator; -1: not even hop 0
    seed: int

    @property
    def is_new(self) -> bool:
        """Whether nodes, labels and hop 0 must be written."""
        return not any(split in self.nodes.hops for split in self.sizes)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes.values())

    def missing(self, operator: Operator) -> range:
        """Hops of an operator, from 1 on, that must be written."""
        return range(self.held.get(operator.name, 0) + 1, self.hops + 1)

    @property
    def num_arrays(self) -> int:
        return self.is_new + sum(len(self.missing(operator)) for operator in self.operators)

    def array(self, manifest: Manifest, split: str, rows: int, tail: str) -> RowArray:
        path = f"{self.folder(split)}/{tail}"
        return gapless(
            manifest, path, self.dtype, rows, self.feature.row_shape,
            f"{path}.scale" if self.dtype == "int8" else "",
        )  # fmt: skip

    def folder(self, split: str) -> str:
        """Folder of the arrays of a split."""
        return f"nodes/{as_path(self.nodes.name)}/hops/{as_path(split)}"

    def extended(self, manifest: Manifest, sets: dict[str, HopSet]) -> Manifest:
        """The manifest with these sets, without an updated fingerprint."""
        hops = {**self.nodes.hops, **sets}
        types = tuple(
            msgspec.structs.replace(t, hops=hops) if t.name == self.nodes.name else t
            for t in manifest.types
        )
        return msgspec.structs.replace(manifest, types=types)


def gapless(
    manifest: Manifest, path: str, dtype: str, rows: int, shape: tuple[int, ...], scale: str = ""
) -> RowArray:
    array = RowArray(path, dtype, rows, shape, "", scale)
    per_block = gapless_rows(array.row_bytes, manifest.block_bytes, rows)
    return msgspec.structs.replace(array, rows_per_block=per_block)


def resolve_hops(manifest: Manifest, request: HopsRequest, where: str) -> ResolvedHops:
    """Look up the names in a store's manifest; `where`: path of the store.  Raises BadInput."""
    _check_numbers(request)
    nodes = _find_type(manifest, request, where)
    relation, named = _find_relation(manifest, nodes, request, where)
    feature_name = choose_feature(nodes, request.feature, where)
    feature = nodes.features[feature_name]
    operators = tuple(
        Operator(
            kind,
            request.hop_loops,
            {"ppr": request.hop_alpha, "heat": request.t}.get(kind, 0.0),
            request.weighted,
            relation.name if named else "",
        )
        for kind in request.operators or ("sym",)
    )
    dtype = result_dtype(feature, request.dtype)
    sizes = _find_splits(nodes, request, where)
    held = _find_held(nodes, sizes, operators, request, feature_name, dtype, where)
    return ResolvedHops(
        nodes, relation, feature, feature_name, operators, request.hops, dtype, sizes, held,
        request.seed,
    )  # fmt: skip


def _check_numbers(request: HopsRequest) -> None:
    if len(set(request.operators)) < len(request.operators):
        raise BadInput.at("--operator", "one twice", "different operators", "name each once")
    checks: list[tuple[str, object, bool, str]] = [
        ("--hops", request.hops, 1 <= request.hops <= 64, "1 to 64"),
        ("--seed", request.seed, 0 <= request.seed < 2**63, "0 to 2^63 - 1"),
        ("--alpha", request.hop_alpha, _MIN_ALPHA <= request.hop_alpha < 1, f"{_MIN_ALPHA:g} to 1"),
        ("--t", request.t, 0 < request.t <= _MAX_T, f"more than 0, at most {_MAX_T:g}"),
    ]  # fmt: skip
    for option, value, good, expected in checks:
        if not good:
            raise BadInput.at(option, value, expected, "choose another")


def _of_itself(manifest: Manifest, node_type: NodeType) -> list[Relation]:
    return [r for r in manifest.relations if r.src == r.dst == node_type.name]


def _find_type(manifest: Manifest, request: HopsRequest, where: str) -> NodeType:
    fitting = [t for t in manifest.types if t.features and _of_itself(manifest, t)]
    names = ", ".join(t.name for t in fitting)
    if not fitting:
        raise BadInput.at(
            where, "no type that has both features and a relation with itself", "one",
            "derive features first, or ingest such a relation",
        )  # fmt: skip
    if not request.node_type and len(fitting) > 1:
        raise BadInput.at(where, f"several types: {names}", "--type with one of them", "choose one")
    wanted = request.node_type or fitting[0].name
    nodes = next((t for t in manifest.types if t.name == wanted), None)
    if nodes in fitting:
        return nodes
    lacks = ""
    if nodes is not None:
        lacks = f" without {'a relation with itself' if nodes.features else 'features'}"
    raise BadInput.at(
        f"{where}: --type", f"type {wanted!r}{lacks}", f"one of {names}", "choose one"
    )  # fmt: skip


def _find_relation(
    manifest: Manifest, nodes: NodeType, request: HopsRequest, where: str
) -> tuple[Relation, bool]:
    """The relation, and whether the type has other relations with itself."""
    own = _of_itself(manifest, nodes)
    found = own
    if request.relation:
        found = [r for r in own if request.relation in (r.name, r.title)]
    if len(found) != 1:
        what = f"{len(own)} relations of {nodes.name} with itself"
        if request.relation:
            what = f"relation {request.relation!r}"
        raise BadInput.at(
            f"{where}: --relation", what, f"one of {', '.join(r.name for r in own)}", "choose one"
        )
    if request.weighted and not found[0].has_weights:
        raise BadInput.at(
            f"{where}: --weighted", f"relation {found[0].name} without weights",
            "a weight beside each edge", "go without --weighted",
        )  # fmt: skip
    return found[0], len(own) > 1


def _find_splits(nodes: NodeType, request: HopsRequest, where: str) -> dict[str, int]:
    if request.rows == ALL:
        if request.splits:
            raise BadInput.at(
                f"{where}: --split", ", ".join(request.splits), "none with --rows all",
                "leave one of them out",
            )  # fmt: skip
        return {ALL: nodes.num_nodes}
    for held, what in ((nodes.splits, "splits"), (nodes.label, "labels")):
        if not held:
            raise BadInput.at(
                f"{where}: type {nodes.name}", f"no {what}", f"{what}, whose rows are kept",
                "--rows all keeps every node, or ingest it with some",
            )  # fmt: skip
    names = request.splits or tuple(nodes.splits)
    for name in names:
        if name not in nodes.splits:
            raise BadInput.at(
                f"{where}: --split", f"split {name!r}",
                f"one of {', '.join(nodes.splits)}", "choose some of them",
            )  # fmt: skip
    return {name: nodes.splits[name].num_rows for name in names}


def _find_held(
    nodes: NodeType, sizes: dict[str, int], operators: tuple[Operator, ...], request: HopsRequest,
    feature: str, dtype: str, where: str,
) -> dict[str, int]:  # fmt: skip
    """Existing hops of each operator; all splits must have the same."""
    sets = {name: nodes.hops[name] for name in sizes if name in nodes.hops}
    if not sets:
        return {}
    absent = [name for name in sizes if name not in sets]
    held = [{op: len(hops) - 1 for op, hops in found.operators.items()} for found in sets.values()]
    if absent or any(each != held[0] for each in held):
        other = absent or [name for name, each in zip(sets, held, strict=True) if each != held[0]]
        raise BadInput.at(
            f"{where}: hops of {nodes.name}",
            f"{', '.join(name for name in sets if name not in other)} with other hops than "
            f"{', '.join(other)}", "the same hops in all splits",
            "go on with --split, some at a time",
        )  # fmt: skip
    for name, found in sets.items():
        first = next(iter(found.operators.values()))[0]
        for option, has, wants in (
            ("--seed", found.seed, request.seed), ("--feature", found.feature, feature),
            ("--dtype", first.dtype, dtype),
        ):  # fmt: skip
            if has != wants:
                raise BadInput.at(
                    f"{where}: hops of {nodes.name}, {name}: {option}", wants,
                    f"{has}, as those that are there", f"give {option} {has}, or ingest again",
                )  # fmt: skip
    for operator in operators:
        if held[0].get(operator.name, 0) >= request.hops:
            raise BadInput.at(
                f"{where}: hops of {nodes.name}",
                f"{held[0][operator.name]} hops of {operator.name} already", "something to add",
                "leave this operator out, or ask for more hops",
            )  # fmt: skip
    return held[0]


@dataclass(frozen=True, slots=True)
class HopsPlan(SlicedPlan):
    arrays: int  # number of float32 arrays of one slice of all nodes in memory
    resident: bool  # whether the graph's blocks are read once, and stay in memory
    threads: int
    scan_bytes: int  # bytes of blocks that a thread reads at a time
    piece_bytes: int  # bytes of float32 rows processed at a time
    buffer: int  # bytes of each of the two buffers of the array being written
    copy_bytes: int  # bytes for copying labels to their slots
    num_products: int
    graph_reads: int  # for products, without the one that counts edges
    array_bytes: int  # permanent bytes on disk


def plan_hops(
    manifest: Manifest, resolved: ResolvedHops, mem_bytes: int, threads: int
) -> HopsPlan:  # fmt: skip
    """Divide --mem.  Raises BudgetTooSmall with the minimum."""
    nodes, feature, columns = resolved.nodes, resolved.feature, resolved.feature.row_items
    series = any(len(operator.steps()) > 1 for operator in resolved.operators)
    arrays, block = (3 if series else 2), manifest.block_bytes
    sample = [resolved.array(manifest, name, size, "0") for name, size in resolved.sizes.items()]
    slots = [row_geometry(array, block).slot_bytes for array in sample]
    slots.append(row_geometry(feature, block).slot_bytes)
    tables = _tables(manifest, resolved, sample)
    column = 4 * (arrays * nodes.num_nodes + resolved.relation.num_blocks)
    per_node = 2 * ITEM_BYTES[manifest.id_dtype] + 1
    choosing = per_node * nodes.num_nodes + 12 * max(resolved.sizes.values())
    minimum = max(
        8 * nodes.num_nodes + column + threads * block + _pieces(_MIN_PIECE, threads, slots),
        choosing, 6 * max(slots),
    )  # fmt: skip
    minimum = with_interpreter(minimum + tables, _INTERPRETER_BYTES)
    if mem_bytes < minimum:
        why = f"a column of {nodes.num_nodes:,} nodes {arrays} times, their degrees and buffers"
        raise too_little_memory(mem_bytes, minimum, why)
    spare = mem_bytes - tables - interpreter_bytes(mem_bytes, _INTERPRETER_BYTES)
    room = spare - 8 * nodes.num_nodes
    scan = max(block, min(_MAX_SCAN, room // (16 * threads)))
    piece = max(_MIN_PIECE, min(_MAX_PIECE, room // (64 * threads)))
    if threads * scan + _pieces(piece, threads, slots) + column > room:
        scan, piece = block, _MIN_PIECE
    room -= threads * scan + _pieces(piece, threads, slots)
    graph = resolved.relation.num_blocks * block
    resident = room - graph >= column * min(_LINE_ITEMS, _padded(columns))
    width = _width(columns, (room - graph * resident) // column)
    num_slices = -(-columns // width)
    label = nodes.label.row_bytes if nodes.label is not None else 0
    buffer = max(*slots, min(_MAX_BUFFER, room // 8))
    products = sum(len(operator.steps()) * resolved.hops for operator in resolved.operators)
    disk = sum(row_disk_bytes(array, block) for array in sample) * resolved.num_arrays
    return HopsPlan(
        width=width,
        num_slices=num_slices,
        arrays=arrays,
        resident=resident,
        threads=threads,
        scan_bytes=scan,
        piece_bytes=piece,
        buffer=buffer,
        copy_bytes=spare - 2 * buffer,
        num_products=products,
        graph_reads=1 if resident else num_slices * products,
        array_bytes=disk + resolved.is_new * resolved.num_rows * (8 + label),
    )


def _pieces(piece_bytes: int, threads: int, slots: list[int]) -> int:
    """Bytes of pieces of rows: gathered, converted and their positions; or read in two lanes."""
    return max(4 * threads * piece_bytes, 8 * max(slots[-1], piece_bytes))


def _padded(columns: int) -> int:
    """Columns padded to full cache lines, or to a power of two if there are fewer than a line."""
    if columns >= _LINE_ITEMS:
        return -(-columns // _LINE_ITEMS) * _LINE_ITEMS
    width = 1
    while width < columns:
        width *= 2
    return width


def _width(columns: int, fitting: int) -> int:
    """Columns of a slice: as many as fit, with slices of about equal size in full cache lines."""
    if fitting >= _padded(columns) <= _MAX_WIDTH:
        return _padded(columns)
    if fitting < _LINE_ITEMS:
        width = 1
        while 2 * width <= fitting:
            width *= 2
        return width
    lines = min(fitting, _MAX_WIDTH) // _LINE_ITEMS
    total = _padded(columns) // _LINE_ITEMS
    num_slices = -(-total // lines)
    return -(-total // num_slices) * _LINE_ITEMS


def _tables(manifest: Manifest, resolved: ResolvedHops, sample: list[RowArray]) -> int:
    """Bytes in memory beside the columns: checksums, offsets of blocks, small arrays."""
    relation, block = resolved.relation, manifest.block_bytes
    pages = max(row_disk_bytes(array, block) for array in sample) // PAGE_BYTES
    largest = max(ITEM_BYTES[dtype] * size for _, dtype, size in side_arrays(manifest))
    graph = relation.num_blocks * (block // PAGE_BYTES * 4 + 40)
    return _CRC_BYTES * pages + 2 * largest + graph + _FIXED_BYTES
