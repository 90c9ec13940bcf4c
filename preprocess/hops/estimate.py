"""Propagation in a store that an ingest is about to make."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from blockstore.format import Manifest
from preprocess.errors import BadInput
from preprocess.hops.hops import HopsRun, HopStages, default_threads
from preprocess.hops.plan import ALL, HopsPlan, plan_hops, resolve_hops
from preprocess.ingest.contents import Contents
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.stage import Stage, temporary_bytes


@dataclass(frozen=True, slots=True)
class HopsEstimate:
    """What hops of an ingest will take."""

    operators: tuple[str, ...]
    hops: int
    node_type: str
    rows: Mapping[str, int]  # of each split, at most
    plan: HopsPlan
    temporary_bytes: int


def estimate_hops(
    manifest: Manifest, options: IngestOptions, where: str
) -> tuple[HopsEstimate, list[Stage[HopsRun]]]:
    """What is asked for, and its stages.  Raises BadInput, BudgetTooSmall.

    manifest   of the store to come, edges and labelled nodes as many as there may be
    """
    request = options.hops
    assert request is not None
    if options.allow_nan:
        raise BadInput.at(
            "--hops", "--allow-nan beside it", "finite features, as every hop would spread others",
            "leave one of them out",
        )  # fmt: skip
    try:
        resolved = resolve_hops(manifest, request, where)
    except BadInput as error:
        raise BadInput(f"hops: {error}") from error
    plan = plan_hops(manifest, resolved, options.mem_bytes, default_threads())
    stages = HopStages(manifest, resolved, plan).stages()
    found = HopsEstimate(
        tuple(operator.name for operator in resolved.operators), resolved.hops,
        resolved.nodes.name, resolved.sizes, plan, temporary_bytes(stages),
    )  # fmt: skip
    return found, stages


def without_splits(contents: Contents, options: IngestOptions) -> IngestOptions:
    """For a source whose splits are not known yet: hops as if every node were in one."""
    asked = options.hops
    if asked is None or asked.rows == ALL or any(t.splits for t in contents.types):
        return options
    return replace(options, hops=replace(asked, rows="all", splits=()))
