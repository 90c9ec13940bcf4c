"""Messages between loaderd and its clients: the only code that knows PROTOCOL.md."""

from typing import TypeVar

import msgspec

from loaderd.api.contents import PartitionSeeds, RelationInfo, RowArraySpec, TypeInfo
from loaderd.api.errors import BadMessage

PROTOCOL_VERSION = 5
SAMPLER_VERSION = 1  # of the draws: raised if a change of kernels changes batches
HEARTBEAT_S = 1.0  # between two heartbeats of a daemon to a client on another host
LEASE_S = 15.0  # without a sign of life, after which such a client, or daemon, counts as gone
DOOR_SUFFIX = ".door"  # ipc:///run/x -> the Unix socket /run/x.door passes the arena's descriptor


class Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all messages: a MessagePack map with its kind in it; unknown fields are ignored."""


class StepMessage(Message, frozen=True, kw_only=True):
    """Base of messages about a step of a session's run."""

    session: int
    run: int
    step: int


class MacroBatch(msgspec.Struct, frozen=True):
    """Parameters of macro-batches."""

    num_partitions: int  # of the store
    partitions: int  # of a macro-batch
    reuse: int  # passes over its seeds
    waiting: bool  # passes end as soon as the next macro-batch is there: steps depend on timing
    hubs: bool  # whether the store's hubs belong to each
    halos: bool  # whether the halos of its partitions do


class HopBatches(msgspec.Struct, frozen=True):
    """Parameters of hop-wise batches."""

    operators: tuple[str, ...]
    hops: int  # hops 0 to this one
    method: str  # "cr": chunks of consecutive rows in a keyed order; "rr": rows in a keyed order
    chunk: int  # rows of a chunk; 0 if there are none
    redeal: int  # every so many epochs rows are dealt into chunks again; 0: never
    labels: bool  # whether they come with each batch


class SeedEdges(msgspec.Struct, frozen=True):
    """Seeds that are edges of one relation, for link prediction."""

    relation: str = ""  # "src__name__dst"; "" if the store has one
    negatives: str = "none"  # "binary": pairs of random nodes; "triplet": random targets
    amount: float = 0.0  # negatives per edge, rounded up for a batch; whole for triplets
    exclude: str = "none"  # from the batch: "self": its seed edges; "reverse": also their reverses
    reverse: str = ""  # the relation in which reverses are; "": as the store says


class Temporal(msgspec.Struct, frozen=True):
    """Sampling of edges up to each seed's time: a batch is a tree for each of its seed nodes."""

    strategy: str = "uniform"  # which of those edges; "last": the latest
    times: str = "given"  # of the seeds: after the ids in their frame; "edges": their own
    strict: bool = False  # only edges before the seed's time, not at it


class Labor(msgspec.Struct, frozen=True):
    """LABOR: columns that are expanded under one key agree on the sources that they pick."""

    layer_dependency: bool = False  # one key for all hops of a step
    batch_dependency: int = 1  # steps of an epoch that share their keys


class Subgraph(msgspec.Struct, frozen=True):
    """Batches are nodes that a sampler chooses, and all edges among them."""

    sampler: str  # the plan that was asked for
    options: tuple[str, ...]  # all of the sampler's, in order of their names
    values: tuple[int, ...]  # of each
    partitions: int  # of the store
    trees: bool = False  # nodes and edges are not shared between seeds


class HomePlacement(msgspec.Struct, frozen=True):
    """Ranks train the seeds of a global batch that they own, instead of ranges of seeds."""

    time_steps: int = 0  # of all models together, after merging by model; 0: seeds stay at home


class ArrayChoice(msgspec.Struct, frozen=True):
    """The row arrays of a node type or relation that come with batches."""

    owner: str  # the type, or "src__name__dst"
    names: tuple[str, ...]


class RowChoice(msgspec.Struct, frozen=True):
    """Which row arrays come with batches."""

    arrays: tuple[ArrayChoice, ...] = ()  # a type or relation not named: all of its own
    labels: bool = True  # those of the store, or the array `label`
    label: str = ""  # array of features that comes as labels


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Semantic parameters of a plan: with (epoch, step) they fix every bit of a batch."""

    # "neighbor" (of plans minibatch and hyperbatch), "macro", "partitions", "subgraph" or "hops"
    family: str
    fingerprint: str  # of the store
    sampler: int  # SAMPLER_VERSION
    seeds: str  # "split:train", "ids:<digest>" or "all"
    seed_type: str  # node type of the seeds
    num_seeds: int
    fanouts: tuple[tuple[int, ...], ...]  # [hop][relation], seeds outward; -1 is all, 0 is none
    frontier: str  # "new": a hop expands newly found nodes only; "layer": all found so far
    replace: bool
    weighted: bool  # draws by the weights of edges
    batch_size: int  # global: all ranks together
    shuffle: bool
    seed: int
    edge_ids: bool
    macro: MacroBatch | None = None  # of families "macro" and "partitions"
    hops: HopBatches | None = None  # of family "hops"
    edges: SeedEdges | None = None  # if seeds are edges
    temporal: Temporal | None = None  # if edges are sampled up to a time
    edge_features: bool = False  # rows of the sampled edges
    edge_weights: bool = False  # weights and times of these edges
    edge_times: bool = False
    rows: RowChoice | None = None  # if not all row arrays come
    labor: Labor | None = None  # if neighbors are drawn by LABOR; else each column by itself
    cycle: int = 0  # epoch e has the draws of epoch e % cycle; 0: its own
    subgraph: Subgraph | None = None  # of family "subgraph"

    @property
    def has_trees(self) -> bool:
        """Whether nodes are not shared between seeds."""
        return self.temporal is not None or (self.subgraph is not None and self.subgraph.trees)


class Attach(Message, frozen=True, kw_only=True, tag="attach"):
    """Client: open a session.  `split`: a name, "all", or "" if seeds are given by `ids` numbers:
    original ids, of edges all their sources, then all their targets; then times, if they are given.
    """

    token: int  # from Welcome: ties the session to the connection at the door
    request: int  # echoed in the reply
    store: str = ""  # by name; "" if the daemon serves one
    plan: str = "auto"
    split: str = "train"
    num_neighbors: tuple[int, ...] = ()  # per hop, of relations that `fanouts` does not name
    fanouts: dict[str, tuple[int, ...]] = {}  # by relation "src__name__dst", per hop; 0 is none
    batch_size: int = 1000
    shuffle: bool = True
    seed: int = 0
    return_e_id: bool = False
    seed_type: str = ""  # "" if the store has one node type
    rank: int = 0
    world_size: int = 1
    window: int = 0  # batches in flight that the client would like; 0: as the daemon sees fit
    frontier: str = "new"
    replace: bool = False
    weighted: bool = False
    hyperbatch: int = 0  # minibatches built together, if the plan does so; 0: as many as fit
    macro_partitions: int = 0  # of a macro-batch; 0: an eighth of the store's
    reuse: int = 1  # passes over the seeds of a macro-batch
    waiting: bool = False  # no pass begins once the next macro-batch is there; up to `reuse`
    hubs: bool = True  # in every macro-batch, if the store has them
    halos: bool = True  # of a macro-batch's partitions, if the store has them
    operators: tuple[str, ...] = ()  # of hop-wise batches; (): all that the split has
    hops: int = -1  # hops 0 to this one; -1: all that these operators have
    chunk: int = 0  # rows of a chunk; 0: batch_size
    redeal: int = 0  # every so many epochs rows are dealt into chunks again; 0: never
    labels: bool = True  # with hop-wise batches
    edges: SeedEdges | None = None  # seeds are edges: all, a split of them, or the frame's
    temporal: Temporal | None = None  # only edges up to each seed's time
    edge_features: bool = False  # rows of the sampled edges, of all arrays of edges
    edge_weights: bool = False  # of the sampled edges, in the relations that have any
    edge_times: bool = False  # likewise
    rows: RowChoice | None = None  # None: all arrays.  Owner "": any type, "*": any relation
    labor: Labor | None = None  # draw neighbors by LABOR
    cycle: int = 0  # epoch e has the draws of epoch e % cycle; 0: its own
    subgraph: dict[str, int] = {}  # options of a plan of subgraphs that differ from the defaults
    owners: str = ""  # name of an owner map of the store: batches name the owners of nodes
    home: HomePlacement | None = None  # `owners` says which rank trains which seeds
    classes: bool = False  # `TypeInfo` is to say how many the labels have
    mask_size: int = 0  # length of the mask over a type's nodes that ids come from; 0: no mask
    ids: int = 0  # numbers that describe the seeds: sent as `IdsWanted` asks for them


class Attached(Message, frozen=True, kw_only=True, tag="attached"):
    """Daemon: the session is open."""

    request: int
    session: int
    resolved: Resolved
    plan: str  # the physical plan that serves it
    num_steps: int  # of every epoch
    window: int  # at most this many batches are pushed and not yet released
    rows: tuple[RowArraySpec, ...]
    types: tuple[str, ...]  # of nodes, in the order of the store
    relations: tuple[tuple[str, str, str], ...]  # (src, name, dst), in the order of `fanouts`
    type_info: tuple[TypeInfo, ...] = ()  # in the order of `types`
    relation_info: tuple[RelationInfo, ...] = ()  # in the order of `relations`
    owners: str = ""  # digest of the owner map that was asked for
    num_owners: int = 0  # that it has
    partitions: PartitionSeeds | None = None  # of plan "partitions"


class IdsWanted(Message, frozen=True, kw_only=True, tag="ids-wanted"):
    """Daemon: it has room for the numbers of an `Attach`; send these."""

    request: int
    first: int  # of the numbers
    count: int


class Ids(Message, frozen=True, kw_only=True, tag="ids"):
    """Client: the numbers that an `IdsWanted` asks for."""

    request: int
    first: int
    numbers: bytes  # int64, little-endian


class RowsWanted(Message, frozen=True, kw_only=True, tag="rows-wanted"):
    """Daemon with a part of a store, to one with another part: send these rows of an array."""

    request: int
    fingerprint: str  # of the store
    digest: str  # of the owner map by which it was divided
    server: int  # the one that asks
    array: str  # path in the store
    ids: bytes  # store ids, ascending, each once: uint64, little-endian


class RowsGiven(Message, frozen=True, kw_only=True, tag="rows-given"):
    """The answer: the rows follow in a frame, in the order of the request."""

    request: int
    array: str
    count: int
    crc32c: int  # of the frame


class Start(StepMessage, frozen=True, kw_only=True, tag="start"):
    """Client: push steps `step`, `step + stride`, ... of `epoch`.

    Ends earlier runs of the session: leases are taken back.  `run` grows from one start to the
    next; a start that is repeated, or older than the newest, changes nothing.
    """

    epoch: int
    stride: int = 1


class Release(StepMessage, frozen=True, kw_only=True, tag="release"):
    """Client: row group `group` of a batch is copied, its slots are free.  Safe to repeat."""

    group: int


class Detach(Message, frozen=True, kw_only=True, tag="detach"):
    """Client: close the session."""

    session: int


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Client, over tcp, which has no door: a greeting.  The answer is a Welcome."""

    request: int = 0


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Both, over tcp: still here.  The daemon begins, the client answers."""

    token: int


class Taken(Message, frozen=True, kw_only=True, tag="taken"):
    """Client, over tcp: so many bytes of the run's pieces have been taken in.  Safe to repeat."""

    session: int
    run: int
    num_bytes: int  # since the start of the run


class StatusRequest(Message, frozen=True, kw_only=True, tag="status"):
    """Client: report your status."""

    request: int = 0


class BlobArray(msgspec.Struct, frozen=True):
    """One array inside a blob.  A blob is a run of bytes laid over whole arena slots, in order."""

    name: str
    dtype: str
    offset: int  # bytes from the blob's start; a multiple of 64
    length: int  # items


class Blob(msgspec.Struct, frozen=True):
    """The slots of a blob, and the arrays in it."""

    slots: tuple[int, ...]  # byte b of the blob is byte b % slot_bytes of slots[b // slot_bytes]
    arrays: tuple[BlobArray, ...]


class RowGroup(StepMessage, frozen=True, kw_only=True, tag="rows"):
    """Daemon: rows of a batch, for the client to gather.

    Blob arrays: `address:NAME` uint64 (num_rows,), the arena byte offset of each row of row array
    NAME; of a part of a batch `positions` uint32 (num_rows,), the rows' places in `n_id`.
    """

    group: int
    last: bool
    num_rows: int
    blob: Blob


class BatchReady(StepMessage, frozen=True, kw_only=True, tag="batch"):
    """Daemon: a batch is built.

    Blob arrays: `n_id` (original ids), `input_id` (places among the session's seeds), and per hop
    and relation `counts:H:R` uint32 (nodes of hop H,), edges found per frontier node; `src` uint32
    (edges,), the local source of each edge, hop by hop and relation by relation; if asked `e_id`,
    `edge_weight` float32 and `edge_time` int64 of each edge, 0 in relations without; `ends` uint32
    if seeds are edges: the local ends of these and of their negatives; `trees` uint32 of each node,
    with plan "shadow" or sampling up to a time, which adds `times` int64 of each seed; with an
    owner map `owner` uint8, or uint16 for more than 256 owners, of each node; with home placement
    `seed_rank` uint16, the rank that trains each seed of the global batch, in its order; with plan
    "partitions" `store_id` of each node.  The slots are released with row group 0.
    """

    epoch: int
    num_seeds: int
    nodes_per_hop: tuple[int, ...]  # [0] are the seeds, then those newly found by each hop
    edges_per_hop: tuple[tuple[int, ...], ...]  # [hop][relation]
    structure: Blob
    rows: RowGroup  # group 0; further ones follow as messages of their own


class ChunkReady(StepMessage, frozen=True, kw_only=True, tag="chunk"):
    """Daemon: a hop-wise batch is there: rows of the arrays that `Attached.rows` names.

    form   "ranges": ranges of consecutive rows, which begin at places[array][range];
           "rows": all rows one after the other from places[array][0] on;
           "index": row `index[i]` of an array is row i of the batch, row 0 at places[array][0];
           "pieces": over tcp, in pieces that follow
    """

    epoch: int
    num_rows: int
    form: str
    first: tuple[int, ...]  # row in the stored order with which each range begins
    counts: tuple[int, ...]  # rows of each range
    places: tuple[tuple[int, ...], ...]  # arena byte offsets
    index: int = -1  # arena byte offset of int64 (num_rows,), rows in the stored order
    pieces: Blob | None = None  # over tcp, of form "pieces": `input_id` and `rows:NAME`


class Piece(StepMessage, frozen=True, kw_only=True, tag="piece"):
    """Daemon, over tcp: bytes of a batch in a frame that follows, after a message without slots."""

    group: int
    offset: int  # of its first byte


class Skipped(StepMessage, frozen=True, kw_only=True, tag="skipped"):
    """Daemon: steps `step` to `to` - 1 are left out, as passes that end with waiting are."""

    to: int


class ErrorReply(Message, frozen=True, kw_only=True, tag="error"):
    """Daemon: a request was refused (`request` set), or a session failed (`session` set)."""

    error: str  # class name in loaderd.api.errors
    message: str
    request: int = -1
    session: int = -1
    run: int = -1
    step: int = -1


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Daemon, at the door, with the arena's descriptor: what the client maps."""

    protocol: int
    token: int
    stores: dict[str, str]  # fingerprints by name
    num_slots: int
    slot_bytes: int
    stamp: int  # arena byte offset of the word that is not zero while the slots are intact


class LedgerEntry(msgspec.Struct, frozen=True):
    """One line of the memory budget."""

    name: str
    num_bytes: int
    basis: str  # how it comes about: "4 B x 1,000,000 nodes"


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One session, as `loaderd status` shows it."""

    session: int
    plan: str
    seeds: str
    epoch: int
    step: int
    num_steps: int
    in_flight: int
    window: int
    batches: int
    rows: int = 0
    edges: int = 0
    ready_ns: int = 0  # time of its runs in which a finished batch was with the client
    starved_ns: int = 0  # time of its runs in which none was
    owner: str = ""  # user on this machine, or name of the key
    held_bytes: int = 0  # of the arena, by this session alone
    store: str = ""


class StoreStatus(msgspec.Struct, frozen=True):
    """One store, as `loaderd status` shows it."""

    name: str
    path: str  # as it was given
    fingerprint: str
    io_mode: str  # "O_DIRECT" and by which call, or "buffered" and why
    sessions: int
    retired: bool = False  # opened again, or dropped: it serves the sessions that it has


class StatusReply(Message, frozen=True, kw_only=True, tag="status-reply"):
    """Daemon: the answer to StatusRequest."""

    request: int
    stores: tuple[StoreStatus, ...]
    pid: int
    uptime_s: float
    budget_bytes: int
    ledger: tuple[LedgerEntry, ...]
    sessions: tuple[SessionStatus, ...]
    counters: dict[str, int]
    draining: bool = False
    workers: int = 0  # threads that build
    readers: int = 0  # threads that read
    reload_error: str = ""  # of the newest reload; "": there was none, or it succeeded
    compiling: str = ""  # the kernel that batches wait for; "": none


ClientMessage = (
    Attach | Ids | Start | Release | Detach | StatusRequest | Hello | Heartbeat | Taken
    | RowsWanted
)  # fmt: skip
DaemonMessage = (
    Attached | BatchReady | ChunkReady | RowGroup | Piece | Skipped | ErrorReply | StatusReply
    | Welcome | Heartbeat | IdsWanted | RowsGiven
)  # fmt: skip

MessageT = TypeVar("MessageT")
_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_client: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_daemon: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)


def encode(message: Message) -> bytes:
    """The frame of a message: the MessagePack array [PROTOCOL_VERSION, map]."""
    return _encoder.encode((PROTOCOL_VERSION, message))


def _decode(frame: bytes | memoryview, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    try:
        version, body = _envelope.decode(frame)
        if version != PROTOCOL_VERSION:
            raise BadMessage(f"peer speaks protocol {version}, this side {PROTOCOL_VERSION}")
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{len(frame)}-byte frame: {error}") from error


def decode_client(frame: bytes | memoryview) -> ClientMessage:
    """The message that a client sent.  Raises BadMessage."""
    return _decode(frame, _client)


def decode_daemon(frame: bytes | memoryview) -> DaemonMessage:
    """The message that the daemon sent.  Raises BadMessage."""
    return _decode(frame, _daemon)
