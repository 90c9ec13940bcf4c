"""The `blockstore` command: generate, ingest, derive, hops, info, verify, export."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from blockstore.errors import StoreError
from blockstore.io.files import FULL
from blockstore.store import open_store
from blockstore.units import format_bytes, parse_bytes
from blockstore.verify import verify_store
from preprocess import flags
from preprocess.command import IngestRequest, error_event, run_dry, run_ingest
from preprocess.derive.derive import derive as derive_features
from preprocess.derive.plan import Derivation, Op
from preprocess.errors import BadInput
from preprocess.export.export import export as export_store
from preprocess.generate import GraphRecipe
from preprocess.generate import generate as generate_graph
from preprocess.hops.hops import make_hops
from preprocess.influence import InfluenceOptions, parse_hubs
from preprocess.info import info_text, store_info
from preprocess.options import (
    FeatureDtype,
    HopsRequest,
    IngestOptions,
    OperatorKind,
)
from preprocess.partition import PartitionOptions
from preprocess.partition_report import partition_lines
from preprocess.progress import Progress
from preprocess.repartition import repartition as repartition_store
from preprocess.report import graph_text, made_line
from preprocess.summary import summarise

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, for logs too
    help="Make, look at and check stores of graphs.",
)


@contextmanager
def _one_line_errors(events: bool = False) -> Iterator[None]:
    """What can go wrong is said in one line, with exit code 2; as the last event too."""
    try:
        yield
    except (StoreError, BadInput, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            place = error.filename or "writing"
            text = f"{place}: {error.strerror}, expected to read or write there"
            if error.errno in FULL:
                text += "; free some space, or choose another disk"
        message = " ".join(text.split())
        if events:
            error_event(message)
        sys.stderr.write(f"error: {message}\n")
        raise typer.Exit(2) from error


def _size(text: str) -> int:
    """A size as people write it, for options.  Raises BadInput."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _shares(text: str) -> tuple[float, ...]:
    """Numbers between commas, for options.  Raises BadInput."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise BadInput(f"--split {text!r}: expected shares such as 0.6,0.2,0.2") from error


def _operators(found: list[flags.Operator] | None) -> tuple[OperatorKind, ...]:
    """Those of hops, `sym` if none are given."""
    return tuple(operator.value for operator in found or [flags.Operator.sym])


@app.command()
def generate(
    folder: Path,
    nodes: Annotated[int, typer.Option(help="number of nodes")] = 100_000,
    degree: Annotated[int, typer.Option(help="average in-degree; edges go both ways")] = 16,
    features: Annotated[int, typer.Option(help="float32 features a node")] = 64,
    classes: Annotated[int, typer.Option(help="number of classes")] = 8,
    train: Annotated[float, typer.Option(help="share of nodes to train on")] = 0.1,
    valid: Annotated[float, typer.Option(help="share of nodes to validate on")] = 0.05,
    test: Annotated[float, typer.Option(help="share of nodes to test on")] = 0.1,
    seed: Annotated[int, typer.Option(help="the same seed gives the same graph")] = 0,
    noise: Annotated[float, typer.Option(help="of the features; more is harder")] = 1.0,
) -> None:
    """Generate a labelled power-law graph in the plain layout, streamed to disk."""
    recipe = GraphRecipe(nodes, degree, features, classes, train, valid, test, seed, noise)
    with _one_line_errors():
        generate_graph(folder, recipe, Progress())


@app.command()
def ingest(
    source: Path,
    store: Path,
    mem: flags.Mem = "2G",
    layout: flags.Layout = "",
    undirected: flags.Undirected = None,
    dtype: flags.StoredDtype = "float32",
    block_size: flags.BlockSize = "1M",
    edge_ids: flags.EdgeIds = False,
    order: flags.Order = "bfs",
    duplicates: flags.Duplicates = "keep",
    self_loops: flags.SelfLoops = "keep",
    allow_nan: flags.AllowNan = False,
    ids: flags.IdWidth = "auto",
    seed: flags.IngestSeed = 0,
    split: flags.Shares = "",
    partitions: flags.Partitions = 0,
    partitioner: flags.PartitionerOption = "gap",
    slack: flags.Slack = 1.1,
    gamma: flags.Gamma = 1.5,
    passes: flags.Passes = 5,
    alpha: flags.Alpha = 1.0,
    soften: flags.Soften = 50.0,
    deviations: flags.Deviations = 2.0,
    relative: flags.Relative = True,
    visit: flags.VisitOption = "degree",
    neighbors: flags.NeighborsOption = "auto",
    hubs: flags.Hubs = "",
    hub_score: flags.HubScoreOption = "walk",
    halo: flags.Halo = 0.0,
    hops: flags.HopsAtOnce = 0,
    operator: flags.Operators = None,
    hop_loops: flags.HopLoops = True,
    node_type: flags.HopType = "",
    feature: flags.HopFeature = "",
    relation: flags.HopRelation = "",
    rows: flags.HopRowsOption = "labelled",
    hop_alpha: flags.HopAlpha = 0.1,
    t: flags.HopTime = 3.0,
    weighted: flags.HopWeighted = False,
    fresh: flags.Fresh = False,
    dry_run: flags.DryRun = False,
    summary: flags.Summary = True,
    json: flags.Events = False,
) -> None:
    """Make a store from a graph in any layout that is known, within --mem.

    Duplicate edges and self-loops are kept unless told otherwise.  --undirected adds the reverse of
    each edge and drops duplicates; an added edge has id E + original, of duplicates the smallest
    id stays.
    """
    with _one_line_errors(events=json):
        found = PartitionOptions(
            partitions, partitioner, slack, gamma, passes, alpha, soften, relative,
            deviations, visit, neighbors,
        )  # fmt: skip
        if operator and not hops:
            raise BadInput.at("--operator", "no --hops", "how often to apply it", "say --hops 2")
        asked = HopsRequest(
            _operators(operator), hops, hop_loops, node_type, feature, relation, rows, seed=seed,
            alpha=hop_alpha, t=t, weighted=weighted,
        )  # fmt: skip
        options = IngestOptions(
            mem_bytes=_size(mem), block_bytes=_size(block_size), dtype=dtype, edge_ids=edge_ids,
            order=order, duplicates=duplicates, self_loops=self_loops, ids=ids,
            allow_nan=allow_nan, seed=seed, split=_shares(split),
            partition=found if partitions else None,
            influence=InfluenceOptions(*parse_hubs(hubs), hub_score, halo),
            hops=asked if hops else None,
        )  # fmt: skip
        request = IngestRequest(
            source, store, options, undirected, layout or None, fresh, summary, json
        )
        (run_dry if dry_run else run_ingest)(request)


@app.command()
def derive(
    store: Path,
    node_type: Annotated[str, typer.Option("--type", help="of the nodes that get features")],
    origin: Annotated[str, typer.Option("--from", help="type whose features are taken")],
    relation: Annotated[str, typer.Option(help="between them: its name, or src-name-dst")],
    op: Annotated[Op, typer.Option(help="over the rows of a node's neighbors")] = "mean",
    name: Annotated[str, typer.Option(help="of the new array")] = "x",
    feature: Annotated[
        str, typer.Option(help="which of several features", show_default=False)
    ] = "",
    dtype: Annotated[
        FeatureDtype | None, typer.Option(help="of the new array; else as the origin's")
    ] = None,
    mem: flags.Mem = "2G",
) -> None:
    """Give a type features that are the mean, sum or maximum of its neighbors', within --mem.

    Sums are made in float32, in the order of the store's ids: --mem changes no byte.  Nodes without
    neighbors get zeros.  The store gets another fingerprint; who has it open sees what it had.
    """
    with _one_line_errors():
        asked = Derivation(node_type, origin, relation, op, name, feature, dtype)
        result = derive_features(store, asked, Progress(), _size(mem))
        typer.echo(result.text(store, asked.op))


@app.command()
def repartition(
    store: Path,
    new: Path,
    partitions: Annotated[int, typer.Option(help="of the nodes of the new store")],
    partitioner: flags.PartitionerOption = "gap",
    slack: flags.Slack = 1.1,
    gamma: flags.Gamma = 1.5,
    passes: flags.Passes = 5,
    alpha: flags.Alpha = 1.0,
    soften: flags.Soften = 50.0,
    deviations: flags.Deviations = 2.0,
    relative: flags.Relative = True,
    visit: flags.VisitOption = "degree",
    neighbors: flags.NeighborsOption = "auto",
    hubs: flags.Hubs = "",
    hub_score: flags.HubScoreOption = "walk",
    halo: flags.Halo = 0.0,
    seed: Annotated[int, typer.Option(help="of a random partition")] = 0,
    mem: flags.Mem = "2G",
    fresh: flags.Fresh = False,
) -> None:
    """Write a store anew, its nodes partition by partition; ids of nodes and edges stay."""
    with _one_line_errors():
        settings = PartitionOptions(
            partitions, partitioner, slack, gamma, passes, alpha, soften, relative,
            deviations, visit, neighbors,
        )  # fmt: skip
        influence = InfluenceOptions(*parse_hubs(hubs), hub_score, halo)
        result = repartition_store(
            open_store(store), new, settings, Progress(), _size(mem), influence, seed, fresh
        )
        typer.echo(made_line(new, result.manifest))
        assert result.manifest.partitioning is not None
        for line in partition_lines(result.manifest.partitioning):
            typer.echo(f"  {line}")


@app.command()
def hops(
    store: Path,
    operator: flags.Operators = None,
    hops: Annotated[int, typer.Option(help="how often each is applied")] = 2,
    self_loops: Annotated[bool, typer.Option(help="each node is its own neighbor too")] = True,
    node_type: flags.HopType = "",
    feature: flags.HopFeature = "",
    relation: flags.HopRelation = "",
    rows: flags.HopRowsOption = "labelled",
    split: Annotated[
        list[str] | None, typer.Option(help="only this; several may be given", show_default=False)
    ] = None,
    dtype: Annotated[
        FeatureDtype | None, typer.Option(help="of hops; else as the features")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the order of rows")] = 0,
    alpha: flags.HopAlpha = 0.1,
    t: flags.HopTime = 3.0,
    weighted: flags.HopWeighted = False,
    mem: flags.Mem = "2G",
    fresh: flags.Fresh = False,
) -> None:
    """Propagate features: B X, B B X, ... for each operator B, beside X, within --mem.

    sym and row are the normalised adjacency, ppr and heat its diffusions (personalised PageRank,
    heat kernel).  Rows stand in one seeded random order per split.  --mem changes no byte.
    """
    with _one_line_errors():
        request = HopsRequest(
            _operators(operator), hops, self_loops, node_type,
            feature, relation, rows, tuple(split or ()), dtype, seed, alpha,
            t, weighted,
        )  # fmt: skip
        result = make_hops(store, request, Progress(), _size(mem), fresh=fresh)
        typer.echo(result.text(store))


@app.command()
def info(
    store: Path,
    summary: Annotated[
        bool, typer.Option("--summary", help="degrees, isolated nodes, labels: reads the graph")
    ] = False,
    json: flags.Json = False,
) -> None:
    """Say what a store holds."""
    with _one_line_errors():
        opened = open_store(store)
        found = summarise(opened, Progress()) if summary else None
        if json:
            facts = store_info(opened)
            if found is not None:
                facts["summary"] = msgspec.to_builtins(found)
            typer.echo(msgspec.json.encode(facts).decode())
            return
        typer.echo(info_text(opened))
        if found is not None:
            typer.echo(graph_text(found))


@app.command()
def verify(store: Path) -> None:
    """Check every checksum and every cross-reference of a store."""
    with _one_line_errors():
        report = verify_store(store)
        typer.echo(
            f"{store}: good: {report.blocks:,} blocks, {report.pages:,} pages, "
            f"{report.nodes:,} nodes, {report.edges:,} edges, {format_bytes(report.bytes)} read"
        )
        for name in report.strays:
            typer.echo(f"{store / name}: not a file of the store, and nothing reads it")


@app.command()
def export(
    store: Path,
    folder: Path,
    mem: flags.Mem = "1G",
) -> None:
    """Write a store back as a folder in a plain layout: of one type, or of several.

    Edges come out in the source's order where the store has edge ids, else sorted by target.
    """
    with _one_line_errors():
        export_store(open_store(store), folder, Progress(), _size(mem))


def main() -> None:
    """Entry point of the console command."""
    signal.signal(signal.SIGTERM, _stop)
    app()


def _stop(number: int, _: object) -> None:
    """End as an exception does: what was begun is removed."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
