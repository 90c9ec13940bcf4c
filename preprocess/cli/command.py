"""Commands after their options are parsed: ingest and its dry run, push, pull and stripe."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec

from blockstore.format import PAGE_BYTES, blocked_arrays
from blockstore.make_stripes import check_folders, deal_store
from blockstore.objects.bucket import parse_url
from blockstore.objects.push import pull, push, store_bytes
from blockstore.objects.remote import store_name
from blockstore.store import open_store
from preprocess.cli.dryrun import dry_run, dry_run_text
from preprocess.cli.flags import IngestWork, ShowFlags, SourceFlags
from preprocess.cli.summary import advice_lines, made_line, summarise_ingest, summary_text
from preprocess.errors import BadInput
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.prepare import Preparable
from preprocess.pipeline.on_ray import ray_executor
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Events, write_line
from preprocess.sources.layouts import Opened, open_source


def run_ingest(
    source: Path,
    store: Path,
    options: IngestOptions,
    of_source: SourceFlags,
    show: ShowFlags,
    resources: IngestWork,
) -> None:
    """Make the store; prints events, or a summary, to stdout.  Raises what `ingest` does."""
    rendering = Events(sys.stdout) if show.json else None
    progress = Progress(rendering=rendering)
    opened, options = _open(source, options, of_source, progress)
    spread = ray_executor(resources.ray, options.mem_bytes) if resources.ray else nullcontext()
    with spread as executor:
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
    """Print the estimated cost, as text or one JSON object.  Raises what `dry_run` does."""
    progress = Progress(rendering=Events(sys.stderr) if json else None)
    (graph, *_), options = _open(source, options, of_source, progress)
    found = dry_run(graph, store, options, isinstance(graph, Preparable), spread)
    write_line(sys.stdout, msgspec.json.encode(found).decode() if json else dry_run_text(found))


def _open(
    path: Path, options: IngestOptions, of_source: SourceFlags, progress: Progress
) -> tuple[Opened, IngestOptions]:
    """The source, and the options with the defaults of the source's layout."""
    opened = open_source(path, of_source.layout or None)
    progress.line(f"{path}: {opened.source.layout}, {opened.saw}")
    undirected = of_source.undirected
    if undirected is None:
        undirected = opened.source.undirected
        if undirected:
            progress.line("reverses are added, as its owner does: --directed leaves them out")
    return opened, replace(options, undirected=undirected)


def run_push(path: Path, url: str, wait_s: float) -> str:
    """Push a store; returns a summary.  Raises BadInput: no URL; and what `push` does."""
    place, store = _url(url), open_store(path)
    with Progress().stage("push", store_bytes(store), "B") as stage:
        fingerprint = push(store, place, wait_s, stage.advance)
    return f"{place}: pushed, fingerprint {fingerprint}"


def check_stripe(store: Path, is_url: bool, folders: list[Path] | None) -> None:
    """Check folders before an ingest takes hours.  Raises BadInput, StoreError: unusable."""
    if folders:
        if is_url:
            raise BadInput.at(
                "--stripe", "a URL as the store", "a folder", "leave --stripe out, or give a folder"
            )
        check_folders(folders, store)


def run_stripe(path: Path, folders: list[Path], gather: bool) -> str:
    """Stripe a store, or undo it; returns a summary.  Raises BadInput; what `deal_store` does."""
    if gather == bool(folders):
        found = "--gather and folders" if gather else "no folders"
        raise BadInput.at(
            path, found, "folders on the disks, or --gather", "say where the blocks are to be"
        )
    store = open_store(path)
    total = sum(g.num_pages for _, g, _ in blocked_arrays(store.manifest)) * PAGE_BYTES
    with Progress().stage("deal blocks", total, "B") as stage:
        store = deal_store(path, folders, stage.advance)
    return f"{path}: {store.stripes or 'blocks are in it'}"


def run_pull(url: str, target: Path, wait_s: float) -> str:
    """Pull a store; returns a summary.  Raises BadInput: no URL; and what `pull` does."""
    place = _url(url)
    store = pull(place, target, wait_s, lambda total: Progress().stage("pull", total, "B"))
    return f"{target}: pulled, fingerprint {store.manifest.fingerprint}"


def place_for(url: str, work: Path | None) -> Path:
    """The local folder in which to make a store that will be pushed.  Raises BadInput."""
    if work is None:
        raise BadInput.at(
            url, "no --work", "a folder of this machine beside a URL",
            "name one with room for the store, such as --work /scratch",
        )  # fmt: skip
    local = work / store_name(url)
    if os.path.lexists(local):
        raise BadInput.at(
            "--work", f"{local}, which is there already", "no such folder",
            f"if it is the store of a run that was stopped: blockstore push {local} {url}",
        )  # fmt: skip
    return local


def _url(text: str) -> str:
    if not (found := parse_url(text)):
        raise BadInput.at(text, "a path", "a URL such as s3://BUCKET/NAME", "name the bucket")
    return found
