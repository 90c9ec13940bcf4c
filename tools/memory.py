"""Commands in a control group of `--mem` + 256 MiB.

`python -m tools.memory ingest SOURCE` ingests a folder of any layout once for each `--mem` given,
one store at a time: a JSON line each, with its peak, the kills and one sha256 over every file of
the store.  It fails if a run took more than its `--mem`, was killed, or made other bytes than the
first.  Options of `blockstore ingest` stand after `--`, as in `... ingest SOURCE -- --undirected`.
With `--kills 20` each store is made again, outside of a group: so often the command is killed
(SIGKILL, all its threads) at a moment drawn from the whole time of the undisturbed run, and run
again.  It must end by itself, leave nothing beside the store, and make the same bytes.  With
`--worker-kills 20 ... -- --ray local:2` so many processes that run tasks are killed, while the
command goes on.

`python -m tools.memory attach` serves a graph to clients that attach, several at a time, with
millions of ids, times, masks and huge fanouts, or announce ids and send none, too many or others,
while a trainer reads beside them.  Each has a batch, or is refused.  One JSON
line; it fails if there were kills, another error than a refusal, batches of the trainer that are
not those of an undisturbed one, or anything else that a scene of faults checks
(`tools.faults.runner`).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import numpy as np
import zmq
from msgspec import structs

from blockstore.store import open_store
from blockstore.units import parse_bytes
from clients.connection.session import Attachment, Session
from loaderd.api.errors import DaemonError, Refused
from loaderd.api.protocol import (
    Attach,
    BatchReady,
    ErrorReply,
    Ids,
    SeedEdges,
    Temporal,
    decode_daemon,
    encode,
)
from tools.bench.resources import PROC, descendants, resident_bytes
from tools.bench.setup import stage_ends, total_bytes
from tools.command import byte_size, parse, put, split_options, stamped
from tools.faults.runner import Scene, SceneOptions, scene
from tools.faults.trainers import Work
from tools.group import ControlGroup, group
from tools.tree import differences, file_digests, one_digest

SLACK_BYTES = 256 << 20  # interpreter and libraries
_DRAWS = 10  # tries per kill, as a moment may lie after the end of a run
_POLL_S = 0.01  # between two samples of memory
_MAX_WAIT_S = 2.0  # between kills of workers
_ATTACHERS = 6  # clients at a time
_KINDS = ("ids", "times", "mask", "edges", "fanouts", "none", "others", "large", "late")
_PLANS = ("auto", "minibatch", "minibatch", "minibatch")  # `auto` samples before it is open
_LATE_S = 30.0  # how long a late client withholds its ids, unless it is refused before


def run_ingest(
    limits: ControlGroup | None, look: Callable[["subprocess.Popen[str]"], object], *words: str
) -> dict[str, Any] | None:
    """Measure an ingest in a group; `look` is called all the time, and may kill it: then None.

    Raises SystemExit: it failed, or was killed by something else.
    """
    begun, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        [sys.executable, "-m", "preprocess", "ingest", *words, "--json"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=limits.join if limits else None,
    )  # fmt: skip
    while True:
        try:
            text, errors = process.communicate(timeout=_POLL_S)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, resident_bytes([process.pid]))
            look(process)
    seconds = time.perf_counter() - begun
    kills = limits.kills() if limits else 0
    if process.returncode == -signal.SIGKILL and not kills:
        return None
    if process.returncode:
        how = f"{process.returncode}, {kills} kills"
        raise SystemExit(f"ingest {' '.join(words)} ended with {how}: {errors}")
    ends = stage_ends(text)
    return {
        "peak_bytes": peak, "seconds": seconds, "kills": kills,
        "stages": {e["stage"]: round(e["elapsed_s"], 2) for e in ends},
        "stage_peaks": {e["stage"]: e["peak_bytes"] for e in ends},
        "resumed": [e["stage"] for e in ends if e["resumed"]],
    }  # fmt: skip


def undisturbed(limits: ControlGroup | None, *words: str) -> dict[str, Any]:
    """Measure an ingest that nothing kills.  Raises SystemExit: it failed, or was killed."""
    found = run_ingest(limits, lambda _: None, *words)
    if found is None:
        raise SystemExit(f"ingest {' '.join(words)} was killed")
    return found


def kill_often(
    kills: int, moments: Random, store: Path, expected: dict[str, str], whole_s: float, *words: str
) -> Iterator[dict[str, Any]]:
    """Kill ingests at random moments within `whole_s`, and run them again; a line per kill.

    expected   digests of the store's files

    Raises SystemExit: a store differs, or something is left beside it.
    """
    number = early = 0
    while number < kills:
        shutil.rmtree(store, ignore_errors=True)
        after_s, begun = moments.uniform(0, whole_s), time.monotonic()

        def look(process: Any, end: float = begun + after_s) -> None:
            if time.monotonic() >= end:
                process.kill()

        if run_ingest(None, look, *words):  # it ended first: draw from a shorter time
            whole_s, early = after_s, early + 1
            if early == _DRAWS:
                raise SystemExit(f"{_DRAWS} runs in a row ended before they were killed")
            continue
        number, early = number + 1, 0
        was_there = store.exists()  # it was killed after the rename
        run = {} if was_there else undisturbed(None, *words)
        other = [f"{n} differs" for n in differences(expected, file_digests(store))]
        if not was_there:
            left = (p for p in sorted(store.parent.iterdir()) if p != store)
            other += [f"{p.name} is left" for p in left]
        if other:
            raise SystemExit(f"kill {number}, {after_s:.2f} s: {', '.join(other)}")
        yield {
            "kill": number, "after_s": round(after_s, 3), "same": True,
            "stages_kept": len(run.get("resumed", ())), "stages": len(run.get("stages", ())),
        }  # fmt: skip


def kill_workers(
    kills: int, moments: Random, store: Path, expected: dict[str, str], *words: str
) -> Iterator[dict[str, Any]]:
    """Run ingests on Ray and kill processes of their tasks, `kills` in all; a line per run.

    Raises SystemExit: a command failed, or a store differs.
    """
    done, due = 0, 0.0

    def look(process: Any) -> None:
        nonlocal done, due
        workers = [pid for pid in descendants(process.pid) if is_task(pid)]
        if workers and done < kills and time.monotonic() >= due:
            os.kill(moments.choice(workers), signal.SIGKILL)
            done, due = done + 1, time.monotonic() + moments.uniform(0.1, _MAX_WAIT_S)

    while (before := done) < kills:
        shutil.rmtree(store, ignore_errors=True)
        run = run_ingest(None, look, *words)
        if run is None or (other := differences(expected, file_digests(store))):
            how = "the command was killed" if run is None else f"{', '.join(other)} differ"
            raise SystemExit(f"after {done - before} kills of workers: {how}")
        seconds = round(run["seconds"], 2)
        yield {"worker_kills": done - before, "same": True, "seconds": seconds}


def is_task(pid: int) -> bool:
    """Whether a Ray process is running a task."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().startswith(b"ray::blockstore")
    except OSError:
        return False


class Attempt(NamedTuple):
    """The outcome of one attach."""

    kind: str
    end: str  # "served", "refused", "failed", or "odd": requests that no dataset makes
    seconds: float
    text: str = ""  # message of the refusal or the error


def attempt(endpoint: str, number: int, nodes: int) -> Attempt:
    """Run one client, whose kind and sizes follow from `number`, on a graph of `nodes` nodes."""
    begun, random = time.monotonic(), Random(number)
    kind, count = _KINDS[number % len(_KINDS)], 1 << random.randint(10, 24)
    asked = Attach(
        token=0, request=0, split="", num_neighbors=(5, 5), batch_size=random.choice((64, 1024)),
        seed=number, plan=random.choice(_PLANS),
    )  # fmt: skip
    huge = random.choice((((1 << 16,) * 16, 1 << 24), ((1 << 16,) * 2, 64), ((100, 100), 64)))
    variants: dict[str, dict[str, Any]] = {
        "ids": {},
        "times": {"temporal": Temporal()},
        "edges": {"edges": SeedEdges()},
        "mask": {"mask_size": random.choice((nodes, nodes, nodes + 1, 1 << 62))},
        "fanouts": {"num_neighbors": huge[0], "batch_size": huge[1]},
    }
    end, text = "served", ""
    try:
        if kind in variants:
            ids = np.random.default_rng(number).integers(0, nodes, count)
            _take_batch(endpoint, structs.replace(asked, **variants[kind]), ids)
        else:
            end = "odd"
            _send_odd(endpoint, kind, asked, random)
    except Refused as error:
        end, text = "refused", str(error)
    except DaemonError as error:
        end, text = "failed", f"{type(error).__name__}: {error}"
    return Attempt(kind, end, time.monotonic() - begun, text)


def _take_batch(endpoint: str, request: Attach, ids: Any) -> None:
    with closing(Session(endpoint, request, ids)) as session:
        session.start(0, 0)
        batch = session.receive(BatchReady, 0)
        session.release(0, batch.rows.group)


def _send_odd(endpoint: str, kind: str, asked: Attach, random: Random) -> None:
    """Attach as a client that violates the protocol, and leave without detaching."""
    with _connected(endpoint) as (token, dealer):
        if kind == "late":  # announces ids, is asked for them, and stays without sending any
            ids = 1 << random.randint(0, 20)
            dealer.send(encode(structs.replace(asked, token=token, request=1, ids=ids)))
            end = time.monotonic() + _LATE_S
            while (left := end - time.monotonic()) > 0 and dealer.poll(int(1000 * left) + 1):
                if isinstance(decode_daemon(dealer.recv()), ErrorReply):
                    return
            return
        for request in range(20):
            ids = 1 << random.randint(0, 24)
            dealer.send(encode(structs.replace(asked, token=token, request=request, ids=ids)))
            if kind == "others":
                size = random.choice((7, 8, 1 << 17))
                dealer.send(encode(Ids(request=request, first=0, numbers=bytes(size))))
            if kind == "large":
                dealer.send(bytes(random.choice((1 << 18, 1 << 19, 1 << 27))))
        dealer.poll(1000)


@contextmanager
def _connected(endpoint: str) -> Iterator[tuple[int, "zmq.Socket[bytes]"]]:
    """A token, and a new socket."""
    with closing(Attachment(endpoint)) as attachment:
        dealer: zmq.Socket[bytes] = attachment.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        with closing(dealer):
            yield attachment.token, dealer


@dataclass(frozen=True)
class AttachOptions(SceneOptions):
    mem: Annotated[str, byte_size, "of the daemon"] = "64M"
    times: Annotated[float, "bytes of the store, in --mem"] = 20.0
    attempts: int = 200


def attack(given: AttachOptions, made: Scene) -> tuple[list[Attempt], int]:
    """Run all attempts beside a trainer; returns them and the daemon's peak.  Raises SystemExit."""
    endpoint, pid, peak = made.daemon.endpoint, made.daemon.process.pid, 0
    nodes = open_store(made.store).manifest.num_nodes
    work = Work(endpoint, made.folder, given.batch_size, 3)
    with made.trainer_beside(work), ThreadPoolExecutor(_ATTACHERS) as pool:
        tries = [pool.submit(attempt, endpoint, n, nodes) for n in range(given.attempts)]
        while not all(t.done() for t in tries):
            peak = max(peak, resident_bytes([pid]))
            wait(tries, _POLL_S, return_when=FIRST_EXCEPTION)
    return [t.result() for t in tries], peak


def attach(words: Sequence[str]) -> dict[str, Any]:
    """Serve a graph to clients that ask for too much; returns the printed line."""
    given = parse(AttachOptions, words, "tools.memory attach")
    limit = parse_bytes(given.mem) + SLACK_BYTES
    with group(limit) as limits, scene(given, limits=limits) as made:
        idle = resident_bytes([made.daemon.process.pid])
        found, peak = attack(given, made)
        made.finish()
        kills = limits.kills()
    ends = Counter(a.end for a in found)
    line = put(stamped(
        "memory of attaches", mem=given.mem, limit_bytes=limit, attempts=given.attempts,
        ends=dict(ends), seconds=round(made.age_s, 1),
        longest_s={a.kind: a.seconds for a in sorted(found, key=lambda a: a.seconds)},
        serve_idle_bytes=idle, serve_peak_bytes=peak, kills=kills,
        beside=made.counts["minibatch batches"],
    ), given.out)  # fmt: skip
    if kills or ends["failed"]:
        failed = [a.text for a in found if a.end == "failed"]
        raise SystemExit(f"--mem {given.mem}: {kills} kills, other errors: {failed}")
    return line


@dataclass(frozen=True)
class MemoryIngestOptions:
    source: Path
    mem: Annotated[tuple[str, ...], byte_size] = ("512M", "4G")
    folder: Annotated[Path | None, "for a store at a time; else beside the source"] = None
    kills: Annotated[int, "at random moments, outside of a group"] = 0
    worker_kills: Annotated[int, "of processes that run tasks, with --ray"] = 0
    seed: int = 0
    out: Annotated[Path | None, "append a line of JSON for each"] = None


def ingest(words: Sequence[str], options: Sequence[str]) -> list[dict[str, Any]]:
    """Ingest a folder within each `--mem`; returns the printed lines.  Raises SystemExit."""
    given = parse(MemoryIngestOptions, words, "tools.memory ingest")
    folder = given.folder or given.source.absolute().parent
    first: dict[str, str] = {}
    lines = []
    for mem in given.mem:
        limit = parse_bytes(mem) + SLACK_BYTES
        held = nullcontext() if given.kills or given.worker_kills else group(limit)
        with tempfile.TemporaryDirectory(dir=folder) as name, held as limits:
            store = Path(name) / "store"
            words = [str(given.source), str(store), "--mem", mem, *options]
            run = undisturbed(limits, *words)
            digests = file_digests(store)
            store_bytes = total_bytes(store)
            killed = kill_often(
                given.kills, Random(given.seed), store, digests, run["seconds"], *words
            )
            lines += [put(line, given.out) for line in killed]
            killed = kill_workers(given.worker_kills, Random(given.seed), store, digests, *words)
            lines += [put(line, given.out) for line in killed]
        first = first or digests
        line = stamped(
            "memory of an ingest", mem=mem, mem_bytes=parse_bytes(mem), limit_bytes=limit,
            source=given.source, options=options, **run, store_bytes=store_bytes,
            sha256=one_digest(digests),
        )  # fmt: skip
        lines.append(put(line, given.out))
        check_run(line, differences(first, digests))
    return lines


def check_run(line: dict[str, Any], other: Sequence[str]) -> None:
    """Raises SystemExit: a run exceeded its `--mem`, was killed, or made different files."""
    mem, peak, kills = line["mem"], line["peak_bytes"], line["kills"]
    if kills or peak > line["mem_bytes"]:
        raise SystemExit(f"--mem {mem}: {kills} kills, a peak of {peak} bytes")
    if other:
        raise SystemExit(f"--mem {mem}: other bytes than before in {', '.join(other)}")


def main(words: list[str]) -> Any:
    """Run one of the commands; returns what it printed."""
    own, options = split_options(words)
    match own[:1]:
        case ["attach"]:
            return attach(own[1:])
        case ["ingest"]:
            return ingest(own[1:], options)
    print(__doc__, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
