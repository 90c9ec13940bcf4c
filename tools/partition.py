"""Partitioners side by side on one graph: `python -m tools.partition FOLDER --k 64 1024`.

A source is read and its columns are made as ingest does, without a store; then each partitioner
runs on them.  Prints a Markdown table, and a JSON line a run to `--out`: `tools.report` draws them.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from blockstore.errors import BudgetTooSmall
from blockstore.units import parse_bytes
from preprocess.contents import list_contents
from preprocess.errors import BadInput
from preprocess.graph import GraphStages
from preprocess.layouts import open_source
from preprocess.options import IngestOptions
from preprocess.partition import Partitioner, PartitionOptions
from preprocess.plan import plan_memory
from preprocess.progress import Progress
from preprocess.reverse import with_reverses
from preprocess.source import Source
from preprocess.stages.array_file import load_array
from preprocess.stages.classes import NodeClasses, source_classes
from preprocess.stages.columns import COLUMNS, DEGREES, ColumnFile
from preprocess.stages.partition import Partitioned, partition_nodes
from tools.command import append, byte_size, parse, stamped
from tools.report import partition_table

METHODS = get_args(Partitioner)


@dataclass(frozen=True)
class Options:
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
    source = with_reverses(source, options)
    contents = list_contents(source, options)
    share = plan_memory(contents, options).share
    stages = GraphStages(source, contents, options, share, work, progress)
    stages.count()
    stages.columns(in_memory=False)
    classes = source_classes(source, contents, {}, share, lambda _: None)
    with ColumnFile.reopen(work / COLUMNS, load_array(work / DEGREES, "uint32")) as columns:
        yield columns, classes, share


def as_line(graph: str, columns: ColumnFile, found: Partitioned, peak_bytes: int) -> dict[str, Any]:
    """What a run is, for a file of lines; `peak_bytes`: of memory, of all so far."""
    sizes = {"num_nodes": columns.degrees.size, "num_edges": columns.num_edges}
    return stamped(
        "partition", graph=graph, **sizes, **msgspec.to_builtins(found.report),
        pass_s=found.pass_s, pass_edges=found.pass_edges, pass_cpu_s=found.pass_cpu_s,
        peak_bytes=peak_bytes,
    )  # fmt: skip


def compare(
    source: Source,
    options: IngestOptions,
    settings: list[PartitionOptions],
    folder: Path,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """A line for each of `settings`; what cannot run here has "skipped"."""
    name = Path(source.where).name
    options = replace(options, partition=settings[0])
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="partition-") as work,
        made_columns(source, options, Path(work), progress) as (columns, classes, share),
    ):
        for each in settings:
            try:
                found = partition_nodes(
                    columns, classes, each, options.seed, share, Path(work), progress
                )
            except (BadInput, BudgetTooSmall) as error:
                yield {"bench": "partition", "graph": name, **asdict(each), "skipped": str(error)}
            else:
                yield as_line(name, columns, found, progress.peak_bytes)


def main(words: list[str]) -> list[dict[str, Any]]:
    given = parse(Options, words, __doc__, "tools.partition")
    source = open_source(given.folder, None).source
    options = IngestOptions(mem_bytes=parse_bytes(given.mem), undirected=given.undirected)
    settings = [
        PartitionOptions(k, method, passes=given.passes, soften=given.soften, deviations=deviations)
        for k in given.k
        for method in given.methods
        for deviations in (given.deviations if method == "gap" else given.deviations[:1])
    ]
    lines = []
    for line in compare(source, options, settings, given.work, Progress()):
        lines.append(line)
        append([line], given.out)
    print(partition_table([line for line in lines if "skipped" not in line]))
    for line in lines:
        if "skipped" in line:
            print(f"{line['method']}, {line['num_partitions']}: {line['skipped']}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
