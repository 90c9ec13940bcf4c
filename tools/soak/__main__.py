"""Hours of epochs compressed into minutes: `python -m tools.soak --minutes 20`.

A daemon serves a small store.  Two trainers last from the beginning to the end and read by every
plan in turn (minibatch, hyperbatch, macrobatch, chunks, rows), attaching anew for each; others come
for some batches and go, one of four of them without a word, some killed.  Once a second it is noted
what the daemon and the lasting trainers hold: private and shared memory, descriptors, threads,
mappings.  Checked:

- none of these grows after warm-up, by the median slope over the run and from its first tenth to
  its last (`tools.flat.ALLOWED`), but for kernels that are used for the first time;
- epoch 0 of each plan has the same sha256 of batches every time;
- when all have gone the daemon's ledger and slots are what they were before, and it ends with 0.

Prints a line per figure and process and one of JSON, and draws them (`--picture`); exit code 1
where something grew.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from blockstore.units import parse_bytes
from loaderd.wire.endpoint import parse_endpoint
from loaderd.wire.transport import ask_status
from tools.flat import Sample, draw, growths, sample
from tools.machine import machine, today
from tools.soak.trainer import Work, last, visit
from tools.storm import make_store, serve_words, served, start_daemon, wait_served, wait_status

LASTING = 2
VISITORS = 2  # at a time
KILLED = 0.3  # share of the visitors
END_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class Soak:
    """Processes, and what they hold as time goes on."""

    work: Work
    daemon: "subprocess.Popen[bytes]"
    chance: Random
    begun: float = field(default_factory=time.monotonic)
    lasting: dict[str, BaseProcess] = field(default_factory=dict)
    visitors: list[BaseProcess] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    series: dict[str, list[Sample]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = _CONTEXT.Event()
        for number in range(LASTING):
            name = f"trainer {number}"
            arguments = (self.work, name, self._stop)
            self.lasting[name] = process = _CONTEXT.Process(
                target=last, args=arguments, daemon=True
            )
            process.start()

    def look(self) -> None:
        """One sample of each.  Raises SystemExit: somebody ended who should not."""
        now = time.monotonic() - self.begun
        if self.daemon.poll() is not None:
            raise SystemExit(f"the daemon ended with {self.daemon.returncode}")
        pids = {"daemon": self.daemon.pid}
        for name, process in self.lasting.items():
            if process.exitcode is not None:
                raise SystemExit(f"{name} ended with {process.exitcode}")
            assert process.pid is not None
            pids[name] = process.pid
        for name, pid in pids.items():
            self.series.setdefault(name, []).append(sample(pid, now))

    def receive_visitors(self) -> None:
        """Some go, some are killed, others come.  Raises SystemExit: one failed."""
        for process in list(self.visitors):
            if process.exitcode is None and self.chance.random() < KILLED / 10:
                process.kill()
                process.join()
                self.counts["visitors killed"] += 1
            elif process.exitcode is None:
                continue
            elif process.exitcode:
                raise SystemExit(f"a visitor ended with {process.exitcode}")
            self.visitors.remove(process)
            process.close()
        while len(self.visitors) < VISITORS:
            number = self.counts["visitors"]
            self.counts["visitors"] += 1
            arguments = (self.work, f"visitor {number}", number)
            process = _CONTEXT.Process(target=visit, args=arguments, daemon=True)
            process.start()
            self.visitors.append(process)

    def run(self, seconds: float, every_s: float) -> None:
        """For so long."""
        looks = 0
        while (now := time.monotonic() - self.begun) < seconds:
            self.look()
            self.receive_visitors()
            looks += 1
            time.sleep(max(0.0, looks * every_s - now))

    def end(self) -> None:
        """Let all go.  Raises SystemExit: one does not, or failed."""
        self._stop.set()
        for process in self.visitors:
            process.kill()
        for name, process in self.lasting.items():
            process.join(END_S)
            if process.exitcode:
                raise SystemExit(f"{name} ended with {process.exitcode}")
        for path in self.work.folder.glob("*.json"):
            self.counts.update(json.loads(path.read_text()))

    def kill(self) -> None:
        """Nobody is left."""
        for process in (*self.lasting.values(), *self.visitors):
            process.kill()
        self.daemon.kill()
        self.daemon.wait()


def judge(series: dict[str, list[Sample]], warm_up: float) -> dict[str, Any]:
    """Prints a line for each figure; returns them by process."""
    found: dict[str, Any] = {}
    for name, samples in series.items():
        found[name] = {}
        for g in growths(samples, warm_up):
            found[name][g.figure] = {"first": g.first, "last": g.last, "per_hour": g.per_hour}
            word = "flat" if g.flat else "GROWS"
            print(
                f"{name:10} {g.figure:13} {g.first:14,.0f} -> {g.last:14,.0f}  "
                f"{g.per_hour:+14,.1f} an hour  {word}"
            )
            if not g.flat:
                found.setdefault("grows", []).append(f"{name}: {g.figure}")
    return found


def soak(given: argparse.Namespace, folder: Path) -> tuple[Soak, dict[str, int]]:
    """Run it to its end; what was held, and the daemon's counters.  Raises SystemExit."""
    store = make_store(folder, int(given.times * parse_bytes(given.mem)))
    for name in ("run", "counts"):
        (folder / name).mkdir()
    endpoint = f"ipc://{folder}/run/d"
    daemon = start_daemon(serve_words(store, endpoint, given.mem, 2), folder / "log")
    try:
        before = served(wait_status(endpoint, lambda _: True))
        _CONTEXT.set_forkserver_preload(["tools.soak.trainer"])
        work = Work(endpoint, folder / "counts", given.batch_size, given.seed)
        running = Soak(work, daemon, Random(given.seed))
    except BaseException:
        daemon.kill()
        daemon.wait()
        raise
    try:
        running.run(given.minutes * 60, given.every)
        running.end()
        wait_served(endpoint, before)
        counters = ask_status(parse_endpoint(endpoint)).counters
        daemon.terminate()
        if code := daemon.wait(END_S):
            raise SystemExit(f"the daemon ended with {code}")
    finally:
        running.kill()
    return running, counters


def main(words: list[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit where something does not hold."""
    parser = argparse.ArgumentParser(prog="tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mem", default="32M")
    parser.add_argument("--times", type=float, default=4.0, help="store's bytes, in --mem")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--warm-up", type=float, default=0.2, help="share that is not judged")
    parser.add_argument("--picture", type=Path, help="PNG")
    parser.add_argument("--folder", type=Path, help="for everything; a temporary one otherwise")
    parser.add_argument("--out", default="")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        running, counters = soak(given, Path(name))
    found = judge(running.series, given.warm_up)
    line = {
        "bench": "soak", "date": today(), "machine": machine(), "minutes": given.minutes,
        "mem": given.mem, "seed": given.seed, **running.counts,
        "batches": counters["batches"], "attached": counters["sessions_attached"], **found,
        "holds": "grows" not in found,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if given.picture:
        title = f"{given.minutes:g} minutes, {running.counts['epochs']:,} epochs, all plans"
        draw(running.series, given.warm_up, given.picture, title)
    if given.out:
        with Path(given.out).open("a") as f:
            f.write(json.dumps(line) + "\n")
    return line


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:])["holds"] else 1)
