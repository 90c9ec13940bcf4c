"""One message of each kind, with something in every field."""

from loaderd.api.contents import RowArraySpec
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    Blob,
    BlobArray,
    ChunkReady,
    Detach,
    ErrorReply,
    Heartbeat,
    Hello,
    Ids,
    IdsWanted,
    LedgerEntry,
    Piece,
    Release,
    Resolved,
    RowGroup,
    RowsGiven,
    RowsWanted,
    SessionStatus,
    Start,
    StatusReply,
    StatusRequest,
    StoreStatus,
    Taken,
    Welcome,
)

RESOLVED = Resolved(
    family="neighbor", fingerprint="f00d", sampler=1, seeds="split:train", seed_type="node",
    num_seeds=1000, fanouts=((10,), (5,)), frontier="new", replace=False, weighted=False,
    batch_size=100,
    shuffle=True, seed=7, edge_ids=False,
)  # fmt: skip
BLOB = Blob((3, 4, 9), (BlobArray("n_id", "uint32", 0, 70), BlobArray("src", "uint32", 320, 90)))
GROUP = RowGroup(session=3, run=1, step=5, group=0, last=True, num_rows=70, blob=BLOB)
SAMPLES = (
    Attach(
        token=2**47, request=1, split="", num_neighbors=(10, 5), fanouts={"a__b__c": (5, 0)},
        window=4, seed=2**63 - 1,
    ),
    Attached(
        request=1, session=3, resolved=RESOLVED, plan="minibatch", num_steps=10, window=8,
        rows=(RowArraySpec("x", "bfloat16", (24,), 48, "node"), RowArraySpec("y", "int64", (), 8)),
        types=("node",), relations=(("node", "to", "node"),),
    ),
    IdsWanted(request=1, first=16384, count=2),
    Ids(request=1, first=16384, numbers=bytes(16)),
    RowsWanted(
        request=7, fingerprint="f00d", digest="beef", server=1, array="nodes/a/features/x",
        ids=bytes(range(16)),
    ),
    RowsGiven(request=7, array="nodes/a/features/x", count=2, crc32c=2**32 - 1),
    Start(session=3, run=1, epoch=2, step=5, stride=4),
    Release(session=3, run=1, step=5, group=0),
    Detach(session=3),
    StatusRequest(request=9),
    Hello(request=4),
    Heartbeat(token=2**61),
    Taken(session=3, run=1, num_bytes=2**40),
    Piece(session=3, run=1, step=5, group=0, offset=4096),
    GROUP,
    BatchReady(
        session=3, run=1, epoch=2, step=5, num_seeds=10, nodes_per_hop=(10, 40, 20),
        edges_per_hop=((50,), (40,)), structure=BLOB, rows=GROUP,
    ),
    ChunkReady(
        session=3, run=1, epoch=2, step=5, num_rows=70, form="ranges", first=(8, 900),
        counts=(40, 30), places=((4096, 8192), (0, 65536)), index=128,
    ),
    ErrorReply(error="Refused", message="fanout 0 at hop 1", request=1),
    Welcome(
        protocol=1,
        token=2**47,
        stores={"a": "f00d"},
        num_slots=64,
        slot_bytes=1 << 20,
        stamp=1 << 26,
    ),
    StatusReply(
        request=9, stores=(StoreStatus("a", "/data/a", "f00d", "O_DIRECT", 1),), pid=77,
        uptime_s=3725.5, budget_bytes=2 << 30,
        ledger=(
            LedgerEntry("original ids", 4_000_000, "4 B x 1,000,000 nodes"),
            LedgerEntry("row pool", 1 << 30, "1,024 slots x 1,048,576 B"),
            LedgerEntry("session 3, out of the pools", 5 << 20, "5 slots"),
        ),
        sessions=(
            SessionStatus(
                session=3, plan="minibatch", seeds="split:train", epoch=2, step=5, num_steps=10,
                in_flight=2, window=8, batches=25, owner="ann", held_bytes=5 << 20,
            ),
        ),
        counters={"batches": 25, "bytes_read": 123_456_789},
    ),
)  # fmt: skip
