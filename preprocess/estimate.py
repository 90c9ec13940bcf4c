"""How long an ingest will take: each stage as long as disk or processors need.  Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from preprocess.contents import Contents
from preprocess.disk import DiskRates
from preprocess.influence_plan import HALOS, HUBS, halo_batches
from preprocess.options import IngestOptions
from preprocess.plan import (
    COLUMNS_STAGE,
    COUNT,
    ORDER,
    PARTITION_STAGE,
    columns_fit,
    needs_columns,
    node_bytes,
    plan_memory,
    sort_stage,
)
from preprocess.result import StagePlan
from preprocess.stages.walk import STEPS

START_S = 1.0  # the interpreter, and compiled kernels being loaded


@dataclass(frozen=True, slots=True)
class ProcessorRates:
    """What four cores did on the machine of docs/results: assumed, not measured here."""

    counted_edges: float = 60e6  # edges a second, of one pass
    sorted_edges: float = 25e6  # into buckets, and sorted
    ordered_edges: float = 60e6  # breadth-first, columns at hand
    packed_edges: float = 60e6  # into blocks
    moved_bytes: float = 1.7e9  # bytes a second of rows, read and written
    partitioned_edges: float = 30e6  # in one pass of a partitioner, on one core
    gathered_bytes: float = 15e9  # of rows of neighbors, added up
    walked_edges: float = 60e6  # in one step of walks, a line of them on each core


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage to come."""

    name: str
    read_bytes: int
    written_bytes: int
    disk_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        """Reading goes on while edges and rows are worked on."""
        return max(self.disk_s, self.processor_s)

    @property
    def bound(self) -> str:
        """What limits it."""
        return "disk" if self.disk_s >= self.processor_s else "CPU"


def estimate_stages(
    contents: Contents,
    options: IngestOptions,
    stages: Sequence[StagePlan],
    disk: DiskRates,
    processor: ProcessorRates,
    gathered: Mapping[str, int] | None = None,
) -> tuple[StageEstimate, ...]:
    """Each stage of a plan; `gathered`: bytes of rows that are added up, by stage of hops."""
    edges_s = _edge_seconds(contents, options, processor)
    edges_s |= {name: size / processor.gathered_bytes for name, size in (gathered or {}).items()}
    return tuple(
        StageEstimate(
            s.name,
            s.read_bytes,
            s.written_bytes,
            s.read_bytes / disk.read + s.written_bytes / disk.write,
            edges_s.get(s.name, (s.read_bytes + s.written_bytes) / processor.moved_bytes),
        )
        for s in stages
    )


def _edge_seconds(
    contents: Contents, options: IngestOptions, processor: ProcessorRates
) -> dict[str, float]:
    """Of the processors, for each stage that works on edges."""
    stored = sum(r.most_edges for r in contents.relations)
    listed = sum(r.source.num_edges for r in contents.relations)
    found = {COUNT: listed / processor.counted_edges}
    if needs_columns(options):
        found[ORDER] = stored / processor.ordered_edges
        settings = options.partition
        if settings is not None:
            passes = settings.passes + 1 if settings.is_streamed else 1
            found[PARTITION_STAGE] = passes * stored / processor.partitioned_edges
            if settings.is_streamed:
                found[PARTITION_STAGE] += stored / processor.sorted_edges
        columns_s = stored / processor.sorted_edges
        if columns_fit(contents, plan_memory(contents, options).share):
            found[ORDER if settings is None else PARTITION_STAGE] += columns_s
        else:
            found[COLUMNS_STAGE] = columns_s
    found[HUBS] = STEPS * stored / processor.walked_edges
    share = plan_memory(contents, options).share
    batches = halo_batches(contents, options, share, node_bytes(options))
    found[HALOS] = (STEPS - 1) * batches * stored / processor.walked_edges
    for r in contents.relations:
        found[r.path] = r.most_edges / processor.sorted_edges
        if r.inline:
            found[sort_stage(r)] = r.most_edges / processor.sorted_edges
            found[r.path] = r.most_edges / processor.packed_edges
    return found
