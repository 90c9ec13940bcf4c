"""Faults at random moments over running trainers: `python -m tools.storm --faults 200 --seed 1`.

The store is several times larger than the budget (`--times`), and visitors attach, read a little
by some plan and go, all the time.  Visitors may be refused; trainers may not: what a session needs
at least fits its fair share of `--mem` while a visitor is there.  Trainers read epoch after epoch
from one daemon, write down the sha256 of each batch and save their state every few steps.
Meanwhile trainers and the daemon are killed, stopped for a while, or (the daemon) told to end, at
moments drawn from the seed; a killed process is started again, a trainer from its last saved state.
The last fifth of the faults leaves the daemon alone, and then the visitors go.  Afterwards,
checked:

- in the history of each rank's last saved state and what follows it every step of every epoch
  occurs once and in order, with the sha256 of an undisturbed run; within one life of a trainer,
  whatever happened to the daemon, steps follow each other;
- the daemon's ledger, its slots and its descriptors are back at what they were before any session;
- trainers hold no more descriptors and arenas than before they connected;
- the daemon ends with exit code 0, and no file is left.

One JSON line for all; fails at the first difference.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from blockstore.units import parse_bytes
from loaderd.errors import DaemonError, NoDaemon, SessionLost
from loaderd.protocol import StatusReply
from loaderd.wire.endpoint import parse_endpoint
from loaderd.wire.transport import ask_status
from preprocess.generate import GraphRecipe, generate
from preprocess.progress import Progress
from tools.machine import machine, today
from tools.soak.trainer import Work, visit
from tools.storm_trainer import Job, Member, open_files, train

TRAINERS = 4
KINDS = {  # of faults: how often
    "kill trainer": 0.35,
    "stop trainer": 0.2,
    "kill daemon": 0.2,
    "end daemon": 0.1,
    "stop daemon": 0.15,
}
# jobs of a mixed storm: the first two share what is built
MIXED = ("minibatch", "minibatch", "hyperbatch", "macrobatch", "chunks", "rows")
CALM = 0.2  # share of the faults, the last ones, that leave the daemon alone
DEGREE, HOPS = 8, 2
_SEEDS, _VALID, _TEST = 2_000, 0.1, 0.1  # training nodes; shares of the nodes
STOPPED_S = 1.0  # at most
PAUSE_S = 0.3  # before a killed process is started again, at most
SETTLE_S = 30.0
_CONTEXT = multiprocessing.get_context("forkserver")


class Fault(NamedTuple):
    """What happened to whom."""

    after_s: float
    kind: str
    rank: int  # -1: the daemon


class Served(NamedTuple):
    """What a daemon holds."""

    ledger: list[tuple[str, int]]
    slots: tuple[int, int]  # that are the pools', that are pinned
    files: dict[str, int]


def serve_words(store: Path, endpoint: str, mem: str, workers: int) -> list[str]:
    """The command."""
    words = [sys.executable, "-m", "loaderd", "serve", str(store), "--endpoint", endpoint]
    return [*words, "--mem", mem, "--workers", str(workers)]


def start_daemon(words: list[str], notes: Path) -> "subprocess.Popen[bytes]":
    """Not waited for.  `notes` gets what it says."""
    with notes.open("ab") as stream:
        return subprocess.Popen(words, stdout=stream, stderr=stream)


def last_line(notes: Path) -> str:
    """Of what a daemon said."""
    return "".join(notes.read_text(errors="replace").splitlines()[-1:])


def wait_status(endpoint: str, wanted: Callable[[StatusReply], bool]) -> StatusReply:
    """The daemon's status once it is as wanted.  Raises SystemExit: it never is."""
    end, last = time.monotonic() + SETTLE_S, "no daemon"
    while time.monotonic() < end:
        try:
            reply = ask_status(parse_endpoint(endpoint))
        except DaemonError as error:
            last = str(error)
        else:
            if wanted(reply):
                return reply
            last = f"{len(reply.sessions)} sessions"
        time.sleep(0.05)
    raise SystemExit(f"{endpoint}: not as expected after {SETTLE_S:g} s: {last}")


def served(reply: StatusReply) -> Served:
    """What it holds now."""
    counters = reply.counters
    return Served(
        [(entry.name, entry.num_bytes) for entry in reply.ledger],
        (counters["slots_in_pools"], counters["slots_pinned"]),
        open_files(reply.pid),
    )


def holds_nothing(reply: StatusReply) -> bool:
    """Whether no session is there, nor memory of one that has ended."""
    taken = [entry for entry in reply.ledger if entry.name.startswith("session ")]
    return not reply.sessions and not taken


def wait_served(endpoint: str, before: Served) -> None:
    """Raises SystemExit: it holds something else than before, and keeps it."""
    end = time.monotonic() + SETTLE_S
    while True:
        reply = wait_status(endpoint, lambda reply: not reply.sessions)
        if (now := served(reply)) == before:
            return
        if time.monotonic() > end:
            raise SystemExit(f"{endpoint}: holds {now}, before any session {before}")
        time.sleep(0.1)


@contextmanager
def undisturbed(words: list[str], job: Job, notes: Path) -> Iterator[Served]:
    """A daemon to itself; inside, what it holds between sessions.

    The first batch over tcp leaves descriptors with ZeroMQ's threads: each member takes one.
    """
    process = start_daemon(words, notes)
    try:
        slots = served(wait_status(job.endpoint, lambda _: True)).slots
        for number in range(len(job.members)):
            data = job.dataset(number)
            next(iter(data))
            data.close()
        yield served(
            wait_status(job.endpoint, lambda r: holds_nothing(r) and served(r).slots == slots)
        )
    finally:
        process.terminate()
        code = process.wait(timeout=SETTLE_S)
    if code:
        raise SystemExit(f"the daemon ended with {code}: {last_line(notes)}")


def expected_digests(job: Job, epochs: int) -> list[dict[tuple[int, int], str]]:
    """Per rank: of each (epoch, step)."""
    found: list[dict[tuple[int, int], str]] = []
    for rank in range(len(job.members)):
        data = job.dataset(rank)
        found.append({(b.epoch, b.step): job.digest(rank, b) for _ in range(epochs) for b in data})
        data.close()
    return found


@dataclass
class Life:
    """One log of a trainer."""

    begin: tuple[int, int]  # the last step consumed before
    steps: list[tuple[int, int, str]]
    leaked: dict[str, int] | None = None  # at its end, where it came to it


def read_life(path: Path) -> Life | None:
    """None: it was killed before it began.  Raises SystemExit: it failed."""
    lines = path.read_text().splitlines()
    if not lines:
        return None
    words = [line.split(" ", 2) for line in lines]
    life = Life((0, -1), [])
    for first, *rest in words:
        match first:
            case "from":
                life.begin = int(rest[0]), int(rest[1])
            case "end":
                life.leaked = json.loads(" ".join(rest))
            case "error":
                raise SystemExit(f"{path.name}: {' '.join(rest)}")
            case _:
                life.steps.append((int(first), int(rest[0]), rest[1]))
    return life


def check_history(rank: int, lives: list[Life], expected: dict[tuple[int, int], str]) -> None:
    """Raises SystemExit: a step is missing, repeated, out of order or another one."""
    order = list(expected)
    place = {at: i for i, at in enumerate(order)}
    history: list[tuple[int, int]] = []
    for number, life in enumerate(lives):
        where = f"rank {rank}, life {number}"
        kept = sum(at < life.begin or at == life.begin for at in history)
        if kept and history[kept - 1] != life.begin and life.begin[1] >= 0:
            raise SystemExit(f"{where}: begins after {life.begin}, which nobody consumed")
        history = history[:kept]
        for epoch, step, found in life.steps:
            at = epoch, step
            if at not in place or place[at] != len(history):
                raise SystemExit(f"{where}: {at} stands where {order[len(history)]} is expected")
            if found != expected[at]:
                raise SystemExit(f"{where}: {at} has another sha256 than the undisturbed run")
            history.append(at)
    if history != order:
        raise SystemExit(f"rank {rank}: ends with {history[-1:]}, expected {order[-1]}")


@dataclass
class Storm:
    """Processes, and what is to happen to them."""

    job: Job
    words: list[str]
    chance: random.Random
    gap_s: float  # between two faults, on average
    notes: Path  # what daemons said
    daemon: "subprocess.Popen[bytes]"
    guests: Work  # what visitors read
    visitors: int = 0  # so far
    visitor: BaseProcess | None = None  # the one that is there
    trainers: dict[int, BaseProcess] = field(default_factory=dict)  # those that run
    lives: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    ending: bool = False  # the daemon was told to
    peace: bool = False  # nobody attaches but trainers that were killed
    down: bool = False  # it was killed, and is not started yet
    begun: float = field(default_factory=time.monotonic)

    def start(self, rank: int) -> None:
        """A trainer lives, from its last saved state on."""
        life = self.lives[rank]
        self.lives[rank] += 1
        process = _CONTEXT.Process(target=train, args=(self.job, rank, life), daemon=True)
        process.start()
        self.trainers[rank] = process

    def restart_daemon(self) -> None:
        """After it was killed, or has ended."""
        self.daemon = start_daemon(self.words, self.notes)

    def run_until(self, end: float) -> None:
        """Do what is due, look after who has ended, until then."""
        while (now := time.monotonic()) < end:
            ready = [entry for entry in self.due if entry[0] <= now]
            self.due = [entry for entry in self.due if entry[0] > now]
            for _, action in ready:
                action()
            self.look()
            time.sleep(0.01)

    def look(self) -> None:
        """Raises SystemExit: somebody ended who was not told to."""
        for rank, process in list(self.trainers.items()):
            if process.exitcode is not None:
                # first: the log says of what it failed
                life = read_life(self.job.log(rank, self.lives[rank] - 1))
                if process.exitcode or life is None:
                    raise SystemExit(f"trainer {rank} ended with {process.exitcode}")
                del self.trainers[rank]
                self.done.add(rank)
        self.receive()
        if not self.down and self.daemon.poll() is not None:
            # before it has its handlers a signal ends it the usual way
            if self.daemon.returncode not in (0, -signal.SIGTERM) or not self.ending:
                code, said = self.daemon.returncode, last_line(self.notes)
                raise SystemExit(f"the daemon ended with {code}: {said}")
            self.ending = False
            self.restart_daemon()

    def receive(self) -> None:
        """Somebody attaches all the time.  Raises SystemExit: a visitor failed."""
        if self.visitor is not None and self.visitor.exitcode is not None:
            if self.visitor.exitcode:
                raise SystemExit(f"visitor {self.visitors} ended with {self.visitor.exitcode}")
            self.visitor.close()
            self.visitor = None
        if self.visitor is None and not self.peace:
            self.visitors += 1
            self.visitor = _CONTEXT.Process(
                target=come_and_go, args=(self.guests, self.visitors), daemon=True
            )
            self.visitor.start()

    def send_home(self) -> None:
        """Nobody attaches any more."""
        self.peace = True
        if self.visitor is not None:
            self.visitor.kill()
            self.visitor.join()
            self.visitor = None

    def later(self, most_s: float, action: Callable[[], None]) -> None:
        """So much later, at most."""
        self.due.append((time.monotonic() + self.chance.uniform(0, most_s), action))

    def strike(self, calm: bool) -> None:
        """One fault."""
        calm = calm or self.down or self.ending
        kinds = {k: w for k, w in KINDS.items() if not (calm and k.endswith("daemon"))}
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        rank = -1
        if kind.endswith("trainer"):
            if not self.trainers:
                return
            rank = self.chance.choice(sorted(self.trainers))
        self.faults.append(Fault(round(time.monotonic() - self.begun, 3), kind, rank))
        getattr(self, kind.replace(" ", "_"))(*([rank] if rank >= 0 else []))

    def kill_trainer(self, rank: int) -> None:
        """It is started again a little later."""
        process = self.trainers.pop(rank)
        process.kill()
        process.join()
        process.close()
        self.later(PAUSE_S, lambda: self.start(rank))

    def stop_trainer(self, rank: int) -> None:
        """For a while."""
        process = self.trainers[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)

        def go_on() -> None:
            if self.trainers.get(rank) is process and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)

        self.later(STOPPED_S, go_on)

    def kill_daemon(self) -> None:
        """It is started again a little later."""
        self.daemon.kill()
        self.daemon.wait()
        self.down = True

        def again() -> None:
            self.restart_daemon()
            self.down = False

        self.later(PAUSE_S, again)

    def end_daemon(self) -> None:
        """It is started again when it has ended."""
        self.daemon.terminate()
        self.ending = True

    def stop_daemon(self) -> None:
        """For a while."""
        process = self.daemon
        process.send_signal(signal.SIGSTOP)

        def go_on() -> None:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)

        self.later(STOPPED_S, go_on)

    def rage(self, count: int) -> None:
        """All faults, then peace."""
        for rank in range(len(self.job.members)):
            self.start(rank)
        while len(self.faults) < count:
            self.run_until(time.monotonic() + self.chance.expovariate(1 / self.gap_s))
            self.strike(calm=len(self.faults) >= (1 - CALM) * count)
        self.run_until(time.monotonic() + max(STOPPED_S, PAUSE_S) + 0.1)

    def finish(self) -> int:
        """Let trainers come to an end; returns how many epochs there were."""
        self.send_home()
        last = 0
        for rank in range(len(self.job.members)):
            for life in range(self.lives[rank]):
                found = read_life(self.job.log(rank, life)) if self._has(rank, life) else None
                last = max(last, found.steps[-1][0] if found and found.steps else 0)
        fresh = self.job.last_epoch.with_suffix(".new")
        fresh.write_text(str(last + 1))
        fresh.replace(self.job.last_epoch)
        end = time.monotonic() + SETTLE_S + 10 * self.job.think_s * 1000
        while self.trainers:
            if time.monotonic() > end:
                raise SystemExit(f"trainers {sorted(self.trainers)} do not come to an end")
            self.run_until(time.monotonic() + 0.1)
        return last + 2

    def _has(self, rank: int, life: int) -> bool:
        return self.job.log(rank, life).exists()

    def lives_of(self, rank: int) -> list[Life]:
        """In their order, those that began."""
        paths = [self.job.log(rank, n) for n in range(self.lives[rank]) if self._has(rank, n)]
        lives = [life for path in paths if (life := read_life(path)) is not None]
        return [life for life in lives if life.steps or life.leaked is not None]

    def close(self) -> None:
        """End whoever still runs."""
        self.send_home()
        for process in self.trainers.values():
            process.kill()
            process.join()
        self.daemon.kill()
        self.daemon.wait()


def members_of(plan: str, count: int, tcp: str) -> tuple[Member, ...]:
    """Ranks of one job, or, where the plan is "mixed", jobs by every plan, the first two the same.

    tcp   where every other one connects; "": none
    """
    if plan == "mixed":
        found = [Member(p) for p in MIXED[:count]]
    else:
        found = [Member(plan, rank, count) for rank in range(count)]
    return tuple(m._replace(endpoint=tcp if n % 2 else "") for n, m in enumerate(found))


def free_port() -> int:
    """Of this host, at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def make_store(folder: Path, num_bytes: int = 0) -> Path:
    """A generated one of every plan's needs: of so many bytes, about; without, a small one."""
    nodes, width = 12_000, 16
    if num_bytes > nodes * _node_bytes(width):
        width = 64
        nodes = num_bytes // _node_bytes(width)
    recipe = GraphRecipe(
        nodes, DEGREE, width, 4, train=_SEEDS / nodes, valid=_VALID, test=_TEST, seed=11
    )
    with (folder / "progress").open("w") as stream:
        generate(folder / "graph", recipe, Progress(stream))
    words = [sys.executable, "-m", "preprocess", "ingest", str(folder / "graph")]
    words += [str(folder / "store"), "--mem", "256M", "--block-size", "16K", "--partitions", "64"]
    subprocess.run(words, check=True, capture_output=True)
    words = [sys.executable, "-m", "preprocess", "hops", str(folder / "store")]
    words += ["--operator", "sym", "--hops", str(HOPS), "--mem", "256M"]
    subprocess.run(words, check=True, capture_output=True)
    return folder / "store"


def _node_bytes(width: int) -> int:
    """Of a node's features and edges, and of the propagated rows of a part of the nodes."""
    return int(4 * (width * (1 + (HOPS + 1) * (_VALID + _TEST)) + DEGREE))


def come_and_go(work: Work, number: int) -> None:
    """A visitor: what ends it is its own fault, or that the daemon was away for long."""
    with suppress(SessionLost, NoDaemon):
        visit(work, f"visitor {number}", number)


def check(storm: Storm, epochs: int, in_peace: Job, words: list[str]) -> dict[str, Any]:
    """All that must hold after the storm; what was counted.  Raises SystemExit.

    in_peace   the same job at a daemon that `words` start
    """
    job = storm.job
    with undisturbed(words, in_peace, storm.notes) as before:
        expected = expected_digests(in_peace, epochs)
        wait_served(in_peace.endpoint, before)
    steps = 0
    for rank in range(len(job.members)):
        lives = storm.lives_of(rank)
        check_history(rank, lives, expected[rank])
        steps += sum(len(life.steps) for life in lives)
        if lives[-1].leaked:
            raise SystemExit(f"rank {rank} still holds {lives[-1].leaked}")
    wait_served(job.endpoint, before)
    storm.daemon.terminate()
    code = storm.daemon.wait(timeout=SETTLE_S)
    left = sorted(p.name for p in parse_endpoint(job.endpoint).path.parent.iterdir())
    if code or left:
        raise SystemExit(f"the daemon ended with {code}: {last_line(storm.notes)}; left: {left}")
    return {
        "epochs": epochs, "steps": sum(map(len, expected)), "consumed": steps,
        "descriptors": sum(before.files.values()), "slots": before.slots[0],
    }  # fmt: skip


def main(words: list[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit where something does not hold."""
    parser = argparse.ArgumentParser(prog="tools.storm", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainers", type=int, default=TRAINERS)
    parser.add_argument("--plan", default="auto", help="or mixed: a job for every plan")
    parser.add_argument("--tcp", action="store_true", help="every other trainer connects by tcp")
    parser.add_argument("--mem", default="32M")
    parser.add_argument("--times", type=float, default=4.0, help="store's bytes, in --mem")
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between two faults")
    parser.add_argument("--think", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="for everything; a temporary one otherwise")
    parser.add_argument("--out", default="")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        ports = [f"tcp://127.0.0.1:{free_port()}" if given.tcp else "" for _ in range(2)]
        members, calm = (members_of(given.plan, given.trainers, tcp) for tcp in ports)
        store = make_store(folder, int(given.times * parse_bytes(given.mem)))
        for kind in ("run", "calm", "logs", "visitors"):
            (folder / kind).mkdir()
        endpoints = [f"ipc://{folder}/{kind}/d" for kind in ("run", "calm")]
        served_by = [
            serve_words(store, endpoint, given.mem, 2) + (["--listen", tcp] if tcp else [])
            for endpoint, tcp in zip(endpoints, ports, strict=True)
        ]
        job = Job(endpoints[0], folder / "logs", members, (5, 3), given.batch_size, 7, given.think)
        _CONTEXT.set_forkserver_preload(["tools.soak.trainer", "tools.storm_trainer"])
        storm = Storm(
            job, served_by[0], random.Random(given.seed), given.gap, folder / "notes",
            start_daemon(served_by[0], folder / "notes"),
            Work(endpoints[0], folder / "visitors", given.batch_size, 7),
        )  # fmt: skip
        try:
            storm.rage(given.faults)
            epochs = storm.finish()
            raged_s = time.monotonic() - storm.begun
            in_peace = job._replace(endpoint=endpoints[1], members=calm)
            counted = check(storm, epochs, in_peace, served_by[1])
        finally:
            storm.close()
    line = {
        "bench": "storm of faults", "date": today(), "machine": machine(), "seed": given.seed,
        "plan": given.plan, "tcp": given.tcp, "mem": given.mem, "times": given.times,
        "trainers": len(members), "visitors": storm.visitors,
        "faults": dict(Counter(fault.kind for fault in storm.faults)),
        "lives": sum(storm.lives.values()), "seconds": round(raged_s, 1), **counted,
        "holds": True,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if given.out:
        with Path(given.out).open("a") as f:
            f.write(json.dumps(line) + "\n")
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
