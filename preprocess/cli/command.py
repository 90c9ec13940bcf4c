"""`blockstore ingest` once its words are read: dry run or real one, for a person or a script."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from preprocess.cli.dryrun import dry_run, dry_run_text
from preprocess.cli.report import made_line, summarise_ingest, summary_text
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.prepare import Preparable
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Events
from preprocess.sources.layouts import Opened, open_source


@dataclass(frozen=True, slots=True)
class IngestRequest:
    """What the command was asked for."""

    source: Path
    store: Path
    options: IngestOptions
    undirected: bool | None  # None: as the source's owner does
    layout: str | None  # None: as recognised
    fresh: bool = False
    summary: bool = True
    json: bool = False


def run_ingest(request: IngestRequest) -> None:
    """Make the store; stdout has events, or what was made.  Raises what `ingest` does."""
    rendering = Events(sys.stdout) if request.json else None
    progress = Progress(rendering=rendering)
    opened, options = _open(request, progress)
    source = opened.source
    result = ingest(source, request.store, options, progress, request.fresh, files=opened.files)
    summary = None
    if request.summary:
        summary = summarise_ingest(source, request.store, result, progress)
    if rendering is not None:
        facts = {"store": str(request.store), "fingerprint": result.manifest.fingerprint}
        rendering.emit("end", {**facts, "summary": msgspec.to_builtins(summary)})
        return
    _say(made_line(request.store, result.manifest))
    if summary is not None:
        _say(summary_text(summary))


def run_dry(request: IngestRequest) -> None:
    """Say what it would take: a page, or one JSON object.  Raises what `dry_run` does."""
    progress = Progress(rendering=Events(sys.stderr) if request.json else None)
    (source, *_), options = _open(request, progress)
    found = dry_run(source, request.store, options, isinstance(source, Preparable))
    _say(msgspec.json.encode(found).decode() if request.json else dry_run_text(found, options))


def error_event(message: str) -> None:
    """The last event of a run that failed."""
    Events(sys.stdout).emit("error", {"message": message})


def _open(request: IngestRequest, progress: Progress) -> tuple[Opened, IngestOptions]:
    opened = open_source(request.source, request.layout)
    source = opened.source
    progress.line(f"{request.source}: {source.layout}, {opened.saw}")
    undirected = request.undirected
    if undirected is None:
        undirected = source.undirected
        if undirected:
            progress.line("reverses are added, as its owner does: --directed leaves them out")
    return opened, replace(request.options, undirected=undirected)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
