"""`loaderd top`: a daemon's sessions, rates and memory on a terminal, drawn with rich."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blockstore.units import format_bytes
from loaderd.api.protocol import LedgerEntry, StatusReply
from loaderd.memory.ledger import is_session_entry
from loaderd.monitoring.rates import Rates, SessionRates, StatusSample, compare
from loaderd.monitoring.report import duration

_COLORS = {"idle": "dim", "trainer": "green"}  # else the daemon limits
_BAR = 24  # cells of a ledger's bar
_WIDE = 110  # terminal columns from which on tables have all of their own
_SMALL = 0.01  # of the budget: lines of memory below it are one line
_FIXED_LINES = 8  # of a frame: head, tiles, borders, the header of sessions


def percent(share: float | None) -> str:
    """`97.3 %`, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def decimal(bytes_s: float) -> str:
    """`1.25 GB`: rates of disks are said in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if bytes_s < 999.5 or unit == "GB":
            break
        bytes_s /= 1000
    return f"{bytes_s:.3g} {unit}"


def frame(rates: Rates, status: StatusReply, width: int, height: int) -> RenderableType:
    """What `height` lines show: the busiest sessions, and the largest lines of memory."""
    memory = memory_lines(status, rates)
    room = max(4, height - _FIXED_LINES)
    sessions = max(room // 2, room - len(memory))
    return Group(
        _head(status),
        _tiles(rates, width),
        _sessions(rates, width, len(status.stores) > 1, sessions),
        _ledger(status, memory[: max(2, room - min(sessions, len(rates.sessions)))], width),
    )


def memory_lines(status: StatusReply, rates: Rates) -> list[LedgerEntry]:
    """The ledger: pools and busy stores first, then the largest; what is small as one line.

    Lines of sessions come last: they were taken out of pools.
    """
    busy: dict[str, float] = {}
    for one in rates.sessions:
        busy[one.session.store] = busy.get(one.session.store, 0.0) + one.batches_s
    own = [e for e in status.ledger if not is_session_entry(e)]
    small = [e for e in own if e.num_bytes < _SMALL * status.budget_bytes]
    if len(small) > 1:
        own = [e for e in own if e not in small]
        total = sum(e.num_bytes for e in small)
        own.append(LedgerEntry(f"{len(small)} lines under 1 %", total, ""))
    own.sort(key=lambda e: (-busy.get(e.name.split(": ")[0], 0.0), -e.num_bytes))
    taken = [e for e in status.ledger if is_session_entry(e)]
    return own + sorted(taken, key=lambda e: -e.num_bytes)


def _head(status: StatusReply) -> Text:
    parts = [
        ", ".join(store.name for store in status.stores),
        f"pid {status.pid}, up {duration(status.uptime_s)}",
        ", ".join(sorted({store.io_mode.split(":")[0] for store in status.stores})),
    ]
    text = Text("  ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
    if status.draining:
        text.append("  draining", style="bold yellow")
    return text


def _tiles(rates: Rates, width: int) -> Table:
    tiles = [
        ("sessions", str(rates.num_sessions), ""),
        ("batches/s", f"{rates.batches_s:.1f}", ""),
        ("read/s", decimal(rates.read_bytes_s), ""),
        ("graph hits", percent(rates.graph_hit), ""),
        ("row hits", percent(rates.row_hit), ""),
        ("limits", rates.limit, _COLORS.get(rates.limit, "bold yellow")),
    ]
    if rates.from_peers_s is not None and rates.to_peers_s is not None:
        tiles[3:3] = [
            ("peers in", decimal(rates.from_peers_s), ""),
            ("peers out", decimal(rates.to_peers_s), ""),
        ]
    if width >= _WIDE:
        tiles[2:2] = [
            ("rows/s", f"{rates.rows_s:,.0f}", ""),
            ("in flight", str(rates.in_flight), ""),
        ]
        tiles.insert(-1, ("none ready", percent(rates.starved), ""))
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in tiles:
        grid.add_column(ratio=1)
    grid.add_row(*(Text(name, style="dim", no_wrap=True) for name, _, _ in tiles))
    grid.add_row(*(Text(value, style=style or "bold", no_wrap=True) for _, value, style in tiles))
    return grid


def _sessions(rates: Rates, width: int, several: bool, maximum: int) -> RenderableType:
    if not rates.sessions:
        return Panel(Text("no sessions", style="dim"))
    wide = width >= _WIDE
    several = several and wide
    table = Table(expand=True, box=None, header_style="dim", pad_edge=False)
    table.add_column("session", justify="right", no_wrap=True)
    if several:
        table.add_column("store", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("plan", no_wrap=True)
    if wide:
        table.add_column("seeds", no_wrap=True, overflow="ellipsis", max_width=24)
    for name in ("epoch", "step", "in flight", "batches/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("rows/s", justify="right", no_wrap=True)
    table.add_column("none ready", justify="right", no_wrap=True)
    table.add_column("limits", no_wrap=True)
    busiest = sorted(rates.sessions, key=lambda s: (-s.batches_s, s.session.session))
    shown = busiest if len(busiest) <= maximum else busiest[: maximum - 1]
    for s in shown:
        table.add_row(*_cells(s, wide, several))
    hidden = len(busiest) - len(shown)
    return Panel(table, subtitle=f"and {hidden} more" if hidden else None)


def _cells(rates: SessionRates, wide: bool, several: bool) -> list[RenderableType]:
    s = rates.session
    cells: list[RenderableType] = [str(s.session), *([Text(s.store)] if several else []), s.plan]
    if wide:
        cells.append(Text(s.seeds))
    cells += [
        str(s.epoch), f"{s.step:,}/{s.num_steps:,}", f"{s.in_flight}/{s.window}",
        f"{rates.batches_s:.1f}",
    ]  # fmt: skip
    if wide:
        cells.append(f"{rates.rows_s:,.0f}")
    limit = Text(rates.limit, style=_COLORS.get(rates.limit, "yellow"))
    cells += [percent(rates.starved), limit]
    return cells


def _ledger(status: StatusReply, lines: Sequence[LedgerEntry], width: int) -> RenderableType:
    budget = max(1, status.budget_bytes)
    table = Table(expand=True, box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=56 if width >= _WIDE else 34)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    if width >= _WIDE:
        table.add_column(style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
    for e in lines:
        share = e.num_bytes / budget
        taken = is_session_entry(e)
        filled = min(_BAR, round(_BAR * share))
        bar = Text("█" * filled, style="blue" if taken else "cyan")
        bar.append("░" * (_BAR - filled), style="dim")
        name = f"  {e.name}" if taken else e.name
        cells: list[RenderableType] = [name, format_bytes(e.num_bytes), f"{100 * share:.1f} %", bar]
        table.add_row(*cells, *([Text(e.basis)] if width >= _WIDE else []))
    return Panel(table, title=f"memory of {format_bytes(status.budget_bytes)}", title_align="left")


def run_top(
    ask: Callable[[], StatusReply], every_s: float, once: bool, console: Console | None = None
) -> None:
    """Draw until Ctrl-C; `once` draws one picture of one interval.  Raises what `ask` raises."""
    screen = console or Console()
    before = StatusSample(time.monotonic(), ask())
    if once:
        time.sleep(every_s)
        after = StatusSample(time.monotonic(), ask())
        screen.print(frame(compare(before, after), after.status, screen.width, screen.height))
        return
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        shown = frame(compare(before, before), before.status, screen.width, screen.height)
        while True:
            live.update(shown, refresh=True)
            time.sleep(every_s)
            after = StatusSample(time.monotonic(), ask())
            shown = frame(compare(before, after), after.status, screen.width, screen.height)
            before = after
