"""The `loaderd` command: serve a store, ask a daemon how it is."""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from blockstore.errors import StoreError
from blockstore.store import open_store
from blockstore.units import format_bytes, parse_bytes
from loaderd.daemon import serve as serve_engine
from loaderd.door import claim
from loaderd.engine import Engine, default_settings
from loaderd.errors import DaemonError
from loaderd.ledger import plan_budget
from loaderd.protocol import LedgerEntry, StatusReply
from loaderd.transport import ask_status

SWITCH_INTERVAL_S = 0.0005  # between threads of the interpreter; the default 5 ms delays the loop

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve batches of a store to training processes.",
)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What can go wrong is said in one line, with exit code 2."""
    try:
        yield
    except (StoreError, DaemonError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        raise typer.Exit(2) from error


@app.command()
def serve(
    store: Path,
    endpoint: Annotated[str, typer.Option(help="ipc:///path/of/the/socket")],
    mem: Annotated[str, typer.Option(help="memory to use, such as 512M or 32G")] = "2G",
    workers: Annotated[int, typer.Option(help="threads that build batches; 0: as cores")] = 0,
    readers: Annotated[int, typer.Option(help="threads that read blocks; 0: eight")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print where the memory would go, and exit")
    ] = False,
) -> None:
    """Serve a store until SIGTERM."""
    with _one_line_errors():
        opened = open_store(store)
        settings = default_settings(parse_bytes(mem), workers, readers)
        if dry_run:
            typer.echo(ledger_text(plan_budget(opened, settings), settings.mem_bytes))
            return
        claim(endpoint)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with Engine(opened, settings) as engine:

            def ready() -> None:
                typer.echo(
                    f"serving {store} ({opened.manifest.fingerprint}) at {endpoint}, budget "
                    f"{format_bytes(settings.mem_bytes)}, {engine.io_mode}"
                )
                sys.stdout.flush()

            asyncio.run(serve_engine(engine, endpoint, ready))


@app.command()
def status(
    endpoint: Annotated[str, typer.Option(help="ipc:///path/of/the/socket")],
    json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Ask a daemon how it is."""
    with _one_line_errors():
        reply = ask_status(endpoint)
        typer.echo(msgspec.json.encode(reply).decode() if json else status_text(reply))


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    held = list(rows)
    width = max((len(r[0]) for r in held), default=0)
    return [f"  {name:<{width}}  {size:>8}  {basis}".rstrip() for name, size, basis in held]


def ledger_text(ledger: Iterable[LedgerEntry], mem_bytes: int) -> str:
    """The ledger as a table with its sum."""
    held = list(ledger)
    total = sum(e.num_bytes for e in held)
    rows = [(e.name, format_bytes(e.num_bytes), e.basis) for e in held]
    rows.append(("total", format_bytes(total), f"of --mem {format_bytes(mem_bytes)}"))
    return "\n".join(_table(rows))


def status_text(reply: StatusReply) -> str:
    """A status as a short page."""
    own = [e for e in reply.ledger if not e.name.startswith("session ")]
    taken = [e for e in reply.ledger if e.name.startswith("session ")]
    lines = [
        f"{reply.store} ({reply.fingerprint})",
        f"pid {reply.pid}, up {reply.uptime_s:.0f} s, {reply.io_mode}"
        + (", draining" if reply.draining else ""),
        "memory",
        ledger_text(own, reply.budget_bytes),
        *_table((e.name, format_bytes(e.num_bytes), e.basis) for e in taken),
        "sessions",
    ]
    for s in reply.sessions:
        lines.append(
            f"  {s.session}  {s.plan}, {s.seeds}: epoch {s.epoch}, step {s.step} of {s.num_steps}, "
            f"{s.in_flight} of {s.window} in flight, {s.batches} batches done"
        )
    if not reply.sessions:
        lines.append("  none")
    lines.append("counters")
    lines += _table((name, f"{count:,}", "") for name, count in reply.counters.items())
    return "\n".join(lines)


def main() -> None:
    """Entry point of the console command."""
    app()


if __name__ == "__main__":
    main()
