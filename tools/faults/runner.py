"""A scene for faults: a store that every plan can read, daemons, processes, and final checks.

All fault tools check after all clients have gone (`Scene.finish`): the daemon's ledger, slots and
descriptors are as before any session, its log has no error, it ends with exit code 0, and no file
is left beside its socket.  With `servers` there are that many daemons, each with its part of the
store, and all of this holds for each, except for descriptors: connections to peers stay open.
"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from blockstore.owners import write_owners
from blockstore.store import open_store
from blockstore.units import parse_bytes
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import DaemonError
from loaderd.api.protocol import StatusReply
from loaderd.server.peer_answers import peers_bytes
from loaderd.server.transport import ask_status
from tools.bench.setup import command, free_port, generate, make_parts
from tools.command import byte_size
from tools.faults.growth import ProcessSample, sample
from tools.faults.trainers import OWNERS, Work, open_files, read_again, read_briefly
from tools.group import ControlGroup

CONTEXT = multiprocessing.get_context("forkserver")
DEGREE, HOPS = 8, 2
_SEEDS, _VALID, _TEST = 2_000, 0.1, 0.1  # training nodes; shares of the nodes
SETTLE_S = 30.0
END_S = 120.0
BESIDE, SHORT_LIVED = "trainer", "short-lived"  # names of processes
BESIDE_MEM = 256 << 20  # bytes that a daemon may hold in addition to --mem


@dataclass(frozen=True)
class SceneOptions:
    seed: int = 1
    mem: Annotated[str, byte_size, "of the daemon"] = "32M"
    times: Annotated[float, "bytes of the store, in --mem"] = 4.0
    batch_size: int = 32
    folder: Annotated[Path | None, "for everything; else a temporary one"] = None
    out: Annotated[Path | None, "append the line of JSON"] = None


def make_store(folder: Path, num_bytes: int = 0, times: bool = False) -> Path:
    """Make a generated store that every plan can read, of about `num_bytes`; 0: a small one.

    times   its edges have times in [0, number of nodes)
    """
    nodes, width = 12_000, 16
    if num_bytes > nodes * _node_bytes(width):
        width = 64
        nodes = num_bytes // _node_bytes(width)
    generate(
        folder / "graph", nodes=nodes, degree=DEGREE, features=width, classes=4,
        train=_SEEDS / nodes, valid=_VALID, test=_TEST, seed=11,
    )  # fmt: skip
    if times:
        shape = np.load(folder / "graph" / "edge_index.npy", mmap_mode="r").shape
        drawn = np.random.default_rng(0).integers(0, nodes, shape[1], np.int32)
        np.save(folder / "graph" / "edge_time.npy", drawn)
    words = [str(folder / "graph"), str(folder / "store"), "--mem", "256M", "--block-size", "16K"]
    words += ["--partitions", "64", "--hops", str(HOPS), "--operator", "sym", "--no-summary"]
    command("preprocess", "ingest", *words)
    store = open_store(folder / "store")
    write_owners(store, OWNERS, np.arange(nodes) * 2 // nodes, 2, {})
    return folder / "store"


def _node_bytes(width: int) -> int:
    """Bytes of a node's features and edges, and its share of the propagated rows."""
    return int(4 * (width * (1 + (HOPS + 1) * (_VALID + _TEST)) + DEGREE))


class HeldResources(NamedTuple):
    ledger: list[tuple[str, int]]
    slots: tuple[int, int]  # in pools, pinned
    files: dict[str, int]

    @classmethod
    def of(cls, reply: StatusReply) -> "HeldResources":
        counters = reply.counters
        ledger = [(entry.name, entry.num_bytes) for entry in reply.ledger]
        return cls(
            ledger, (counters["slots_in_pools"], counters["slots_pinned"]), open_files(reply.pid)
        )


class DaemonProcess:
    """A daemon that may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        store: Path,
        mem: str,
        tcp: str = "",
        limits: ControlGroup | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`folder` is made, for its socket; `tcp`: another address; `limits`: its control group."""
        notes = folder.with_name(f"{folder.name}-notes")
        for made in (folder, notes):
            made.mkdir()
        self.endpoint = f"ipc://{folder}/d"
        self.log = notes / "log"  # the same for all: descriptors are compared by name
        words = [sys.executable, "-m", "loaderd", "serve", str(store), "--endpoint", self.endpoint]
        words += ["--mem", mem, "--workers", "2", *(("--listen", tcp) if tcp else ()), *options]
        self._words, self._max_bytes = words, parse_bytes(mem) + BESIDE_MEM
        self._join, self._has_peers = limits.join if limits else None, "--peers" in options
        self.store, self.tcp = store, tcp
        self.told_to_end, self.killed, self.peak_bytes = False, False, 0
        self.before: HeldResources | None = None
        self.start()

    def start(self) -> None:
        self.killed = False
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                self._words, stdout=stream, stderr=stream, preexec_fn=self._join
            )

    def check(self) -> None:
        """Start it again if it has ended as it was told.  Raises SystemExit: it was not told."""
        code = self.process.poll()
        if code is None or self.killed:
            return
        # before its handlers are installed, a signal kills it
        if code not in (0, -signal.SIGTERM) or not self.told_to_end:
            raise SystemExit(f"the daemon ended with {code}: {self.last_line()}")
        self.told_to_end = False
        self.start()

    def kill(self) -> None:
        """Send SIGKILL, and wait until it is gone."""
        if self.process.poll() is None:
            self.check_memory()
        self.killed = True
        self.process.kill()
        self.process.wait()

    def check_memory(self) -> None:
        """Raises SystemExit: its peak memory since its start exceeds the limit."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        if found := re.search(r"VmHWM:\s+(\d+) kB", text):  # missing while it is ending
            self.peak_bytes = max(self.peak_bytes, int(found[1]) << 10)
        if self.peak_bytes > self._max_bytes:
            raise SystemExit(
                f"{self.endpoint}: held {self.peak_bytes:,} bytes, expected at most "
                f"{self._max_bytes:,}"
            )

    def last_line(self) -> str:
        return "".join(self.log.read_text(errors="replace").splitlines()[-1:])

    def status(
        self, wanted: Callable[[StatusReply], bool] = lambda _: True, what: str = ""
    ) -> StatusReply:
        """Wait until its status is as wanted.  Raises SystemExit: it never is."""
        end, found = time.monotonic() + SETTLE_S, "no daemon"
        while time.monotonic() < end:
            try:
                reply = ask_status(parse_endpoint(self.endpoint))
            except DaemonError as error:
                found = str(error)
            else:
                if wanted(reply):
                    return reply
                found = f"{len(reply.sessions)} sessions, {self.held(reply)}"
            time.sleep(0.05)
        raise SystemExit(f"{self.endpoint}: found {found} after {SETTLE_S:g} s, expected {what}")

    def note_before(self) -> None:
        """Note what it holds before any session, with no child that compiles (it has pipes)."""
        looks = [-1]  # number of finished compilations; -1: one is running

        def compiles_none(_reply: StatusReply) -> bool:
            text = self.log.read_text(errors="replace")
            begun, ended = text.count("compiling kernels "), text.count("kernels compiled ")
            looks.append(ended if begun == ended else -1)
            return looks[-2] == looks[-1] >= 0  # nor between the two looks, when it replied

        self.before = self.held(self.status(compiles_none, "compiled kernels"))

    def held(self, reply: StatusReply) -> HeldResources:
        """What it holds; without descriptors if it has peers, as these connections stay open."""
        found = HeldResources.of(reply)
        return found._replace(files={}) if self._has_peers else found

    def idle(self) -> StatusReply:
        """Wait until it has no session; returns its status."""
        return self.status(lambda reply: not reply.sessions, "no session")

    def finish(self) -> dict[str, int]:
        """End it; returns its counters.  Raises SystemExit: a check failed."""
        counters = self.status(
            lambda reply: not reply.sessions and self.held(reply) == self.before,
            f"what it held before any session, {self.before}",
        ).counters
        self.check_memory()
        self.process.terminate()
        code = self.process.wait(SETTLE_S)
        left = sorted(p.name for p in parse_endpoint(self.endpoint).path.parent.iterdir())
        if code or left:
            raise SystemExit(f"the daemon ended with {code}: {self.last_line()}; left: {left}")
        lines = self.log.read_text(errors="replace").splitlines()
        found = [i for i, x in enumerate(lines) if re.search(r" ERROR | CRITICAL |Traceback", x)]
        if found:
            first = "\n".join(lines[max(0, found[0] - 3) : found[0] + 40])
            raise SystemExit(f"{len(found)} errors in the log, the first:\n{first}")
        return counters


@dataclass
class Scene:
    """Daemons, and the processes of their clients."""

    folder: Path
    store: Path
    daemons: dict[str, DaemonProcess]  # by name in messages
    processes: dict[str, BaseProcess] = field(default_factory=dict)  # running, by name
    series: dict[str, list[ProcessSample]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    begun: float = field(default_factory=time.monotonic)

    @property
    def daemon(self) -> DaemonProcess:
        """The first daemon, which trainers use by default."""
        return next(iter(self.daemons.values()))

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun

    def spawn(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        """Start a process under this name."""
        process = CONTEXT.Process(target=target, args=arguments, daemon=True)
        process.start()
        self.processes[name] = process

    def renew_clients(self, work: Work, count: int) -> None:
        """Start short-lived clients until `count` are running."""
        there = sum(name.startswith(SHORT_LIVED) for name in self.processes)
        for _ in range(count - there):
            name = f"{SHORT_LIVED} {self.counts['short_lived']}"
            self.spawn(name, read_briefly, work, name, self.counts["short_lived"])
            self.counts["short_lived"] += 1

    def kill(self, name: str) -> None:
        """Kill a process, if it is running."""
        if process := self.processes.pop(name, None):
            process.kill()
            process.join()
            process.close()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon, or to a process, if it is running."""
        if name in self.daemons:
            self.daemons[name].process.send_signal(number)
        elif name in self.processes:
            pid = self.processes[name].pid
            assert pid is not None
            os.kill(pid, number)

    def ended(self) -> Iterator[tuple[str, int]]:
        """(name, exit code) of processes that have ended by themselves."""
        for name, process in list(self.processes.items()):
            if (code := process.exitcode) is not None:
                del self.processes[name]
                process.close()
                yield name, code

    def watch(self, *names: str) -> None:
        """Sample the daemon and some processes.  Raises SystemExit: one has ended."""
        pids = {"daemon": self.daemon.process.pid} | {n: self.processes[n].pid for n in names}
        for name, pid in pids.items():
            assert pid is not None
            try:
                self.series.setdefault(name, []).append(sample(pid, self.age_s))
            except FileNotFoundError:
                code = self.daemon.process.poll() if name == "daemon" else None
                raise SystemExit(f"{name} ended with {code}") from None

    def join(self, *names: str) -> None:
        """Wait for processes to end.  Raises SystemExit: one fails, or does not end."""
        for name in names:
            process = self.processes[name]
            process.join(END_S)
            if process.exitcode != 0:
                raise SystemExit(f"{name} ended with {process.exitcode}")

    def add_counts(self, folder: Path) -> None:
        for path in folder.glob("*.json"):
            self.counts.update(json.loads(path.read_text()))

    @contextmanager
    def trainer_beside(self, work: Work) -> Iterator[int]:
        """Run a trainer that repeats epoch 0; yields its session.  Raises SystemExit: it fails."""
        stop, notes = CONTEXT.Event(), work.folder / f"{BESIDE}.json"
        self.spawn(BESIDE, read_again, work, BESIDE, stop)
        end = time.monotonic() + END_S
        while not notes.exists():
            if time.monotonic() > end or list(self.ended()):
                raise SystemExit("the trainer beside the attacker does not begin")
            time.sleep(0.05)
        yield int(json.loads(notes.read_text())["session"])
        stop.set()
        self.join(BESIDE)
        self.add_counts(work.folder)

    def finish(self) -> Counter[str]:
        """Check all that must hold at the end; returns all counters.  Raises SystemExit."""
        counts: Counter[str] = Counter()
        for daemon in self.daemons.values():
            counts.update(daemon.finish())
        return counts

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        for daemon in self.daemons.values():
            daemon.kill()


def start_parts(folder: Path, store: Path, mem: str, servers: int) -> list[DaemonProcess]:
    """Start daemons that are each other's peers, each with `mem` beside what peers take."""
    parts = make_parts(store, servers)
    places = [f"tcp://127.0.0.1:{free_port()}" for _ in parts]
    lines = folder / "peers"
    lines.write_text("".join(f"{server} {place}\n" for server, place in enumerate(places)))
    found: list[DaemonProcess] = []
    for server, (part, place) in enumerate(zip(parts, places, strict=True)):
        own = str(parse_bytes(mem) + peers_bytes([open_store(part)]))
        words = ("--peers", str(lines))
        found.append(DaemonProcess(folder / f"run-{server}", part, own, place, options=words))
    return found


@contextmanager
def scene(
    options: SceneOptions,
    store_bytes: int | None = None,
    tcp: str = "",
    limits: ControlGroup | None = None,
    servers: int = 0,
) -> Iterator[Scene]:
    """Set up a scene in a temporary folder; everything is removed at the end.

    limits    control group of the daemon; the edges of the store then have times
    servers   number of daemons with parts of the store; 0: one with all of it
    """
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        default = int(options.times * parse_bytes(options.mem))
        size = default if store_bytes is None else store_bytes
        store = make_store(folder, size, times=limits is not None)
        CONTEXT.set_forkserver_preload(["tools.faults.trainers"])
        with ExitStack() as stack:
            if servers:
                daemons = start_parts(folder, store, options.mem, servers)
            else:
                daemons = [DaemonProcess(folder / "run", store, options.mem, tcp, limits)]
            for daemon in daemons:
                stack.callback(daemon.kill)
            for daemon in daemons:
                daemon.note_before()
            names = ["daemon", *(f"daemon {i}" for i in range(1, len(daemons)))]
            made = Scene(folder, store, dict(zip(names, daemons, strict=True)))
            stack.callback(made.close)
            yield made
