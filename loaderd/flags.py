"""Options of the `loaderd` command: what each is called, bounded by, and said to be."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from loaderd.shell.registry import MAX_SESSIONS

MOST_WINDOW = 1 << 20
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


def _serve(name: str, meaning: str, *flags: str, **bounds: Any) -> Any:
    """An option of `serve`, which LOADERD_`name` may give too."""
    return typer.Option(*flags, envvar=f"LOADERD_{name}", help=meaning, **bounds)


_WORKERS = "threads that build batches; 0: as cores"
_READERS = "threads that read blocks; 0: eight"
_MEM = "memory to use, such as 512M or 32G"

Endpoint = Annotated[str, _serve("ENDPOINT", _WHERE)]
AnyEndpoint = Annotated[str, _serve("ENDPOINT", f"{_WHERE}, or tcp://HOST:PORT")]
Json = Annotated[bool, typer.Option("--json", help="for scripts")]
TrialMem = Annotated[str, typer.Option(help=_MEM)]
TrialWorkers = Annotated[int, typer.Option(min=0, max=256, help=_WORKERS)]
TrialReaders = Annotated[int, typer.Option(min=0, max=256, help=_READERS)]

StorePaths = Annotated[
    list[Path], typer.Argument(envvar="LOADERD_STORE", help="folders of different names")
]
Mem = Annotated[str, _serve("MEM", _MEM)]
Workers = Annotated[int, _serve("WORKERS", _WORKERS, min=0, max=256)]
Readers = Annotated[int, _serve("READERS", _READERS, min=0, max=256)]
SessionShare = Annotated[
    float,
    _serve("SESSION_SHARE", "of free memory that a session of hyperbatches takes", min=0.1, max=1),
]
Trace = Annotated[Path | None, _serve("TRACE", "record what hyperbatches need, for tools.replay")]
DryRun = Annotated[
    bool, _serve("DRY_RUN", "print where the memory would go, and exit", "--dry-run")
]
Reserve = Annotated[
    str, _serve("RESERVE", "of the memory, for tables of stores that a reload opens")
]
MetricsPort = Annotated[
    int,
    _serve("METRICS_PORT", "of metrics and the page of live charts; 0: none", min=0, max=65535),
]
MetricsHost = Annotated[str, _serve("METRICS_HOST", "address of that port")]
LogFormatOption = Annotated[LogFormat, _serve("LOG_FORMAT", "of events, on stderr")]
LogLevelOption = Annotated[LogLevel, _serve("LOG_LEVEL", "the least of what is logged")]
Group = Annotated[str, _serve("GROUP", "whose members may attach, too")]
UserSessions = Annotated[
    int, _serve("USER_SESSIONS", "open ones of one user", min=1, max=MAX_SESSIONS)
]
UserWindow = Annotated[
    int, _serve("USER_WINDOW", "batches in flight of one user", min=1, max=MOST_WINDOW)
]
UserShare = Annotated[float, _serve("USER_SHARE", "of the arena, for one user", min=0.01, max=1)]
Listen = Annotated[str, _serve("LISTEN", "tcp://HOST:PORT, for trainers elsewhere")]
Keys = Annotated[Path | None, _serve("SERVE_KEYS", "folder of keys, for --listen")]
RemoteCredit = Annotated[str, _serve("REMOTE_CREDIT", "bytes on their way to a session elsewhere")]


def config(callback: Any) -> Any:
    """The file of these options, which `callback` reads before the others."""
    meaning = "TOML file of these options; command line and environment go before it"
    return _serve("CONFIG", meaning, is_eager=True, callback=callback)
