"""Propagation in a store that an ingest is about to make."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from blockstore.format import FORMAT_VERSION, Manifest, NodeType, Relation
from preprocess.errors import BadInput
from preprocess.hops.hops import HopsRun, HopStages, default_threads
from preprocess.hops.plan import ALL, HopsPlan, plan_hops, resolve_hops
from preprocess.ingest.contents import Contents, RelationContents, TypeContents, graph_bytes
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.plan import seeded_splits
from preprocess.pipeline.stage import Stage, temporary_bytes


@dataclass(frozen=True, slots=True)
class HopsForecast:
    """What hops of an ingest will take."""

    operators: tuple[str, ...]
    hops: int
    node_type: str
    rows: Mapping[str, int]  # of each split, at most
    plan: HopsPlan
    temporary_bytes: int


def forecast_hops(
    contents: Contents, options: IngestOptions, where: str
) -> tuple[HopsForecast | None, list[Stage[HopsRun]]]:
    """What is asked for, in a store to come, and its stages.  Raises BadInput, BudgetTooSmall."""
    request = options.hops
    if request is None:
        return None, []
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
    stages = HopStages(manifest, resolved, plan).stages()
    found = HopsForecast(
        tuple(operator.name for operator in resolved.operators), resolved.hops,
        resolved.nodes.name, resolved.sizes, plan, temporary_bytes(stages),
    )  # fmt: skip
    return found, stages


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
