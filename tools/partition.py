"""Partitioners side by side on one graph: `python -m tools.partition FOLDER --k 64 1024`.

A source is read and its columns are made as ingest does, without a store; then each partitioner
runs on them.  Prints a Markdown table, and a JSON line a run to `--out`.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from blockstore.errors import BudgetTooSmall
from blockstore.units import parse_bytes
from preprocess.errors import BadInput
from preprocess.files.array_file import load_array
from preprocess.ingest.contents import list_contents
from preprocess.ingest.graph import GraphStages
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.plan import IngestJob, plan_memory
from preprocess.partition.partition import Partitioner, PartitionOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.layouts import open_source
from preprocess.sources.source import Source
from preprocess.stages.classes import NodeClasses, source_classes
from preprocess.stages.columns import COLUMNS, DEGREES, ColumnFile
from preprocess.stages.partition import partition_nodes
from tools.command import append, byte_size, parse, stamped, table

METHODS = get_args(Partitioner)


@dataclass(frozen=True)
class PartitionerOptions:
    folder: Path
    k: tuple[int, ...] = (64,)
    methods: tuple[Partitioner, ...] = METHODS
    passes: int = 5
    soften: float = 50.0
    deviations: tuple[float, ...] = (2.0,)
    mem: Annotated[str, byte_size] = "8G"
    undirected: bool = False
    work: Annotated[Path, "for columns on disk"] = Path(tempfile.gettempdir())
    out: Annotated[Path | None, "append a line of JSON for each run"] = None


@contextmanager
def made_columns(
    source: Source, options: IngestOptions, work: Path, progress: Progress
) -> Iterator[tuple[ColumnFile, NodeClasses, int]]:
    """(columns on disk by source id, classes of nodes, bytes of memory for what follows)."""
    source = source.with_reverses(options.undirected)
    contents = list_contents(source, options)
    job = IngestJob(source, contents, options, plan_memory(contents, options), False)
    stages, share = GraphStages(job, work, progress), job.share
    stages.count()
    stages.columns(in_memory=False)
    classes = source_classes(source, contents, {}, share, lambda _: None)
    with ColumnFile.reopen(work / COLUMNS, load_array(work / DEGREES, "uint32")) as columns:
        yield columns, classes, share


def compare(
    source: Source, options: IngestOptions, settings: list[PartitionOptions], folder: Path
) -> Iterator[dict[str, Any]]:
    """A line for each of `settings`; what cannot run here has "skipped"."""
    graph, progress = Path(source.where).name, Progress()
    options = replace(options, partition=settings[0])
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="partition-") as work,
        made_columns(source, options, Path(work), progress) as (columns, classes, share),
    ):
        for each in settings:
            line = {"graph": graph, "method": each.method, "num_partitions": each.num_partitions}
            try:
                found = partition_nodes(
                    columns, classes, each, options.seed, share, Path(work), progress
                )
            except (BadInput, BudgetTooSmall) as error:
                yield stamped("partition", **line, skipped=str(error))
                continue
            line |= msgspec.to_builtins(found.report)
            yield stamped(
                "partition", **line, num_nodes=columns.degrees.size, num_edges=columns.num_edges,
                pass_s=found.pass_s, pass_edges=found.pass_edges, pass_cpu_s=found.pass_cpu_s,
                peak_bytes=progress.peak_bytes,
            )  # fmt: skip


def as_table(lines: list[dict[str, Any]]) -> str:
    """A row for each partition, against METIS on the same graph if there is a line of it."""
    metis = {x["num_partitions"]: x for x in lines if x["method"] == "metis"}
    rows = [[
        "graph, k", "partitioner", "cut", "kept at 1/8 (of METIS)", "at 1/16",
        "label KL, mean, max", "of random", "largest, training", "M edges/s a pass (CPU)",
    ]]  # fmt: skip
    for x in lines:
        peer, cpu = metis.get(x["num_partitions"]), x["pass_cpu_s"]
        share = f" ({x['kept_8'] / peer['kept_8']:.3f})" if peer else ""
        rows.append([
            f"{x['graph']}, {x['num_partitions']}", x["method"], f"{x['cut']:.3f}",
            f"{x['kept_8']:.3f}{share}", f"{x['kept_16']:.3f}",
            f"{x['kl_mean']:.3g}, {x['kl_max']:.3g}" if x["kl_random"] else "",
            f"{x['kl_mean'] / x['kl_random']:.2f}" if x["kl_random"] else "",
            f"{x['node_balance']:.3f}, {x['train_balance']:.3f}",
            f"{x['pass_edges'] / x['pass_s'] / 1e6:.0f} ({x['pass_edges'] / cpu / 1e6:.0f})"
            if cpu else "",
        ])  # fmt: skip
    return table(rows)


def main(words: list[str]) -> list[dict[str, Any]]:
    given = parse(PartitionerOptions, words)
    source = open_source(given.folder, None).source
    options = IngestOptions(mem_bytes=parse_bytes(given.mem), undirected=given.undirected)
    settings = [
        PartitionOptions(k, method, passes=given.passes, soften=given.soften, deviations=deviations)
        for k in given.k
        for method in given.methods
        for deviations in (given.deviations if method == "gap" else given.deviations[:1])
    ]
    lines = []
    for line in compare(source, options, settings, given.work):
        lines.append(line)
        append([line], given.out)
    print(as_table([line for line in lines if "skipped" not in line]))
    for line in lines:
        if "skipped" in line:
            print(f"{line['method']}, {line['num_partitions']}: {line['skipped']}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
