"""`blockstore ingest` once its words are read: dry run or real one, for a person or a script."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec

from preprocess.cli.dryrun import dry_run, dry_run_text
from preprocess.cli.flags import IngestWork, ShowFlags, SourceFlags
from preprocess.cli.report import advice_lines, made_line, summarise_ingest, summary_text
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.prepare import Preparable
from preprocess.pipeline.on_ray import ray_executor
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Events, write_line
from preprocess.pipeline.tasks import Executor
from preprocess.sources.layouts import Opened, open_source


def run_ingest(
    source: Path,
    store: Path,
    options: IngestOptions,
    of_source: SourceFlags,
    show: ShowFlags,
    resources: IngestWork,
) -> None:
    """Make the store; stdout has events, or what was made.  Raises what `ingest` does."""
    rendering = Events(sys.stdout) if show.json else None
    progress = Progress(rendering=rendering)
    opened, options = _open(source, options, of_source, progress)
    with _executor(resources.ray, options.mem_bytes) as executor:
        result = ingest(
            opened.source, store, options, progress, resources.fresh, files=opened.files,
            executor=executor,
        )  # fmt: skip
    for line in advice_lines(result.manifest):
        progress.line(line)
    summary = None
    if show.summary:
        summary = summarise_ingest(opened.source, store, result, progress)
    if rendering is not None:
        facts = {"store": str(store), "fingerprint": result.manifest.fingerprint}
        rendering.emit("end", {**facts, "summary": msgspec.to_builtins(summary)})
        return
    write_line(sys.stdout, made_line(store, result.manifest))
    if summary is not None:
        write_line(sys.stdout, summary_text(summary))


def run_dry(
    source: Path,
    store: Path,
    options: IngestOptions,
    of_source: SourceFlags,
    json: bool,
    spread: bool,
) -> None:
    """Say what it would take: a page, or one JSON object.  Raises what `dry_run` does."""
    progress = Progress(rendering=Events(sys.stderr) if json else None)
    (graph, *_), options = _open(source, options, of_source, progress)
    found = dry_run(graph, store, options, isinstance(graph, Preparable), spread)
    write_line(sys.stdout, msgspec.json.encode(found).decode() if json else dry_run_text(found))


def error_event(message: str) -> None:
    """The last event of a run that failed."""
    Events(sys.stdout).emit("error", {"message": message})


def _executor(ray: str, mem_bytes: int) -> AbstractContextManager[Executor | None]:
    """Of tasks, where one is asked for."""
    return ray_executor(ray, mem_bytes) if ray else nullcontext()


def _open(
    path: Path, options: IngestOptions, of_source: SourceFlags, progress: Progress
) -> tuple[Opened, IngestOptions]:
    """The source, and the options with what its owner does unless it is told otherwise."""
    opened = open_source(path, of_source.layout or None)
    progress.line(f"{path}: {opened.source.layout}, {opened.saw}")
    undirected = of_source.undirected
    if undirected is None:
        undirected = opened.source.undirected
        if undirected:
            progress.line("reverses are added, as its owner does: --directed leaves them out")
    return opened, replace(options, undirected=undirected)
