"""Ledgers and statuses as text."""

from collections.abc import Iterable, Sequence

from blockstore.units import format_bytes
from loaderd.api.protocol import LedgerEntry, SessionStatus, StatusReply, StoreStatus
from loaderd.memory.ledger import is_session_entry


def table(rows: Sequence[Sequence[str]], right: frozenset[int]) -> list[str]:
    """Lines of aligned columns, the first row the header; those in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def ledger_text(ledger: Iterable[LedgerEntry], mem_bytes: int) -> str:
    rows = [("name", "size", "basis")]
    total = 0
    for entry in ledger:
        rows.append((entry.name, format_bytes(entry.num_bytes), entry.basis))
        total += entry.num_bytes
    rows.append(("total", format_bytes(total), f"of --mem {format_bytes(mem_bytes)}"))
    return "\n".join(table(rows, frozenset({1})))


def store_text(store: StoreStatus) -> str:
    return (
        f"{store.path} (store {store.name}, fingerprint {store.fingerprint}), {store.io_mode}, "
        f"{store.sessions} session{'s' * (store.sessions != 1)}"
        + (", no longer served to others" if store.retired else "")
    )


def status_text(reply: StatusReply) -> str:
    own = [e for e in reply.ledger if not is_session_entry(e)]
    taken = [e for e in reply.ledger if is_session_entry(e)]
    pages = [
        "\n".join(map(store_text, reply.stores))
        + f"\npid {reply.pid}, up {duration(reply.uptime_s)}"
        + (", draining" if reply.draining else "")
        + (f"\nreload failed: {reply.reload_error}" if reply.reload_error else "")
        + (f"\ncompiling: {reply.compiling}, and batches wait" if reply.compiling else ""),
        ledger_text(own, reply.budget_bytes),
        _sessions_text(reply.sessions),
        "\n".join(
            table(
                [("counter", "value"), *((n, f"{c:,}") for n, c in reply.counters.items())],
                frozenset({1}),
            )
        ),
    ]
    if taken:
        held = [(e.name, format_bytes(e.num_bytes), e.basis) for e in taken]
        pages.insert(
            2, "\n".join(table([("of the pools", "size", "basis"), *held], frozenset({1})))
        )
    return "\n\n".join(pages)


def _sessions_text(sessions: Iterable[SessionStatus]) -> str:
    rows: list[tuple[str, ...]] = [
        (
            "session", "owner", "store", "plan", "seeds", "epoch", "step", "of", "in flight",
            "window", "done", "held",
        )
    ]  # fmt: skip
    for s in sessions:
        numbers = (s.epoch, s.step, s.num_steps, s.in_flight, s.window, s.batches)
        held = format_bytes(s.held_bytes)
        rows.append((str(s.session), s.owner, s.store, s.plan, s.seeds, *map(str, numbers), held))
    return "\n".join(table(rows, frozenset({0, *range(5, 12)}))) if rows[1:] else "no sessions"


def duration(seconds: float) -> str:
    """Seconds as `h:mm:ss`, rounded down."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
