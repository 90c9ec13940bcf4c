"""Faults at random moments over running trainers: `python -m tools.storm --faults 200 --seed 1`.

The store is several times larger than the budget (`--times`), and short-lived clients attach, read
a little by some plan and go, all the time.  They may be refused; trainers may not: what a session
needs at least fits its fair share of `--mem` while such a client is there.  Trainers read epoch
after epoch from one daemon, write down the sha256 of each batch and save their state every few
steps.  Meanwhile faults of the table `FAULTS` hit trainers and the daemon, at moments drawn from
the seed; a killed process is started again, a trainer from its last saved state.  The last fifth of
the faults leaves the daemon alone, and then the short-lived clients go.  With `--servers 4` four
daemons have parts of the store, a trainer or more each, and all faults hit daemons; what batches
should be, a daemon with the whole store says.  Afterwards, beside what every scene of faults checks
(`tools.faults.runner`):

- in the history of each rank's last saved state and what follows it every step of every epoch
  occurs once and in order, with the sha256 of an undisturbed run; within one process of a trainer,
  whatever happened to the daemon, steps follow each other;
- trainers hold no more descriptors and arenas than before they connected.

One JSON line for all; fails at the first difference.
"""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

from tools.bench.setup import free_port
from tools.command import parse, put, stamped
from tools.faults.runner import (
    SETTLE_S,
    SHORT_LIVED,
    DaemonProcess,
    HeldResources,
    Scene,
    SceneOptions,
    scene,
)
from tools.faults.trainers import (
    PLANS,
    Member,
    TrainerJob,
    Work,
    digest,
    replace,
    train,
)

MIXED = ("minibatch", *PLANS)  # jobs of a mixed storm; the first two share batches
DAEMON_SPARED = 0.2  # share of the faults, the last ones, that leave the daemon alone
STOPPED_S = 1.0  # most time that a process is stopped for
PAUSE_S = 0.3  # most time before a killed process is started again
At = tuple[int, int]  # epoch, step


@dataclass(frozen=True)
class StormOptions(SceneOptions):
    faults: int = 200
    trainers: int = 4
    plan: Annotated[
        Literal[
            "auto", "mixed", "minibatch", "hyperbatch", "macrobatch", "chunks", "rows", "split"
        ],
        "of ranks of one job; mixed: a job for every plan",
    ] = "auto"
    tcp: Annotated[bool, "every other trainer connects by tcp"] = False
    gap: Annotated[float, "seconds between two faults, on average"] = 1.0
    think: Annotated[float, "seconds of a step"] = 0.02
    servers: Annotated[int, "daemons with parts of the store; 0: one with all of it"] = 0
    seconds: Annotated[float, "at least, after the last fault"] = 0.0

    def members(self, endpoints: Sequence[str]) -> tuple[Member, ...]:
        """The trainers, assigned to these endpoints in turn."""
        if self.plan == "mixed":
            found = [Member(plan) for plan in MIXED[: self.trainers]]
        else:
            found = [Member(self.plan, rank, self.trainers) for rank in range(self.trainers)]
        count = len(endpoints)
        return tuple(m._replace(endpoint=endpoints[n % count]) for n, m in enumerate(found))


@dataclass
class TrainerRun:
    begin: At  # last step consumed before this run
    steps: list[tuple[int, int, str]]
    leaked: dict[str, int] | None = None  # still held at its end; None: not reached


def read_run(path: Path) -> TrainerRun | None:
    """Parse the log of a run; None: killed before it began.  Raises SystemExit: it failed."""
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return None
    run = TrainerRun((0, -1), [])
    for first, *rest in (line.split(" ", 2) for line in lines):
        match first:
            case "from":
                run.begin = int(rest[0]), int(rest[1])
            case "end":
                run.leaked = json.loads(" ".join(rest))
            case "error":
                raise SystemExit(f"{path.name}: {' '.join(rest)}")
            case _:
                run.steps.append((int(first), int(rest[0]), rest[1]))
    return run


def check_history(rank: int, runs: Sequence[TrainerRun], expected: dict[At, str]) -> None:
    """Raises SystemExit: a step is missing, repeated, out of order or has another digest."""
    order = list(expected)
    place = {at: i for i, at in enumerate(order)}
    history: list[At] = []
    for number, run in enumerate(runs):
        where = f"rank {rank}, run {number}"
        kept = sum(at <= run.begin for at in history)
        if kept and history[kept - 1] != run.begin and run.begin[1] >= 0:
            raise SystemExit(f"{where}: begins after {run.begin}, which nobody consumed")
        history = history[:kept]
        for epoch, step, found in run.steps:
            at = epoch, step
            if place.get(at) != len(history):
                raise SystemExit(f"{where}: {at} stands where {order[len(history)]} is expected")
            if found != expected[at]:
                raise SystemExit(f"{where}: {at} has another sha256 than the undisturbed run")
            history.append(at)
    if history != order:
        raise SystemExit(f"rank {rank}: ends with {history[-1:]}, expected {order[-1]}")


@dataclass
class Storm:
    """Injects faults into the processes of a scene."""

    scene: Scene
    job: TrainerJob
    short_work: Work  # of the short-lived clients
    chance: Random
    gap_s: float
    starts: Counter[int] = field(default_factory=Counter)  # by rank
    faults: Counter[str] = field(default_factory=Counter)
    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    short_lived: int = 1  # clients at a time

    def start(self, rank: int) -> None:
        """Start a trainer from its last saved state."""
        self.scene.spawn(f"trainer {rank}", train, self.job, rank, self.starts[rank])
        self.starts[rank] += 1

    def trainers(self) -> list[int]:
        names = sorted(self.scene.processes)
        return [int(n.removeprefix("trainer ")) for n in names if n.startswith("trainer ")]

    def run_until(self, end: float) -> None:
        """Until then, run due actions and take care of processes that have ended."""
        while (now := time.monotonic()) < end:
            ready = [entry for entry in self.due if entry[0] <= now]
            self.due = [entry for entry in self.due if entry[0] > now]
            for _, action in ready:
                action()
            self.look()
            time.sleep(0.01)

    def look(self) -> None:
        """Replace ended short-lived clients.  Raises SystemExit: a process ended unexpectedly."""
        for name, code in self.scene.ended():
            kind, number = name.split()
            if kind == "trainer":  # its log says why it failed
                run = read_run(self.job.log(int(number), self.starts[int(number)] - 1))
                code = code or int(run is None)
            if code:
                raise SystemExit(f"{name} ended with {code}")
        self.scene.renew_clients(self.short_work, self.short_lived)
        for daemon in self.scene.daemons.values():
            daemon.check()

    def later(self, max_s: float, action: Callable[[], None]) -> None:
        """Schedule an action within `max_s` seconds."""
        self.due.append((time.monotonic() + self.chance.uniform(0, max_s), action))

    def inject(self, spare_daemon: bool) -> None:
        """Cause one fault, drawn by weight; `spare_daemon`: not in the daemon, if there is one."""
        daemons, parts = self.scene.daemons, len(self.scene.daemons) > 1
        name = self.chance.choice(list(daemons))
        away = daemons[name].killed or daemons[name].told_to_end
        if parts and away:
            return
        spare_daemon = not parts and (spare_daemon or away)
        spared = ("daemon",) * spare_daemon + ("trainer",) * parts
        kinds = {k: f.weight for k, f in FAULTS.items() if not k.endswith(spared)}
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        if kind.endswith("trainer"):
            if not (ranks := self.trainers()):
                return
            name = f"trainer {self.chance.choice(ranks)}"
        self.faults[kind] += 1
        FAULTS[kind].cause(self, name)

    def inject_all(self, count: int) -> None:
        for rank in range(len(self.job.members)):
            self.start(rank)
        while (done := self.faults.total()) < count:
            self.run_until(time.monotonic() + self.chance.expovariate(1 / self.gap_s))
            self.inject(spare_daemon=done >= (1 - DAEMON_SPARED) * count)
        self.run_until(time.monotonic() + max(STOPPED_S, PAUSE_S) + 0.1)

    def runs_of(self, rank: int) -> list[TrainerRun]:
        """The runs of a rank that began, in order."""
        runs = [read_run(self.job.log(rank, n)) for n in range(self.starts[rank])]
        return [x for x in runs if x is not None and (x.steps or x.leaked is not None)]

    def finish(self) -> int:
        """Let trainers finish; returns the number of epochs."""
        self.short_lived = 0
        for name in [n for n in self.scene.processes if n.startswith(SHORT_LIVED)]:
            self.scene.kill(name)
        runs = [run for rank in self.starts for run in self.runs_of(rank) if run.steps]
        last = max((run.steps[-1][0] for run in runs), default=0)
        replace(self.job.last_epoch, str(last + 1))
        end = time.monotonic() + SETTLE_S + 10 * self.job.think_s * 1000
        while ranks := self.trainers():
            if time.monotonic() > end:
                raise SystemExit(f"trainers {ranks} did not finish")
            self.run_until(time.monotonic() + 0.1)
        return last + 2


def kill_trainer(storm: Storm, name: str) -> None:
    """Kill a trainer, and start it again a little later."""
    storm.scene.kill(name)
    storm.later(PAUSE_S, lambda: storm.start(int(name.split()[1])))


def stop(storm: Storm, name: str) -> None:
    """Stop a process for a while.  SIGCONT has no effect if it was started again meanwhile."""
    storm.scene.signal(name, signal.SIGSTOP)
    storm.later(STOPPED_S, lambda: storm.scene.signal(name, signal.SIGCONT))


def kill_daemon(storm: Storm, name: str) -> None:
    """Kill a daemon, and start it again a little later."""
    storm.scene.daemons[name].kill()
    storm.later(PAUSE_S, storm.scene.daemons[name].start)


def end_daemon(storm: Storm, name: str) -> None:
    """Terminate a daemon, which is started again once it has ended."""
    storm.scene.signal(name, signal.SIGTERM)
    storm.scene.daemons[name].told_to_end = True


class StormFault(NamedTuple):
    """A kind of fault: its weight, and what it does to the named process."""

    weight: float
    cause: Callable[[Storm, str], None]


FAULTS = {
    "kill trainer": StormFault(0.35, kill_trainer),
    "stop trainer": StormFault(0.2, stop),
    "kill daemon": StormFault(0.2, kill_daemon),
    "end daemon": StormFault(0.1, end_daemon),
    "stop daemon": StormFault(0.15, stop),
}


def undisturbed(job: TrainerJob, daemon: DaemonProcess, epochs: int) -> list[dict[At, str]]:
    """The sha256 of each (epoch, step) by rank, from a daemon without faults.

    The first batch over TCP leaves descriptors with ZeroMQ's threads, so each member takes one
    before recording what the daemon holds between sessions.
    """
    slots = HeldResources.of(daemon.status()).slots
    for number in range(len(job.members)):
        with closing(job.dataset(number)) as data:
            next(iter(data))

    def at_rest(reply: Any) -> bool:
        taken = [entry for entry in reply.ledger if entry.name.startswith("session ")]
        return not reply.sessions and not taken and HeldResources.of(reply).slots == slots

    daemon.before = daemon.held(daemon.status(at_rest, "no session, and nothing of one"))
    found: list[dict[At, str]] = []
    for number in range(len(job.members)):
        with closing(job.dataset(number)) as data:
            found.append({(b.epoch, b.step): digest(b) for _ in range(epochs) for b in data})
    daemon.finish()
    return found


def check(storm: Storm, expected: list[dict[At, str]]) -> dict[str, Any]:
    """Check all that must hold after the storm; returns counts.  Raises SystemExit."""
    consumed = 0
    for rank, steps in enumerate(expected):
        runs = storm.runs_of(rank)
        check_history(rank, runs, steps)
        consumed += sum(len(run.steps) for run in runs)
        if runs[-1].leaked:
            raise SystemExit(f"rank {rank} still holds {runs[-1].leaked}")
    counters, daemons = storm.scene.finish(), storm.scene.daemons.values()
    return {
        "steps": sum(map(len, expected)), "consumed": consumed,
        "peak_bytes": max(d.peak_bytes for d in daemons),
        "rows_of_peers": counters["peer_rows_asked"],
    }  # fmt: skip


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns the printed line.  Raises SystemExit: a check failed."""
    given = parse(StormOptions, words)
    tcp, other_tcp = (f"tcp://127.0.0.1:{free_port()}" if given.tcp else "" for _ in range(2))
    with scene(given, tcp=tcp, servers=given.servers) as made:
        folder, endpoint = made.folder, made.daemon.endpoint
        for name in ("logs", "short-lived"):
            (folder / name).mkdir()
        ways = [d.endpoint for d in made.daemons.values()] if given.servers else ["", tcp]
        members = given.members(ways)
        job = TrainerJob(endpoint, folder / "logs", members, given.batch_size, 7, given.think)
        short_work = Work(
            endpoint, folder / "short-lived", given.batch_size, 7, daemon_may_die=True
        )
        storm = Storm(made, job, short_work, Random(given.seed), given.gap)
        storm.inject_all(given.faults)
        storm.run_until(time.monotonic() + given.seconds)
        epochs = storm.finish()
        injected_s = made.age_s
        other = DaemonProcess(folder / "undisturbed", made.store, given.mem, other_tcp)
        whole = job._replace(endpoint=other.endpoint, members=given.members(["", other_tcp]))
        try:
            expected = undisturbed(whole, other, epochs)
        finally:
            other.kill()
        if not given.servers:  # compare with what is held between sessions
            made.daemon.before = other.before
        counted = check(storm, expected)
    line = stamped(
        "storm of faults", seed=given.seed, plan=given.plan, tcp=given.tcp, servers=given.servers,
        mem=given.mem,
        times=given.times, trainers=len(members), short_lived=made.counts["short_lived"],
        faults=dict(storm.faults), starts=storm.starts.total(), seconds=round(injected_s, 1),
        epochs=epochs, **counted, holds=True,
    )  # fmt: skip
    return put(line, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
