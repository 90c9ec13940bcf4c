"""Options of the `loaderd` command, in groups: each a frozen record, and a panel of --help."""

from dataclasses import MISSING, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from blockstore.flags import flag
from blockstore.objects.bucket import WAIT_S as WAIT_OBJECT_S
from blockstore.objects.bucket import parse_url
from blockstore.objects.remote import ObjectStores
from blockstore.units import parse_bytes
from loaderd.api.errors import Refused
from loaderd.api.peers import WAIT_S, PeerAddresses, read_peers
from loaderd.api.protocol import Attach, Labor
from loaderd.api.tcp import parse_tcp
from loaderd.memory.ledger import EngineSettings
from loaderd.plans.samplers import load_sampler
from loaderd.server.daemon import Access
from loaderd.server.owners import UserLimits, group_id
from loaderd.server.registry import MAX_SESSIONS
from loaderd.server.remote import Listening
from loaderd.sessions.engine import default_settings

_MAX_WINDOW = 1 << 20
_WHERE = "ipc:///path/of/the/socket"


class LogFormat(StrEnum):
    """Of the daemon's log."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """The least of what is logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _serve(name: str, default: Any, text: str, **more: Any) -> Any:
    """An option of `serve`, which LOADERD_`name` may give too."""
    return flag(default, text, envvar=f"LOADERD_{name}", **more)


StorePaths = Annotated[
    list[Path], Argument(envvar="LOADERD_STORE", help="folders or URLs of different names")
]
Endpoint = Annotated[str, Option(envvar="LOADERD_ENDPOINT", help=_WHERE)]
AnyEndpoint = Annotated[
    str, Option(envvar="LOADERD_ENDPOINT", help=f"{_WHERE}, or tcp://HOST:PORT")
]
Json = Annotated[bool, Option("--json", help="for scripts")]
Mem = Annotated[str, Option(help="memory that `serve` is to use", metavar="SIZE")]


@dataclass(frozen=True)
class DaemonResources:
    """Resources."""

    mem: str = _serve("MEM", "2G", "memory to use, such as 512M or 32G", metavar="SIZE")
    workers: int = _serve("WORKERS", 0, "threads that build batches; 0: by cores", min=0, max=256)
    readers: int = _serve("READERS", 0, "threads that read blocks; 0: eight", min=0, max=256)

    def settings(self) -> EngineSettings:
        """Raises ValueError: no such size."""
        return default_settings(parse_bytes(self.mem), self.workers, self.readers)


@dataclass(frozen=True)
class ServeResources(DaemonResources):
    """Resources."""

    session_share: float | None = _serve(
        "SESSION_SHARE", None,
        "of free memory that a session of hyperbatches takes; omitted: it leaves 5 %, or 64 MiB",
        min=0.1, max=1,
    )  # fmt: skip
    reserve: str = _serve(
        "RESERVE", "", "of the memory, for tables of stores that a reload opens", metavar="SIZE"
    )
    while_used: Path | None = _serve(
        "WHILE_USED", None, "end when no other process holds a lock (flock) on this file"
    )
    samplers: str = _serve(
        "SAMPLERS", "", "of your own, of subgraphs: MODULE:CLASS, or several with commas"
    )
    dry_run: bool = flag(
        False, "print where the memory would go, and exit", "--dry-run", envvar="LOADERD_DRY_RUN"
    )

    def load_samplers(self) -> None:
        """Import what is named.  Raises ValueError: there is no such sampler."""
        for place in filter(None, self.samplers.split(",")):
            load_sampler(place)

    def settings(self) -> EngineSettings:
        reserved = parse_bytes(self.reserve) if self.reserve else 0
        found = super().settings()
        share = self.session_share or found.session_share
        return replace(found, session_share=share, reserve_bytes=reserved)


@dataclass(frozen=True)
class Monitoring:
    """Monitoring."""

    metrics_port: int = _serve(
        "METRICS_PORT", 0, "of metrics and the page of live charts; 0: none", min=0, max=65535
    )
    metrics_host: str = _serve("METRICS_HOST", "127.0.0.1", "address of that port")
    log_format: LogFormat = _serve("LOG_FORMAT", LogFormat.text, "of events, on stderr")
    log_level: LogLevel = _serve("LOG_LEVEL", LogLevel.info, "the least of what is logged")
    trace: Path | None = _serve("TRACE", None, "record what hyperbatches need, for tools.replay")


@dataclass(frozen=True)
class Users:
    """Users of this machine."""

    group: str = _serve("GROUP", "", "whose members may attach, too")
    user_sessions: int = _serve(
        "USER_SESSIONS", MAX_SESSIONS, "open ones of one user", min=1, max=MAX_SESSIONS
    )
    user_window: int = _serve(
        "USER_WINDOW", _MAX_WINDOW, "batches in flight of one user", min=1, max=_MAX_WINDOW
    )
    user_share: float = _serve("USER_SHARE", 1.0, "of the arena, for one user", min=0.01, max=1)


@dataclass(frozen=True)
class OtherMachines:
    """Other machines."""

    listen: str = _serve("LISTEN", "", "tcp://HOST:PORT, where they are served")
    keys: Path | None = _serve("SERVE_KEYS", None, "folder of keys, for --listen")
    remote_credit: str = _serve(
        "REMOTE_CREDIT", "128M", "bytes on their way to one session", metavar="SIZE"
    )
    peers: Path | None = _serve("PEERS", None, "file: where the other parts of the store are")
    peer_wait: float = _serve("PEER_WAIT", WAIT_S, "seconds that a peer may stay away", min=0)

    def addresses(self) -> PeerAddresses | None:
        """Raises Refused: the file cannot be read, or this daemon listens nowhere."""
        if self.peers is None:
            return None
        if not self.listen:
            raise Refused("--peers: expected --listen tcp://HOST:PORT beside it, for the others")
        return read_peers(self.peers, self.keys and self.keys.expanduser(), self.peer_wait)

    def listening(self) -> Listening | None:
        """Raises Refused: they cannot be served."""
        credit = parse_bytes(self.remote_credit)
        if not self.listen:
            if self.keys is not None:
                raise Refused("--keys: expected --listen tcp://HOST:PORT beside it")
            return None
        found = Listening(parse_tcp(self.listen), self.keys and self.keys.expanduser(), credit)
        if found.address.keys:
            raise Refused(f"--listen {self.listen}: expected the folder of keys as --keys")
        found.pair()
        return found


@dataclass(frozen=True)
class ObjectStorage:
    """Object storage."""

    cache: Path | None = _serve("CACHE", None, "folder for pages of stores that are URLs")
    cache_size: str = _serve(
        "CACHE_SIZE", "", "of that folder at most, such as 200G", metavar="SIZE"
    )
    object_wait: float = _serve(
        "OBJECT_WAIT", WAIT_OBJECT_S, "seconds that an object may be tried", min=0
    )

    def stores(self, places: list[Path], mem_bytes: int) -> ObjectStores | None:
        """Where stores are opened that are URLs; None: there are none.  Raises StoreError."""
        urls = [url for place in places if (url := parse_url(str(place)))]
        if not urls:
            return None
        if self.cache is None or not self.cache_size:
            raise Refused(
                f"{urls[0]}: expected --cache FOLDER and --cache-size SIZE beside it: the disk of "
                "this machine where its pages are kept"
            )
        size = parse_bytes(self.cache_size)
        return ObjectStores(self.cache.expanduser(), size, mem_bytes, self.object_wait)


def access(users: Users, others: OtherMachines) -> Access:
    """Whom a daemon serves.  Raises Refused: a group or an address that cannot be."""
    return Access(
        group_id(users.group) if users.group else None,
        UserLimits(users.user_sessions, users.user_window, users.user_share),
        others.listening(),
    )


@dataclass(frozen=True)
class Sampling:
    """What is sampled."""

    num_neighbors: str = flag("15,10,5", "of each hop, seeds outward: 15 10 5, or 15,10,5")
    batch_size: int = flag(1000, "seeds of a batch", min=1)
    split: str = flag("train", "whose nodes are the seeds, or all")
    seed_type: str = flag("", "node type of the seeds, of several")
    sampler: str = flag("neighbor", "how neighbors are drawn: neighbor or labor")
    macro_partitions: int = flag(0, "of a macro-batch; 0: an eighth of the store's", min=0)

    def request(self, hops: list[int] | None) -> Attach:
        """`hops`: more of `num_neighbors`.  Raises ValueError: no numbers, or no such sampler."""
        fanouts = _fanouts(self.num_neighbors)
        if self.sampler not in ("neighbor", "labor"):
            raise ValueError(f"--sampler {self.sampler!r}: expected neighbor or labor")
        return Attach(
            token=0, request=0, num_neighbors=(*fanouts, *(hops or ())),
            batch_size=self.batch_size, split=self.split, seed_type=self.seed_type,
            macro_partitions=self.macro_partitions,
            labor=Labor() if self.sampler == "labor" else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Presampling:
    """What is sampled."""

    out: Path = flag(MISSING, "the file of counts")
    num_neighbors: str = flag("15,10,5", "of each hop, seeds outward: 15,10,5")
    batch_size: int = flag(1000, "seeds of a batch, of all trainers", min=1)
    epochs: int = flag(10, "that are counted", min=1)
    split: str = flag("train", "whose nodes are the seeds, or all")
    frontier: str = flag("new", "what a hop expands: new nodes, or all of its layer")
    seed: int = flag(0, "of the draws")

    def request(self) -> Attach:
        """Raises ValueError: no numbers."""
        return Attach(
            token=0, request=0, num_neighbors=tuple(_fanouts(self.num_neighbors)),
            batch_size=self.batch_size, split=self.split, frontier=self.frontier, seed=self.seed,
        )  # fmt: skip


def _fanouts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--num-neighbors {text!r}: expected numbers such as 15 10 5") from None


def config(callback: Any) -> Any:
    """The file of the options of `serve`, which `callback` reads before the others."""
    meaning = "TOML file of these options; command line and environment go before it"
    return Option(envvar="LOADERD_CONFIG", help=meaning, is_eager=True, callback=callback)
