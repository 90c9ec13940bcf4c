"""One way to measure: peers in processes of their own, rounds in turn, a JSON line a peer."""

import json
import multiprocessing
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.resources import bytes_read, descendants, proportional_bytes
from tools.machine import machine, today

POLL_S = 0.1
STOP_S = 30.0
CONTEXT = multiprocessing.get_context("spawn")  # a peer's memory is its own

Run = Callable[[], Mapping[str, float]]  # one round: figure -> value


class Skipped(Exception):
    """A peer cannot take part here; the message says why."""


class Peer(NamedTuple):
    """One way to do the work.

    `open(*arguments)` is a context manager that prepares, and gives the function that does one
    round; both run in a process of the peer's own, so `open` is a function of a module.
    """

    name: str
    open: Callable[..., AbstractContextManager[Run]]
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True)
class Found:
    """What was measured of a peer."""

    figures: dict[str, list[float]] = field(default_factory=dict)  # one value a round
    bytes_read: list[int] = field(default_factory=list)
    peak_bytes: int = 0  # of its processes, in the round before the timed ones
    skipped: str = ""

    def add(self, figures: Mapping[str, float], num_read: int) -> None:
        """One more round."""
        for figure, value in figures.items():
            self.figures.setdefault(figure, []).append(value)
        self.bytes_read.append(num_read)


class Host:
    """The process of a peer, ready to run rounds."""

    def __init__(self, peer: Peer) -> None:
        """Raises Skipped, RuntimeError: the peer could not be prepared."""
        self._name = peer.name
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(peer, theirs))
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int]:
        """Its processes."""
        assert self._process.pid is not None
        return descendants(self._process.pid)

    def run(self) -> tuple[Mapping[str, float], int]:
        """One round: its figures, and the bytes that were read from disk meanwhile."""
        before = bytes_read(self.pids())
        self._pipe.send("run")
        figures = self._receive()
        return figures, bytes_read(self.pids()) - before

    def watch(self) -> int:
        """One round that is not timed: the most memory held in it."""
        peak = 0
        self._pipe.send("run")
        while not self._pipe.poll(POLL_S):
            peak = max(peak, proportional_bytes(self.pids()))
        peak = max(peak, proportional_bytes(self.pids()))
        self._receive()
        return peak

    def close(self) -> None:
        """Let the peer clean up, and end its process."""
        self._pipe.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self._name}: its process ended") from error
        if kind == "skipped":
            raise Skipped(value)
        if kind == "failed":
            raise RuntimeError(f"{self._name}: {value}")
        return value


def _serve(peer: Peer, pipe: Connection) -> None:
    """In the peer's process: prepare, then a round for each message, until the pipe closes."""
    multiprocessing.set_start_method("fork", force=True)  # what scripts have, not its parent's way
    try:
        with peer.open(*peer.arguments) as run:
            pipe.send(("ready", None))
            while True:
                try:
                    pipe.recv()
                except EOFError:
                    return
                pipe.send(("ran", dict(run())))
    except Skipped as error:
        pipe.send(("skipped", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


@contextmanager
def hosts(peers: list[Peer], found: dict[str, Found]) -> Iterator[dict[str, Host]]:
    """The peers that can take part, warm: each has done one round, in which memory was watched."""
    with ExitStack() as stack:
        ready = {}
        for peer in peers:
            try:
                host = Host(peer)
            except Skipped as error:
                found[peer.name].skipped = str(error)
                continue
            stack.callback(host.close)
            found[peer.name].peak_bytes = host.watch()
            ready[peer.name] = host
        yield ready


def measure(
    peers: list[Peer], rounds: int, before: Callable[[], None] | None = None
) -> dict[str, Found]:
    """Every peer once a round, in turn (A B A B ...), all of them prepared; by name.

    `before` is called before each timed round of each peer: to empty caches, say.
    """
    found = {peer.name: Found() for peer in peers}
    with hosts(peers, found) as ready:
        for _ in range(rounds):
            for name, host in ready.items():
                if before is not None:
                    before()
                found[name].add(*host.run())
    return found


def spread(values: list[float] | list[int]) -> dict[str, float]:
    """Median, least and greatest, to five digits."""
    return {
        name: float(f"{value:.5g}")
        for name, value in (
            ("median", statistics.median(values)),
            ("min", min(values)),
            ("max", max(values)),
        )
    }


def report(
    bench: str, setting: Mapping[str, Any], found: Mapping[str, Found], out: str
) -> list[dict[str, Any]]:
    """Print a JSON line per peer, and append them to the file `out` where one is named."""
    lines = []
    for name, peer in found.items():
        line = {"bench": bench, "peer": name, "date": today(), "machine": machine(), **setting}
        if peer.skipped:
            line["skipped"] = peer.skipped
        else:
            line["rounds"] = len(peer.bytes_read)
            line |= {figure: spread(values) for figure, values in peer.figures.items()}
            line["bytes_read"] = spread(peer.bytes_read)
            line["peak_bytes"] = peer.peak_bytes
        lines.append(line)
        print(json.dumps(line), flush=True)
    if out:
        with Path(out).open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    return lines
