"""Random and mutated messages against a real daemon: `python -m tools.fuzz --frames 1000000`.

Messages of every kind are spoilt, byte by byte and field by field, and sent over the daemon's own
socket: under a valid token, for sessions of its own and of others.  One that takes the code that
reads messages along a way that none took before is spoilt further.  Between them come connections
that speak no ZeroMQ, and packets at the listener's socket.  Beside it a trainer reads epoch after
epoch.  Checked, beside what every scene of faults checks (`tools.faults.runner`):

- each message that cannot be read is answered with BadMessage, each question with an answer, and
  no answer tells of an exception that nobody foresaw;
- the trainer's batches have the sha256 that they have undisturbed;
- memory and descriptors of the daemon are flat after the first fifth, but for kernels that are
  used for the first time (`tools.faults.growth`); threads come and go with sessions: when all have
  gone they are as many as before.

A tally every minute, and one JSON line; fails at the first difference.  With `--store`:
`tools.fuzz.stores`.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from random import Random
from types import FrameType
from typing import Annotated, Any

from blockstore.store import open_store
from loaderd.server.peer_rows import THREADS
from tools.command import parse, put, running_tally, stamped
from tools.faults.growth import ALLOWED, Growth, ProcessSample, growths, sample
from tools.faults.runner import CONTEXT, END_S, Scene, SceneOptions, scene
from tools.faults.trainers import Work, read_again
from tools.fuzz import stores
from tools.fuzz.frames import Attacker, Defect, base_messages, bind, join, split, spoil, verdict

WARM_UP = 0.2
BESIDE = "trainer"
LARGEST = 1 << 16  # bytes of an input
_POOL = 1  # threads that wait for another attach, once there was one
# Each thread that asks a peer for rows opens a connection when all others are in use, and keeps it:
# how many there are follows from how many requests came at once, and is at most one a thread.
_CONNECTION = {"descriptors": 4, "mappings": 2}  # a zmq socket with its monitor; the thread's heap
_READERS = (
    "loaderd/api/protocol.py",
    "loaderd/api/requests.py",
    "sessions/resolve.py",
    "fuzz/frames.py",
)


@dataclass(frozen=True)
class FrameFuzzOptions(SceneOptions):
    frames: Annotated[int, "messages"] = 1_000_000
    mem: str = "64M"
    batch_size: int = 128
    every: Annotated[float, "seconds between two samples"] = 1.0
    peers: Annotated[bool, "over tcp, to a daemon with a part of the store, as its peer too"] = (
        False
    )
    any_growth: Annotated[bool, "a short run is all warm-up"] = False


class Coverage:
    """Which line of the code that reads messages has come after which."""

    def __init__(self) -> None:
        self.steps: set[tuple[object, int, int]] = set()
        self._line = 0

    def is_new(self, work: Callable[[], object]) -> bool:
        """Do it; whether a step came that had not come before."""
        before = len(self.steps)
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(None)
        return len(self.steps) > before

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._step if frame.f_code.co_filename.endswith(_READERS) else None

    def _step(self, frame: FrameType, _event: str, _argument: object) -> Any:
        self.steps.add((frame.f_code, self._line, frame.f_lineno))
        self._line = frame.f_lineno
        return self._step


def attach_trainer(made: Scene, work: Work, stop: Any) -> int:
    """A trainer reads beside the fuzzer; its session.  Raises SystemExit: it does not begin."""
    made.spawn(BESIDE, read_again, work, BESIDE, stop)
    notes, end = work.folder / f"{BESIDE}.json", time.monotonic() + END_S
    while not notes.exists():
        if time.monotonic() > end or list(made.ended()):
            raise SystemExit("the trainer beside the fuzzer does not begin")
        time.sleep(0.05)
    return int(json.loads(notes.read_text())["session"])


def send_all(given: FrameFuzzOptions, made: Scene, victim: int) -> dict[str, Any]:
    """Spoil and send messages; what was sent.  Raises SystemExit: a defect."""
    random, daemon = Random(given.seed), made.daemon
    part = open_store(daemon.store).part
    manifest, place = (
        open_store(made.store).manifest,
        daemon.tcp if given.peers else daemon.endpoint,
    )
    corpus, seen = [join(message) for message in base_messages()], Coverage()
    attacker = Attacker(place, manifest, victim, random, part)

    def figures() -> dict[str, Any]:
        return {
            "sent": attacker.sent, "noise": attacker.noise, "longest_s": attacker.longest_s,
            "replies": dict(attacker.replies), "corpus": len(corpus), "steps": len(seen.steps),
        }  # fmt: skip

    with running_tally(figures, given.out) as look, closing(attacker):
        due = time.monotonic()
        try:
            while attacker.sent < given.frames:
                data = spoil(random.choice(corpus), random)[:LARGEST]
                if seen.is_new(partial(verdict, bind(split(data), 1, 2, 3), manifest)):
                    corpus.append(data)
                attacker.send(data)
                if time.monotonic() >= due:
                    made.watch()
                    look()
                    due += given.every
            attacker.check()
        except Defect as error:
            raise SystemExit(f"after {attacker.sent} messages: {error}") from error
    return figures()


def judged(samples: list[ProcessSample], connections: int, any_growth: bool) -> list[Growth]:
    """How the daemon's figures went.  Raises SystemExit: something grew, and may not.

    connections   to peers, which may come after the warm-up
    """
    allowed = {
        figure: most + connections * _CONNECTION.get(figure, 0) for figure, most in ALLOWED.items()
    }
    found = growths(samples, WARM_UP, allowed)
    grown = [g for g in found if not g.flat and g.figure != "threads"]
    if grown and not any_growth:
        raise SystemExit(f"the daemon grew: {grown}, allowed: {allowed}")
    return found


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit: something does not hold."""
    given = parse(FrameFuzzOptions, words)
    with scene(given, store_bytes=0, servers=2 * given.peers) as made:
        pid = made.daemon.process.pid
        (made.folder / "counts").mkdir()
        work = Work(made.daemon.endpoint, made.folder / "counts", given.batch_size, 3)
        stop = CONTEXT.Event()
        if given.peers:  # the first that reads by tcp, and what it needs of peers, begin threads
            with closing(work._replace(endpoint=made.daemon.tcp).dataset("minibatch")) as data:
                next(iter(data))
            made.daemon.status(lambda reply: not reply.sessions, "no session")
        threads = sample(pid, 0.0).threads
        figures = send_all(given, made, attach_trainer(made, work, stop))
        stop.set()
        made.join(BESIDE)
        made.add_counts(work.folder)
        made.daemon.status(lambda reply: not reply.sessions, "no session")
        if (idle := sample(pid, 0.0).threads) > threads + _POOL:
            raise SystemExit(f"{idle} threads when all have gone, {threads} before they came")
        counters, log_bytes = made.finish(), made.daemon.log.stat().st_size
    grown = judged(made.series["daemon"], THREADS * given.peers, given.any_growth)
    line = stamped(
        "fuzz", seed=given.seed, peers=given.peers, seconds=round(made.age_s, 1), **figures,
        beside=made.counts["minibatch batches"],
        refused=counters["requests_refused"] + counters["sessions_refused"],
        attached=counters["sessions_attached"], log_bytes=log_bytes,
        growth={g.figure: [g.first, g.last, g.over_run] for g in grown}, holds=True,
    )  # fmt: skip
    return put(line, given.out)


if __name__ == "__main__":
    (stores.main if "--store" in sys.argv else main)(sys.argv[1:])
