"""The `blockstore` command: stores are made, added to, divided, looked at, checked, exported."""

import shutil
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from blockstore import __version__
from blockstore.errors import StoreError
from blockstore.flags import OneLineErrors, command_group, run_app
from blockstore.format import FORMAT_VERSION
from blockstore.io.files import FULL
from blockstore.make_part import make_part, part_bytes, plan_part
from blockstore.objects.bucket import WAIT_S, parse_url
from blockstore.owners import list_owners, read_facts, remove_owners
from blockstore.store import open_store
from blockstore.units import format_bytes
from blockstore.verify import verify_store
from loaderd.api.errors import DaemonError
from preprocess.cli import flags
from preprocess.cli.command import (
    check_stripe,
    place_for,
    run_dry,
    run_ingest,
    run_pull,
    run_push,
    run_stripe,
)
from preprocess.cli.info import info_text, owner_line, owner_lines, store_info
from preprocess.cli.lookup import lookup as find_nodes
from preprocess.cli.summary import graph_text, made_line, summarise
from preprocess.cli.warm import warm as warm_kernels
from preprocess.derive.derive import derive as derive_features
from preprocess.derive.plan import Derivation
from preprocess.errors import BadInput, ExecutorLost
from preprocess.export.export import export as export_store
from preprocess.hops.hops import make_hops
from preprocess.ingest.options import HopsRequest, IngestOptions, StoreSettings, read_size
from preprocess.packs.command import pack_lines, run_pack, verify_packs
from preprocess.partition.owners import make_owners
from preprocess.partition.partition import PartitionOptions
from preprocess.partition.repartition import repartition as repartition_store
from preprocess.partition.report import partition_lines
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.renderings import Events
from preprocess.sources.generate import GraphRecipe
from preprocess.sources.generate import generate as generate_graph
from preprocess.sources.propose import propose


class StoreCommands(OneLineErrors):
    expected = StoreError, DaemonError, BadInput, ExecutorLost, OSError

    @classmethod
    def line(cls, error: Exception) -> str:
        if not isinstance(error, OSError):
            return super().line(error)
        said = f"{error.filename or 'writing'}: {error.strerror}, expected to read or write there"
        return f"{said}; free some space, or choose another disk" if error.errno in FULL else said


app = command_group(
    StoreCommands, "Make, look at and check stores of graphs.",
    f"blockstore {__version__}, store format {FORMAT_VERSION}",
)  # fmt: skip


def _last_event(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command that prints events: an error becomes its last event, too."""

    @wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**given)
        except StoreCommands.expected as error:
            if given["json"]:
                Events(sys.stdout).emit("error", {"message": StoreCommands.line(error)})
            raise

    return run


@app.command(cls=flags.Panels)
@flags.grouped
def generate(folder: Path, graph: GraphRecipe) -> None:
    """Generate a labelled power-law graph in the plain layout, streamed to disk."""
    generate_graph(folder, graph, Progress())


@app.command(cls=flags.Panels)
@_last_event
@flags.grouped
def ingest(
    source: Path,
    store: Path,
    of_source: flags.SourceFlags,
    of_store: StoreSettings,
    in_parts: flags.IngestPartitions,
    copied: flags.CopyFlags,
    propagated: flags.IngestHops,
    show: flags.ShowFlags,
    resources: flags.IngestWork,
) -> None:
    """Make a store from a graph in any layout that is known, within --mem; STORE may be a URL.

    Duplicate edges and self-loops are kept unless told otherwise.  --undirected adds the reverse of
    each edge and drops duplicates; an added edge has id E + original, of duplicates the smallest
    id stays.
    """
    options = IngestOptions(
        **of_source.options(), **vars(of_store), mem_bytes=resources.mem_bytes,
        partition=in_parts if in_parts.num_partitions else None,
        influence=copied.influence(), hops=propagated.asked(of_store.seed),
    )  # fmt: skip
    url = parse_url(str(store))
    local = place_for(url, resources.work) if url else store
    check_stripe(store, bool(url), resources.stripe)
    if show.dry_run:
        run_dry(source, local, options, of_source, show.json, bool(resources.ray))
        return
    run_ingest(source, local, options, of_source, show, resources)
    if url:
        said = run_push(local, url, WAIT_S)
        if not show.json:
            typer.echo(said)
        shutil.rmtree(local)
    elif resources.stripe:
        said = run_stripe(store, resources.stripe, gather=False)
        if not show.json:
            typer.echo(said)


@app.command()
def schema(folder: Path) -> None:
    """Propose a schema for a folder of CSV or Parquet tables, as JSON, to be read and corrected.

    blockstore schema FOLDER > FOLDER/schema.json: ingest finds it there.
    """
    proposed, notes = propose(folder)
    typer.echo(msgspec.json.format(msgspec.json.encode(proposed), indent=2).decode())
    for note in notes:
        typer.echo(note, err=True)


@app.command(cls=flags.Panels)
@flags.grouped
def derive(store: Path, features: Derivation, mem: flags.Mem = "2G") -> None:
    """Give a type features that are the mean, sum or maximum of its neighbors', within --mem.

    Sums are made in float32, in the order of the store's ids: --mem changes no byte.  Nodes without
    neighbors get zeros.  The store gets another fingerprint; processes that have it open keep
    seeing the old version.
    """
    result = derive_features(store, features, Progress(), read_size(mem))
    typer.echo(result.text(store, features.op))


@app.command(cls=flags.Panels)
@flags.grouped
def repartition(
    store: Path,
    new: Path,
    in_parts: PartitionOptions,
    copied: flags.CopyFlags,
    resources: flags.IngestResources,
    seed: Annotated[int, typer.Option(help="of a random partition")] = 0,
) -> None:
    """Write a store again, its nodes partition by partition; ids of nodes and edges stay."""
    whole = open_store(store)
    whole.check_whole("blockstore repartition")
    result = repartition_store(
        whole, new, in_parts, Progress(),
        resources.mem_bytes, copied.influence(), seed, resources.fresh,
    )  # fmt: skip
    typer.echo(made_line(new, result.manifest))
    assert result.manifest.partitioning is not None
    for line in partition_lines(result.manifest.partitioning):
        typer.echo(f"  {line}")


@app.command(cls=flags.Panels)
@flags.grouped
def hops(store: Path, propagated: HopsRequest, resources: flags.IngestResources) -> None:
    """Propagate features: B X, B B X, ... for each operator B, beside X, within --mem.

    sym and row are the normalised adjacency, ppr and heat its diffusions (personalised PageRank,
    heat kernel).  Rows stand in one seeded random order per split.  --mem changes no byte.
    """
    result = make_hops(
        store, propagated, Progress(), resources.mem_bytes, fresh=resources.fresh
    )  # fmt: skip
    typer.echo(result.text(store))


@app.command(cls=flags.Panels)
@_last_event
@flags.grouped
def pack(
    store: Path,
    of_epochs: flags.PackFlags,
    sampling: flags.PackedSampling,
    show: flags.PackShow,
    resources: flags.IngestResources,
) -> None:
    """Sample epochs ahead of training, and write what their batches want, within --mem.

    Sessions of the same parameters find the pack beside the store, and read it in order: the same
    batches, with little memory.  Other epochs and other sessions are served as ever.
    """
    run_pack(store, of_epochs, sampling, show, resources)


@app.command(cls=flags.Panels)
@flags.grouped
def owners(
    store: Path,
    how: flags.OwnerFlags,
    counts: Annotated[
        Path | None, typer.Argument(help="of `loaderd presample`; else edges count alike")
    ] = None,
    mem: flags.Mem = "2G",
) -> None:
    """Make a map of which trainer owns which node, within --mem; remove one; or list them.

    The store keeps its fingerprint.  Adding arrays to it changes that: then make maps again.
    """
    opened = open_store(store)
    if how.remove:
        remove_owners(opened, how.remove)
    elif how.name:
        made = make_owners(opened, counts, how, Progress(), read_size(mem))
        typer.echo(f"{store}: {owner_line(made.name, made.owners, made.facts)}")
    else:
        typer.echo("\n".join(owner_lines(opened)) or f"{store}: no owner maps")


@app.command()
def part(
    store: Path,
    target: Path,
    owners: Annotated[str, typer.Option(help="the owner map that says who has what")],
    server: Annotated[int, typer.Option(help="whose part it is, from 0")],
) -> None:
    """Write what one of several servers serves: the graph, and of the features its own rows.

    Blocks of features without rows of its own are holes.  Ids, splits and labels are all there,
    propagated features and packed epochs are not.
    """
    opened = open_store(store)
    plan = plan_part(opened, owners, server)
    with Progress().stage("copy blocks", part_bytes(opened, plan), "B") as stage:
        make_part(opened, target, plan, stage.advance)
    typer.echo(f"{target}: {plan}")


@app.command()
def stripe(
    store: Path,
    folders: Annotated[
        list[Path] | None, typer.Argument(help="one on each disk; made if need be")
    ] = None,
    gather: Annotated[bool, typer.Option("--gather", help="bring all blocks back")] = False,
) -> None:
    """Deal the blocks of a store over folders on several disks, which are then read at once.

    The store keeps its fingerprint, and batches stay the same.  A store that is dealt already is
    dealt again.  Stopped or killed, the store is as it was: the same command does it from scratch.
    """
    typer.echo(run_stripe(store, folders or [], gather))


@app.command()
def push(store: Path, url: str, wait: flags.ObjectWait = WAIT_S) -> None:
    """Write a store to object storage: s3://BUCKET/NAME, gs://, az://.

    Stopped or killed, the same command goes on: objects that are there stay.  Nobody sees the store
    before its last object, the manifest.  Owner maps and packed epochs stay where they are.
    """
    typer.echo(run_push(store, url, wait))


@app.command()
def pull(url: str, store: Path, wait: flags.ObjectWait = WAIT_S) -> None:
    """Bring a store from object storage to a folder; every page is verified.

    Stopped or killed, the same command goes on: pages that are there stay.  The folder appears when
    all of it is there.
    """
    typer.echo(run_pull(url, store, wait))


@app.command()
def info(
    store: Path,
    summary: Annotated[
        bool, typer.Option("--summary", help="degrees, isolated nodes, labels: reads the graph")
    ] = False,
    json: flags.Json = False,
) -> None:
    """Say what a store holds."""
    opened = open_store(store)
    found = summarise(opened, Progress()) if summary else None
    if json:
        facts = store_info(opened)
        maps = {name: read_facts(opened, name) for name in list_owners(opened)}
        facts["owners"] = msgspec.to_builtins(maps)
        if found is not None:
            facts["summary"] = msgspec.to_builtins(found)
        typer.echo(msgspec.json.encode(facts).decode())
        return
    typer.echo("\n".join([info_text(opened), *owner_lines(opened), *pack_lines(opened.path)]))
    if found is not None:
        typer.echo(graph_text(found))


@app.command()
def lookup(
    store: Path,
    ids: Annotated[list[str], typer.Argument(help="as the tables had them that were ingested")],
    node_type: Annotated[str, typer.Option("--type", help="of nodes; else all are looked at")] = "",
    back: Annotated[bool, typer.Option("--back", help="IDS are numbers of nodes")] = False,
) -> None:
    """Say which numbers nodes have that their owner calls so: a line of type, id and number each.

    These numbers are the ids that loaders take and batches give.
    """
    lines, missing = find_nodes(open_store(store), ids, node_type, back)
    for line in lines:
        typer.echo(line)
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise BadInput.at(
            store, f"no node {missing[0]!r}{more}", "ids of its nodes", "correct them"
        )


@app.command()
def warm() -> None:
    """Compile the kernels of ingest, daemon and trainers now, so that nobody waits for them later.

    They are kept for this user and this version; small graphs are sampled from for a minute or two.
    """
    typer.echo(f"{warm_kernels(Progress())}: compiled kernels are there")


@app.command()
def verify(store: Path) -> None:
    """Check every checksum and every cross-reference of a store, and checksums of its packs."""
    report = verify_store(store)
    whole = "" if not report.part else f", {report.part}: of features what is here"
    typer.echo(
        f"{store}: good{whole}: {report.blocks:,} blocks, {report.pages:,} pages, "
        f"{report.nodes:,} nodes, {report.edges:,} edges, {format_bytes(report.bytes)} read"
    )
    if report.stripes:
        typer.echo(f"{store}: {report.stripes}")
    for name in report.strays:
        typer.echo(f"{store / name}: not a file of the store, and nothing reads it")
    for name in report.foreign_maps:
        typer.echo(
            f"{store}: owner map {name}: of another store, or of this one before it was "
            "changed: no session can use it; remove it, and make it again"
        )
    for folder, num_bytes in verify_packs(store):
        typer.echo(f"{folder}: good: {format_bytes(num_bytes)} read")


@app.command()
def export(store: Path, folder: Path, mem: flags.Mem = "1G") -> None:
    """Write a store back as a folder in a plain layout: of one type, or of several.

    Edges come out in the source's order where the store has edge ids, else sorted by target.
    """
    whole = open_store(store)
    whole.check_whole("blockstore export")
    export_store(whole, folder, Progress(), read_size(mem))


def main() -> None:
    """Entry point of the console command."""
    signal.signal(signal.SIGTERM, _stop)
    run_app(app, "blockstore")


def _stop(number: int, _: object) -> None:
    """Turn a signal into an exception, so that unfinished work is removed."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
