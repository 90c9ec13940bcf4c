"""Statuses of daemons that never were."""

from msgspec import structs

from loaderd.api.protocol import LedgerEntry, SessionStatus, StatusReply, StoreStatus

MS = 1_000_000

SESSION = SessionStatus(
    session=3, plan="minibatch", seeds="split:train", epoch=1, step=20, num_steps=120, in_flight=4,
    window=8, store="store", batches=100, rows=4000, edges=9000, ready_ns=500 * MS,
    starved_ns=500 * MS,
)  # fmt: skip


STORE = StoreStatus("store", "/data/store", "f00d", "O_DIRECT", 1)


def status(**fields: object) -> StatusReply:
    """A daemon with one session; `fields` instead of its own."""
    reply = StatusReply(
        request=0, stores=(STORE,), pid=7, uptime_s=60.0, budget_bytes=1 << 30,
        ledger=(
            LedgerEntry("page checksums", 1 << 20, "4 B x 262,144 pages of 4 KiB"),
            LedgerEntry("row pool and sessions", 1 << 29, "512 slots"),
            LedgerEntry("session 3, out of the pools", 1 << 28, "2 workspaces"),
        ),
        sessions=(SESSION,),
        counters={
            "batches": 100, "rows": 4000, "edges": 9000, "bytes_read": 10**9, "sample_ns": 100 * MS,
            "fill_ns": 200 * MS, "read_ns": 300 * MS, "read_wait_ns": 50 * MS, "ready_ns": 500 * MS,
            "starved_ns": 500 * MS, "row_blocks_hit": 30, "row_blocks_missed": 10,
        },
        workers=4, readers=8,
    )  # fmt: skip
    return structs.replace(reply, **fields)


def later(reply: StatusReply, seconds: float, **more: int) -> StatusReply:
    """The same daemon; its counters have grown by `more`."""
    counters = reply.counters | {n: reply.counters.get(n, 0) + c for n, c in more.items()}
    return structs.replace(reply, uptime_s=reply.uptime_s + seconds, counters=counters)
