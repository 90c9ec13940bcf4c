"""Random and mutated messages against a real daemon: `python -m tools.fuzz --frames 1000000`.

A coverage-guided fuzzer (libFuzzer, through atheris) spoils messages of every kind, byte by byte
and field by field, and sends them over the daemon's own socket: under a valid token, for sessions
of its own and of others.  What the code that reads messages does with one decides which are spoilt
further.  Between them come connections that speak no ZeroMQ, and packets at the listener's socket.
Beside it a trainer reads epoch after epoch.  Checked, beside what every scene of faults checks
(`tools.faults.runner`):

- each message that cannot be read is answered with BadMessage, each question with an answer, and
  no answer tells of an exception that nobody foresaw;
- the trainer's batches have the sha256 that they have in peace;
- memory and descriptors of the daemon are flat after the first fifth, but for kernels that are
  used for the first time (`tools.faults.growth`); threads come and go with sessions: when all have
  gone they are as many as before.

One JSON line; fails at the first difference.  With `--store`: `tools.fuzz.stores`.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tools.command import parse, put, stamped
from tools.faults import runner
from tools.faults.growth import ALLOWED, Growth, Sample, growths, sample
from tools.faults.runner import CONTEXT, END_S, Scene, scene
from tools.faults.trainers import Work, stay
from tools.fuzz import stores

WARM_UP = 0.2
BESIDE = "trainer"
_POOL = 1  # threads that wait for another attach, once there was one


@dataclass(frozen=True)
class Options(runner.Options):
    frames: Annotated[int, "messages"] = 1_000_000
    mem: str = "64M"
    batch_size: int = 128
    every: Annotated[float, "seconds between two samples"] = 1.0
    any_growth: Annotated[bool, "a short run is all warm-up"] = False
    corpus: Annotated[Path | None, "inputs to begin with, and to add to"] = None


def coverage(said: str) -> dict[str, int]:
    """Of libFuzzer's last line: edges of code, features, inputs kept."""
    found = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said)
    return (
        dict(zip(("edges", "features", "corpus"), map(int, found[-1]), strict=True))
        if found
        else {}
    )


def attach_trainer(made: Scene, work: Work, stop: Any) -> int:
    """A trainer reads beside the fuzzer; its session.  Raises SystemExit: it does not begin."""
    made.spawn(BESIDE, stay, work, BESIDE, stop)
    notes, end = work.folder / f"{BESIDE}.json", time.monotonic() + END_S
    while not notes.exists():
        if time.monotonic() > end or list(made.ended()):
            raise SystemExit("the trainer beside the fuzzer does not begin")
        time.sleep(0.05)
    return int(json.loads(notes.read_text())["session"])


def fuzz(given: Options, made: Scene) -> dict[str, Any]:
    """Send all messages; what was sent.  Raises SystemExit."""
    stop, folder = CONTEXT.Event(), made.folder
    notes, said = folder / "sent.json", folder / "fuzzer"
    (folder / "counts").mkdir()
    work = Work(made.daemon.endpoint, folder / "counts", given.batch_size, 3)
    victim = attach_trainer(made, work, stop)
    corpus = given.corpus or folder / "corpus"
    corpus.mkdir(exist_ok=True)
    words = [made.daemon.endpoint, made.store, victim, given.frames, given.seed, notes]
    command = [sys.executable, "-m", "tools.fuzz.child", *map(str, words), f"{corpus}/"]
    with (
        said.open("wb") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream) as fuzzer,
    ):
        try:
            while fuzzer.poll() is None:
                made.watch()
                time.sleep(given.every)
        finally:
            fuzzer.kill()
    stop.set()
    text = said.read_text(errors="replace")
    figures: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {"sent": 0}
    if fuzzer.returncode or figures["sent"] < given.frames:
        raise SystemExit(f"after {figures['sent']} messages:\n{text[-4000:]}")
    made.join(BESIDE)
    made.add_counts(work.folder)
    return figures | coverage(text) | {"beside": made.counts["minibatch batches"]}


def verdict(samples: list[Sample], judged: bool) -> list[Growth]:
    """Raises SystemExit: something grew, and is `judged`."""
    found = growths(samples, WARM_UP)
    if judged and (grown := [g for g in found if not g.flat and g.figure != "threads"]):
        raise SystemExit(f"the daemon grew: {grown}, allowed: {ALLOWED}")
    return found


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit: something does not hold."""
    given = parse(Options, words, __doc__, "tools.fuzz")
    with scene(given, store_bytes=0) as made:
        pid = made.daemon.process.pid
        threads = sample(pid, 0.0).threads
        figures = fuzz(given, made)
        made.daemon.status(lambda reply: not reply.sessions, "no session")
        if (idle := sample(pid, 0.0).threads) > threads + _POOL:
            raise SystemExit(f"{idle} threads when all have gone, {threads} before they came")
        counters, log_bytes = made.finish(), made.daemon.log.stat().st_size
    grown = verdict(made.series["daemon"], not given.any_growth)
    line = stamped(
        "fuzz", seed=given.seed, seconds=round(made.age_s, 1), **figures,
        refused=counters["requests_refused"] + counters["sessions_refused"],
        attached=counters["sessions_attached"], log_bytes=log_bytes,
        growth={g.figure: [g.first, g.last, g.over_run] for g in grown}, holds=True,
    )  # fmt: skip
    return put(line, given.out)


if __name__ == "__main__":
    (stores.main if "--store" in sys.argv else main)(sys.argv[1:])
