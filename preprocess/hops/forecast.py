"""Propagation seen beforehand: its stages and what they move, its share of an ingest."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from blockstore.errors import BudgetTooSmall
from blockstore.format import FORMAT_VERSION, ITEM_BYTES, Manifest, NodeType, Relation
from preprocess.contents import Contents, RelationContents, TypeContents
from preprocess.errors import BadInput
from preprocess.hops.plan import ALL, HopsPlan, Operator, Resolved, plan_hops, resolve_hops
from preprocess.options import IngestOptions
from preprocess.plan import plan_of, seeded_splits
from preprocess.result import IngestPlan, StagePlan
from preprocess.steps import graph_bytes

DEGREES, ROWS, TAKE_LABELS = "hops: degrees", "hops: rows", "hops: labels"  # names of stages
SLICES, ARRAYS = "hops: slices", "hops: arrays"


def default_threads() -> int:
    """One for each core that this process may use."""
    return min(16, len(os.sched_getaffinity(0)))


def slice_stage(number: int, operator: Operator | None, plan: HopsPlan) -> str:
    """Name of the one that makes a slice of hop 0, or of an operator's hops."""
    name = "features" if operator is None else operator.name
    return f"hops: {name}, slice {number + 1} of {plan.num_slices}"


@dataclass(frozen=True, slots=True)
class HopsForecast:
    """What hops of an ingest will take."""

    operators: tuple[str, ...]
    hops: int
    node_type: str
    rows: Mapping[str, int]  # of each split, at most
    plan: HopsPlan
    stages: tuple[StagePlan, ...]
    gathered_bytes: Mapping[str, int]  # rows of neighbors, by stage


def forecast_hops(contents: Contents, options: IngestOptions, where: str) -> HopsForecast | None:
    """Find what is asked for in a store to come.  Raises BadInput, BudgetTooSmall."""
    request = options.hops
    if request is None:
        return None
    if options.allow_nan:
        raise BadInput.at(
            "--hops", "--allow-nan beside it", "finite features, as every hop would spread others",
            "leave one of them out",
        )  # fmt: skip
    manifest = expected_manifest(contents, options)
    try:
        resolved = resolve_hops(manifest, request, where)
    except BadInput as error:
        raise BadInput(f"hops: {error}") from error
    plan = plan_hops(manifest, resolved, options.mem_bytes, default_threads())
    gathered = {
        slice_stage(number, operator, plan): 4 * resolved.relation.num_edges * plan.width
        * len(operator.steps()) * resolved.hops
        for operator in resolved.operators for number in range(plan.num_slices)
    }  # fmt: skip
    return HopsForecast(
        tuple(operator.name for operator in resolved.operators), resolved.hops,
        resolved.nodes.name, resolved.sizes, plan, hop_stages(manifest, resolved, plan), gathered,
    )  # fmt: skip


def whole_plan(contents: Contents, options: IngestOptions, where: str) -> IngestPlan:
    """Of an ingest and of the hops that follow it.

    Raises BudgetTooSmall with the least that would do for both.
    """
    try:
        plan = plan_of(contents, options)
    except BudgetTooSmall as error:
        try:
            forecast_hops(contents, options, where)
        except BudgetTooSmall as other:
            raise max(error, other, key=lambda e: e.least_bytes) from None
        raise
    hops = forecast_hops(contents, options, where)
    if hops is None:
        return plan
    return replace(
        plan,
        store_bytes=plan.store_bytes + hops.plan.array_bytes,
        temporary_bytes=max(
            plan.temporary_bytes - hops.plan.array_bytes, hops.plan.temporary_bytes
        ),
        stages=plan.stages + hops.stages,
    )  # fmt: skip


def hop_stages(manifest: Manifest, resolved: Resolved, plan: HopsPlan) -> tuple[StagePlan, ...]:
    """All stages in order, and the bytes that pass the disk."""
    nodes, rows, feature = resolved.nodes, resolved.num_rows, resolved.feature
    graph = resolved.relation.num_blocks * manifest.block_bytes
    whole = 4 * nodes.num_nodes * plan.width  # a slice of all nodes
    label = nodes.label.row_bytes if nodes.label is not None else 0
    ids = ITEM_BYTES[manifest.id_dtype]
    kept = rows * feature.row_items * ITEM_BYTES[resolved.dtype]  # one hop of all columns
    stages = [
        StagePlan(DEGREES, graph, 16 * nodes.num_nodes),
        StagePlan(ROWS, ids * nodes.num_nodes + 8 * rows, (8 + ids) * rows),
    ]
    if label:
        passes = -(-label // plan.label_bytes)
        read = passes * (label * nodes.num_nodes + ids * rows)
        stages.append(StagePlan(TAKE_LABELS, read, label * rows))
    read = nodes.num_nodes * feature.row_bytes
    stages.append(StagePlan(SLICES, read, whole * plan.num_slices))
    for operator in (None, *resolved.operators):
        for number in range(plan.num_slices):
            hops, read = 1, whole + ids * rows
            if operator is not None:
                hops = resolved.hops
                first = number == 0 and operator is resolved.operators[0]
                passes = first if plan.resident else len(operator.steps()) * hops
                read += 20 * nodes.num_nodes + passes * graph + (hops - 1) * ids * rows
            name = slice_stage(number, operator, plan)
            stages.append(StagePlan(name, read, hops * kept // plan.num_slices))
    read = resolved.num_arrays * kept + (8 + label) * rows
    return (*stages, StagePlan(ARRAYS, read, plan.array_bytes))


def expected_manifest(contents: Contents, options: IngestOptions) -> Manifest:
    """Of the store to come, edges and labelled nodes as many as there may be."""
    return Manifest(
        format=FORMAT_VERSION,
        block_bytes=options.block_bytes,
        id_dtype=contents.id_dtype,
        types=tuple(_expected_type(t, options) for t in contents.types),
        relations=tuple(_expected_relation(r, options) for r in contents.relations),
    )


def _expected_type(t: TypeContents, options: IngestOptions) -> NodeType:
    splits = {r.source.name: r.array for r in t.splits}
    seeded = seeded_splits(t, t.num_nodes, options)
    splits |= {array.path.rpartition("/")[2]: array for array in seeded}
    return NodeType(
        name=t.name,
        first=t.first,
        num_nodes=t.num_nodes,
        original_id=t.original_id,
        store_id=t.store_id,
        label=None if t.label is None else t.label.array,
        features={r.source.name: r.array for r in t.features},
        splits=splits,
    )


def _expected_relation(r: RelationContents, options: IngestOptions) -> Relation:
    return Relation(
        src=r.src.name,
        name=r.source.name,
        dst=r.dst.name,
        num_edges=r.most_edges,
        num_blocks=-(-graph_bytes(r, options) // options.block_bytes),
        path=r.path,
        first_node_path=f"{r.path}/first_node",
        has_weights=r.weight is not None,
    )


def without_splits(contents: Contents, options: IngestOptions) -> IngestOptions:
    """For a source whose splits are not known yet: hops as if every node were in one."""
    asked = options.hops
    if asked is None or asked.rows == ALL or any(t.splits for t in contents.types):
        return options
    return replace(options, hops=replace(asked, rows="all", splits=()))
