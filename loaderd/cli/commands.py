"""What the `loaderd` command does: serve a store, ask a daemon how it is."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from blockstore import __version__
from blockstore.errors import StoreError
from blockstore.flags import OneLineErrors, Panels, command_group, grouped
from blockstore.format import FORMAT_VERSION
from blockstore.io.arena import Arena
from blockstore.io.reclaim import reclaim_later
from blockstore.kernels.compiling import use_child
from blockstore.objects.bucket import parse_url
from blockstore.objects.remote import ObjectStores
from blockstore.store import Store, open_store
from blockstore.units import format_bytes, parse_bytes
from loaderd.api.endpoint import Endpoint, claim, parse_endpoint
from loaderd.api.errors import DaemonError, Refused
from loaderd.api.keys import PUBLIC, SECRET, keys_folder, write_pair
from loaderd.api.peers import part_with_peers
from loaderd.api.protocol import PROTOCOL_VERSION
from loaderd.cli import flags
from loaderd.cli.advise.owners import OwnersQuestion
from loaderd.cli.advise.report import advice_json, advice_text, report_on
from loaderd.cli.config import read_config
from loaderd.cli.presample import presample as count_epochs
from loaderd.memory.ledger import EngineSettings, plan_budget
from loaderd.monitoring.doctor import State, checks_text, examine
from loaderd.monitoring.logs import log_event, logging_to_stderr
from loaderd.monitoring.report import ledger_text, status_text, store_text
from loaderd.monitoring.server import MonitoringServer
from loaderd.monitoring.top import run_top
from loaderd.server.curve import new_pair
from loaderd.server.daemon import Access, Daemon
from loaderd.server.daemon import serve as serve_engine
from loaderd.server.owners import check_folder, user_name
from loaderd.server.peer_answers import peers_bytes
from loaderd.server.peer_rows import PeerRows, peer_source
from loaderd.server.process import Signals, end_when_unused, notify, share_heaps
from loaderd.server.transport import ask_status, parse_either
from loaderd.sessions.engine import default_settings
from loaderd.sessions.stores import Stores
from loaderd.streams.service import StreamService

_RELOAD_S = 60.0  # for a daemon to open its stores again
log = logging.getLogger("loaderd")


class DaemonCommands(OneLineErrors):
    expected = StoreError, DaemonError, OSError, ValueError


app = command_group(
    DaemonCommands, "Serve batches of a store to training processes.",
    f"loaderd {__version__}, store format {FORMAT_VERSION}, protocol {PROTOCOL_VERSION}",
)  # fmt: skip


def _configure(context: typer.Context, path: Path | None) -> Path | None:
    """Use the options of a file if neither the command line nor the environment gives them."""
    if path is not None:
        context.default_map = _read_options(context, path)
    return path


def _read_options(context: typer.Context, path: Path) -> dict[str, str | list[str]]:
    names = {p.name for p in context.command.params if p.name is not None} - {"config", "help"}
    return read_config(path, names, {"store"})


@app.command(cls=Panels)
@grouped
def serve(
    context: typer.Context,
    store: flags.StorePaths,
    endpoint: flags.Endpoint,
    resources: flags.ServeResources,
    monitoring: flags.Monitoring,
    users: flags.Users,
    others: flags.OtherMachines,
    objects: flags.ObjectStorage,
    config: Annotated[Path | None, flags.config(_configure)] = None,
) -> None:
    """Serve stores until SIGTERM; SIGHUP has them opened again."""
    del config  # its callback has put its options among the others
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            logging_to_stderr(monitoring.log_format.value, monitoring.log_level.value)
        )
        resources.load_samplers()
        use_child(functools.partial(log_event, log, logging.INFO))  # before any kernel runs
        address, mem_bytes = parse_endpoint(endpoint), resources.settings().mem_bytes
        if (buckets := objects.stores(store, mem_bytes)) is not None:
            stack.enter_context(buckets)
        opened = [_open(path, buckets) for path in store]
        peers = others.addresses()
        for one in opened:
            part_with_peers(one, peers)
        settings = replace(
            resources.settings(), trace=monitoring.trace, peer_bytes=peers_bytes(opened),
            object_bytes=sum(one.pages.memory_bytes for one in opened if one.pages is not None),
        )  # fmt: skip
        if buckets is not None:
            buckets.seal()
        if resources.dry_run:
            typer.echo(ledger_text(plan_budget(opened, settings), settings.mem_bytes))
            return
        access, source = flags.access(users, others), peer_source(peers)
        if resources.while_used is not None:
            end_when_unused(resources.while_used)

        def reopen() -> list[Store]:
            return [_open(path, buckets) for path in _paths(context)]

        _serve(opened, settings, source, address, monitoring, access, reopen)


def _open(place: Path, buckets: ObjectStores | None) -> Store:
    """A store of this machine, or in object storage.  Raises StoreError."""
    url = parse_url(str(place))
    if not url:
        return open_store(place)
    if buckets is None:
        raise Refused(f"{url}: this daemon was started without --cache; start it again with it")
    return buckets.open(url)


def _paths(context: typer.Context) -> list[Path]:
    """The stores to serve now; read from the configuration file again, if that named them."""
    source, config = context.get_parameter_source("store"), context.params.get("config")
    if config is None or source is None or source.name != "DEFAULT_MAP":
        return list(context.params["store"])
    found = _read_options(context, config).get("store")
    if not found:
        raise Refused(f"{config}: store is not there, expected the stores to serve")
    return [Path(path) for path in found]


def _serve(
    stores: list[Store],
    settings: EngineSettings,
    source: Callable[[Store], PeerRows | None],
    endpoint: Endpoint,
    monitoring: flags.Monitoring,
    access: Access,
    reopen: Callable[[], list[Store]],
) -> None:
    """Serve until a signal comes, also one that comes while memory is taken."""
    signals, idle = Signals(), True
    share_heaps()
    with claim(endpoint):
        check_folder(endpoint.path.parent, access.gid)
        with signals.to(lambda: _leave(endpoint)):
            opened = Stores(stores, settings, source)
        with contextlib.ExitStack() as stack:
            stack.enter_context(opened)
            _reclaim(opened.arena)
            exchange = stack.enter_context(StreamService(opened, reopen))
            served = exchange.stores()
            named = ", ".join(f"{s.path} (fingerprint {s.fingerprint})" for s in served)
            modes = ", ".join(sorted({s.io_mode for s in served}))

            def ready(daemon: Daemon) -> None:
                page, listen = "", daemon.remote_address
                if monitoring.metrics_port:
                    where = monitoring.metrics_host, monitoring.metrics_port
                    server = MonitoringServer(*where, daemon.status)
                    page = stack.enter_context(server).address
                place = f"{endpoint} and {listen}" if listen else f"{endpoint}"
                budget = format_bytes(settings.mem_bytes)
                line = f"serving {named} at {place}, budget {budget}, {modes}"
                _say(line)
                log_event(
                    log, logging.INFO, "serving", endpoint=endpoint,
                    stores=", ".join(s.path for s in served),
                    fingerprints=", ".join(s.fingerprint for s in served),
                    mem_bytes=settings.mem_bytes,
                    io_mode=modes, page=page, listen=listen,
                )  # fmt: skip
                notify("READY=1", f"STATUS={line}")

            gc.collect()
            gc.freeze()  # all this stays: the collector looks only at later objects, and so in time
            idle = asyncio.run(serve_engine(exchange, endpoint, signals, ready, access))
            if not idle:
                stack.pop_all()
    if not idle:  # a worker hangs in a read; nothing of it outlives the process
        os._exit(0)


def _leave(endpoint: Endpoint) -> None:
    """End at once, while memory is taken: of all that was begun only the lock's file would stay.

    No exception is raised for it: one that a signal raises in a finalizer, or in a callback of
    numba, is printed and swallowed, and the daemon would go on.
    """
    endpoint.lock.unlink(missing_ok=True)
    os._exit(0)


def _reclaim(arena: Arena) -> None:
    """Have the arena emptied when this process has ended, even if clients still map it."""
    try:
        reclaim_later(arena.fd, arena.stamp)
    except OSError as error:
        log_event(
            log, logging.WARNING, "memory may stay taken", error=f"no process frees it: {error}"
        )


def _say(line: str) -> None:
    """Print at once; a reader that has left is no reason to stop."""
    try:
        typer.echo(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command(cls=Panels)
@grouped
def advise(
    store: Path,
    sampling: flags.Sampling,
    resources: flags.DaemonResources,
    hops: Annotated[
        list[int] | None, typer.Argument(help="more of --num-neighbors", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="that each plan is tried")] = 10.0,
    owners: Annotated[
        str, typer.Option(help="owner map: what splitting batches by it would exchange")
    ] = "",
    hidden: Annotated[int, typer.Option(min=1, help="width of the model that owners train")] = 256,
    json: flags.Json = False,
) -> None:
    """Serve every plan for some seconds, and say which to take."""
    request = sampling.request(hops)
    asked = OwnersQuestion(owners, hidden) if owners else None
    whole = open_store(store)
    whole.check_whole("loaderd advise")
    report = report_on(whole, resources.settings(), request, seconds, asked)
    typer.echo(advice_json(report) if json else advice_text(report))
    if not report.plan:
        raise typer.Exit(2)


@app.command(cls=Panels)
@grouped
def presample(store: Path, sampling: flags.Presampling, mem: flags.Mem = "2G") -> None:
    """Count how often nodes are sampled in the epochs to come, for `blockstore owners`.

    Stopped or killed, the same command goes on with the next epoch.
    """
    found = count_epochs(
        open_store(store), sampling.request(), sampling.epochs,
        default_settings(parse_bytes(mem)), sampling.out, typer.echo,
    )  # fmt: skip
    typer.echo(f"{sampling.out}: {found.steps:,} batches of {found.epochs} epochs")


@app.command()
def status(endpoint: flags.AnyEndpoint, json: flags.Json = False) -> None:
    """Ask a daemon how it is."""
    reply = ask_status(parse_either(endpoint))
    typer.echo(msgspec.json.encode(reply).decode() if json else status_text(reply))


@app.command()
def reload(endpoint: flags.Endpoint) -> None:
    """Have a daemon of this machine open its stores again: SIGHUP, and what came of it."""
    address = parse_endpoint(endpoint)
    before = ask_status(address)
    os.kill(before.pid, signal.SIGHUP)
    end = time.monotonic() + _RELOAD_S
    while (after := ask_status(address)).counters["reloads"] == before.counters["reloads"]:
        if time.monotonic() > end:
            raise DaemonError(f"{endpoint}: no answer within {_RELOAD_S:g} s; see its log")
        time.sleep(0.05)
    if after.reload_error:
        raise Refused(f"{endpoint}: {after.reload_error}")
    typer.echo("\n".join(map(store_text, after.stores)))


@app.command()
def top(
    endpoint: flags.AnyEndpoint,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="seconds of a picture")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="one picture, and exit")] = False,
) -> None:
    """Watch a daemon: sessions, rates, the stage that limits, memory."""
    with contextlib.suppress(KeyboardInterrupt):
        address = parse_either(endpoint)
        run_top(lambda: ask_status(address), every, once)


@app.command()
def keygen(
    folder: Annotated[
        Path | None, typer.Argument(help="where; else $LOADERD_KEYS, or ~/.config/loaderd")
    ] = None,
    name: Annotated[str, typer.Option(help="by which daemons know who has the key")] = "",
) -> None:
    """Make this side's keys for tcp, and print the public one."""
    where = keys_folder(folder)
    pair = new_pair()
    who = " ".join(name.split()) or f"{user_name(os.getuid())}@{socket.gethostname()}"
    write_pair(where, pair, who)
    typer.echo(f"{pair.public} {who}")
    typer.echo(f"wrote {where / SECRET} and {where / PUBLIC}", err=True)


@app.command()
def doctor(
    store: Annotated[Path | None, typer.Argument(help="checks its disk, too")] = None,
    mem: flags.Mem = "2G",
    json: flags.Json = False,
) -> None:
    """Look whether this machine can serve well, and say what to do where not."""
    checks = list(examine(default_settings(parse_bytes(mem)), store))
    typer.echo(msgspec.json.encode(checks).decode() if json else checks_text(checks))
    if any(check.state == State.fail for check in checks):
        raise typer.Exit(1)
