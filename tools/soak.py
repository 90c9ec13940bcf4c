"""Hours of epochs compressed into minutes: `python -m tools.soak --minutes 20`.

A daemon serves a small store.  Two trainers last from the beginning to the end and read by every
plan in turn (minibatch, hyperbatch, macrobatch, chunks, rows, split), attached again for each;
others come for some batches and go, one of four of them without detaching, some killed.  Once a
second it is noted what the daemon and the lasting trainers hold: private and shared memory,
descriptors, threads, mappings.  Checked, beside what every scene of faults checks
(`tools.faults.runner`):

- none of these grows after warm-up, by the median slope over the run and from its first tenth to
  its last (`tools.faults.growth.ALLOWED`), but for kernels that are used for the first time; of
  threads, which sessions have while they last, the least of each stretch counts;
- what comes and goes with the clients stays within what these may have (`find_bounds`);
- epoch 0 of each plan has the same sha256 of batches every time.

Prints a table of figures and a line of JSON; exit code 1 if something grew.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Annotated, Any

from tools.command import parse, put, stamped
from tools.faults.growth import judge
from tools.faults.runner import CONTEXT, Scene, SceneOptions, scene
from tools.faults.trainers import Work, read_every_plan

LASTING = ("trainer 0", "trainer 1")
CLIENTS = 2  # short-lived clients at a time
SEMAPHORE_BYTES = 64 << 10  # most that multiprocessing maps
KILLED = 0.3  # share of the short-lived clients


@dataclass(frozen=True)
class SoakOptions(SceneOptions):
    minutes: float = 20.0
    every: Annotated[float, "seconds between two looks"] = 1.0
    warm_up: Annotated[float, "share that is not judged"] = 0.2


def look_after(made: Scene, work: Work, chance: Random) -> None:
    """Start and kill short-lived clients.  Raises SystemExit: a process failed."""
    for name, code in made.ended():
        if code or name in LASTING:
            raise SystemExit(f"{name} ended with {code}")
    for name in [name for name in made.processes if name not in LASTING]:
        if chance.random() < KILLED / 10:
            made.kill(name)
            made.counts["short_lived_killed"] += 1
    made.renew_clients(work, CLIENTS)


def soak(given: SoakOptions, made: Scene) -> Counter[str]:
    """Run the soak to its end; returns the daemon's counters.  Raises SystemExit."""
    (made.folder / "counts").mkdir()
    work = Work(made.daemon.endpoint, made.folder / "counts", given.batch_size, given.seed)
    stop, chance = CONTEXT.Event(), Random(given.seed)
    for name in LASTING:
        made.spawn(name, read_every_plan, work, name, stop)
    looks = 0
    begun = made.age_s
    while (now := made.age_s - begun) < given.minutes * 60:
        made.watch(*LASTING)
        look_after(made, work, chance)
        looks += 1
        time.sleep(max(0.0, looks * given.every - now))
    stop.set()
    for name in set(made.processes) - set(LASTING):
        made.kill(name)
    made.join(*LASTING)
    made.add_counts(work.folder)
    return made.finish()


def find_bounds(made: Scene) -> dict[str, dict[str, float]]:
    """Upper bounds, by process, of resources whose use goes up and down.

    A trainer maps one arena from an attach to the next detach, and has touched some or all of its
    pages, in huge pages of 2 MiB, depending on the plan that it reads.  The daemon has the arena
    and, in addition to its descriptors before the first client, two sockets for each attached
    client, and one file while an owner map is read.
    """
    of_daemon = made.series["daemon"]
    arena = median(sample.shared_bytes for sample in of_daemon)
    own = min(sample.descriptors for sample in of_daemon)
    found: dict[str, dict[str, float]] = {
        name: {"shared_bytes": arena + SEMAPHORE_BYTES, "arenas": 1} for name in LASTING
    }
    clients = len(LASTING) + CLIENTS
    return found | {"daemon": {"descriptors": own + 2 * clients + 1, "arenas": 1}}


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns the printed line.  Raises SystemExit: a check failed."""
    given = parse(SoakOptions, words)
    with scene(given) as made:
        counters = soak(given, made)
    found = judge(made.series, given.warm_up, bounds=find_bounds(made))
    counts = dict(made.counts) | {
        "batches": counters["batches"], "attached": counters["sessions_attached"]
    }  # fmt: skip
    line = stamped(
        "soak", minutes=given.minutes, mem=given.mem, seed=given.seed, **counts, **found,
        holds="grows" not in found,
    )  # fmt: skip
    return put(line, given.out)


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:])["holds"] else 1)
