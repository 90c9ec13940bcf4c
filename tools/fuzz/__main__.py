"""Random and mutated messages against a real daemon: `python -m tools.fuzz --frames 1000000`.

A coverage-guided fuzzer (libFuzzer, through atheris) spoils messages of every kind, byte by byte
and field by field, and sends them over the daemon's own socket: under a valid token, for sessions
of its own and of others.  What the code that reads messages does with one decides which are spoilt
further.  Between them come connections that speak no ZeroMQ, and packets at the door.  Beside it a
trainer reads epoch after epoch.  Checked:

- each message that cannot be read is answered with BadMessage, each question with an answer, and
  no answer tells of an exception that nobody foresaw;
- the daemon lives, its log has no error, and it ends with exit code 0;
- the trainer's batches have the sha256 that they have in peace;
- memory and descriptors of the daemon are flat after the first fifth, but for kernels that are
  used for the first time (`tools.flat`); threads come and go with
  sessions: when all have gone they are as many as before, ledger and slots what they were.

One JSON line; fails at the first difference.  With `--store`: `tools.fuzz.stores`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loaderd.wire.endpoint import parse_endpoint
from loaderd.wire.transport import ask_status
from tools.flat import ALLOWED, Growth, Sample, growths, sample
from tools.fuzz import stores
from tools.fuzz.beside import END_S, beside
from tools.machine import machine, today
from tools.storm import make_store, serve_words, served, start_daemon, wait_served, wait_status

WARM_UP = 0.2
_POOL = 1  # threads that wait for another attach, once there was one


def watch(
    fuzzer: "subprocess.Popen[bytes]", daemon: "subprocess.Popen[bytes]", every_s: float
) -> list[Sample]:
    """What the daemon holds until the fuzzer has ended.  Raises SystemExit: the daemon did."""
    begun, samples = time.monotonic(), []
    while fuzzer.poll() is None:
        try:
            samples.append(sample(daemon.pid, time.monotonic() - begun))
        except FileNotFoundError:
            fuzzer.kill()
            raise SystemExit(f"the daemon ended with {daemon.wait()}") from None
        time.sleep(every_s)
    return samples


def coverage(said: str) -> dict[str, int]:
    """Of libFuzzer's last line: edges of code, features, inputs kept."""
    found = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said)
    if not found:
        return {}
    return dict(zip(("edges", "features", "corpus"), map(int, found[-1]), strict=True))


def fuzz(
    given: argparse.Namespace, store: Path, endpoint: str, folder: Path, victim: int,
    daemon: "subprocess.Popen[bytes]",
) -> tuple[dict[str, Any], list[Sample]]:  # fmt: skip
    """All messages; what was sent, and what the daemon held.  Raises SystemExit."""
    notes, said = folder / "sent.json", folder / "fuzzer"
    corpus = given.corpus or folder / "corpus"
    corpus.mkdir(exist_ok=True)
    words = [endpoint, store, victim, given.frames, given.seed, notes, f"{corpus}/"]
    command = [sys.executable, "-m", "tools.fuzz.child", *map(str, words)]
    with (
        said.open("wb") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream) as fuzzer,
    ):
        samples = watch(fuzzer, daemon, given.every)
    text = said.read_text(errors="replace")
    figures: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {"sent": 0}
    if fuzzer.returncode or figures["sent"] < given.frames:
        raise SystemExit(f"after {figures['sent']} messages:\n{text[-4000:]}")
    return figures | coverage(text), samples


def errors_in(log: Path) -> list[str]:
    """Lines of a daemon's log that tell of errors."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if re.search(r" ERROR | CRITICAL |Traceback", line)]


def verdict(samples: list[Sample], judged: bool) -> list[Growth]:
    """Raises SystemExit: something grew, and is `judged`."""
    found = growths(samples, WARM_UP)
    if judged and (grown := [g for g in found if not g.flat and g.figure != "threads"]):
        raise SystemExit(f"the daemon grew: {grown}, allowed: {ALLOWED}")
    return found


def main(words: list[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit where something does not hold."""
    parser = argparse.ArgumentParser(prog="tools.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="messages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mem", default="64M")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--any-growth", action="store_true", help="a short run is all warm-up")
    parser.add_argument("--corpus", type=Path, help="inputs to begin with, and to add to")
    parser.add_argument(
        "--folder", type=Path, help="for everything else; a temporary one otherwise"
    )
    parser.add_argument("--out", default="")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        store = make_store(folder)
        (folder / "run").mkdir()
        endpoint, log = f"ipc://{folder}/run/d", folder / "log"
        daemon = start_daemon(serve_words(store, endpoint, given.mem, 2), log)
        begun = time.monotonic()
        try:
            before = served(wait_status(endpoint, lambda _: True))
            threads = sample(daemon.pid, 0.0).threads
            with beside(endpoint, folder) as (victim, trained):
                figures, samples = fuzz(given, store, endpoint, folder, victim, daemon)
            wait_served(endpoint, before)
            idle = sample(daemon.pid, 0.0).threads
            if idle > threads + _POOL:
                raise SystemExit(f"{idle} threads when all have gone, {threads} before they came")
            counters = ask_status(parse_endpoint(endpoint)).counters
            daemon.terminate()
            code = daemon.wait(END_S)
        finally:
            daemon.kill()
            daemon.wait()
        left = [path.name for path in (folder / "run").iterdir()]
        if code or left:
            raise SystemExit(f"the daemon ended with {code}, left {left}")
        if found := errors_in(log):
            raise SystemExit(f"{len(found)} errors in the log, the first: {found[0]}")
        log_bytes = log.stat().st_size
    grown = verdict(samples, not given.any_growth)
    line = {
        "bench": "fuzz", "date": today(), "machine": machine(), "seed": given.seed,
        "seconds": round(time.monotonic() - begun, 1), **figures, "beside": trained,
        "refused": counters["requests_refused"] + counters["sessions_refused"],
        "attached": counters["sessions_attached"], "log_bytes": log_bytes,
        "growth": {g.figure: [g.first, g.last, g.over_run] for g in grown}, "holds": True,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if given.out:
        with Path(given.out).open("a") as f:
            f.write(json.dumps(line) + "\n")
    return line


if __name__ == "__main__":
    (stores.main if "--store" in sys.argv else main)(sys.argv[1:])
