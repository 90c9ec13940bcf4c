"""Random and mutated messages against a real daemon: `python -m tools.fuzz --frames 1000000`.

Messages of every kind are spoilt, byte by byte and field by field, and sent over the daemon's own
socket: under a valid token, for sessions of its own and of others.  Between them come connections
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

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

from blockstore.store import open_store
from loaderd.server.peer_rows import THREADS
from tools.command import parse, put, running_tally, stamped
from tools.faults.growth import ALLOWED, judge, sample
from tools.faults.runner import Scene, SceneOptions, scene
from tools.faults.trainers import Work
from tools.fuzz import stores
from tools.fuzz.frames import Attacker, Defect, base_messages, join, spoil

WARM_UP = 0.2
FRESH = 0.25  # share of messages spoilt only once; others are spoilt repeatedly
LARGEST = 1 << 16  # bytes of an input
_POOL = 1  # threads that stay after the first attach, to wait for another
# A thread that asks a peer for rows opens a connection if all others are in use, and keeps it:
# their number depends on how many requests came at once, and is at most one per thread.
_CONNECTION = {"descriptors": 4, "mappings": 2}  # a zmq socket with its monitor; the thread's heap


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


def send_all(given: FrameFuzzOptions, made: Scene, victim: int) -> dict[str, Any]:
    """Spoil and send messages; returns figures.  Raises SystemExit: a defect."""
    random, daemon, data = Random(given.seed), made.daemon, b""
    place = daemon.tcp if given.peers else daemon.endpoint
    attacker = Attacker(place, open_store(daemon.store), victim, random)

    def figures() -> dict[str, Any]:
        return {
            "sent": attacker.sent, "noise": attacker.noise, "longest_s": attacker.longest_s,
            "replies": dict(attacker.replies),
        }  # fmt: skip

    with running_tally(figures, given.out) as look, closing(attacker):
        due = time.monotonic()
        try:
            while attacker.sent < given.frames:
                if not data or random.random() < FRESH:
                    data = join(random.choice(base_messages()))
                data = spoil(data, random)[:LARGEST]
                attacker.send(data)
                if time.monotonic() >= due:
                    made.watch()
                    look()
                    due += given.every
            attacker.check()
        except Defect as error:
            raise SystemExit(f"after {attacker.sent} messages: {error}") from error
    return figures()


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns the printed line.  Raises SystemExit: a check failed."""
    given = parse(FrameFuzzOptions, words)
    with scene(given, store_bytes=0, servers=2 * given.peers) as made:
        daemon = made.daemon
        (made.folder / "counts").mkdir()
        work = Work(daemon.endpoint, made.folder / "counts", given.batch_size, 3)
        if given.peers:  # the first session over TCP, and its requests to peers, start threads
            with closing(work._replace(endpoint=daemon.tcp).dataset("minibatch")) as data:
                next(iter(data))
            daemon.idle()
        threads = sample(daemon.process.pid, 0.0).threads
        with made.trainer_beside(work) as session:
            figures = send_all(given, made, session)
        daemon.idle()
        if (left := sample(daemon.process.pid, 0.0).threads) > threads + _POOL:
            raise SystemExit(f"{left} threads when all have gone, {threads} before they came")
        counters, log_bytes = made.finish(), daemon.log.stat().st_size
    connections = THREADS * given.peers  # may be opened after the warm-up
    allowed = {f: maximum + connections * _CONNECTION.get(f, 0) for f, maximum in ALLOWED.items()}
    del allowed["threads"]  # compared above
    growth = judge(made.series, WARM_UP, allowed)
    if "grows" in growth and not given.any_growth:
        raise SystemExit(f"the daemon grew: {growth}, allowed: {allowed}")
    line = stamped(
        "fuzz", seed=given.seed, peers=given.peers, seconds=round(made.age_s, 1), **figures,
        beside=made.counts["minibatch batches"],
        refused=counters["requests_refused"] + counters["sessions_refused"],
        attached=counters["sessions_attached"], log_bytes=log_bytes,
        growth=growth["daemon"], holds=True,
    )  # fmt: skip
    return put(line, given.out)


if __name__ == "__main__":
    (stores.main if "--store" in sys.argv else main)(sys.argv[1:])
