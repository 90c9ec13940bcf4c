"""Kill an ingest at random moments: `python -m tools.kill_ingest SOURCE`.

Options of `blockstore ingest` stand behind `--`, as in `... SOURCE -- --undirected`.

One undisturbed run says how long it takes and what the store holds.  Then, `--kills` times, the
command is killed (SIGKILL, all its threads) at a moment drawn from the whole of that time, and run
again: it must end by itself, leave nothing beside the store, and every file of the store must have
the bytes of the undisturbed run.  A JSON line for each kill, then one for all; fails at the first
difference.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.machine import machine, today
from tools.tree import differences, file_digests, one_digest, split_options

_DRAWS = 10  # for each kill: a moment may lie behind the end of a run


def ingest_words(source: Path, store: Path, mem: str, options: list[str]) -> list[str]:
    """The command."""
    words = [sys.executable, "-m", "preprocess", "ingest", str(source), str(store)]
    return [*words, "--mem", mem, "--json", *options]


def killed_after(words: list[str], seconds: float) -> bool:
    """Run a command and kill it after so long; whether it was still running.

    Raises SystemExit: it failed by itself.
    """
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
    if process.returncode > 0:
        raise SystemExit(f"the command ended with {process.returncode}: {errors}")
    return process.returncode < 0


def run_to_end(words: Sequence[str]) -> tuple[float, list[str], list[str]]:
    """Seconds, stages that an earlier run did, stages of this one.  Raises SystemExit."""
    begun = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the command ended with {done.returncode}: {done.stderr}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [e for e in events if e["event"] == "stage_end"]
    kept = [e["stage"] for e in ends if e["resumed"]]
    return time.perf_counter() - begun, kept, [e["stage"] for e in ends if not e["resumed"]]


def kill_once(words: list[str], store: Path, moments: random.Random, whole_s: float) -> float:
    """Kill a run at a random moment; returns when.  A run that was over already is removed."""
    for _ in range(_DRAWS):
        after_s = moments.uniform(0, whole_s)
        if killed_after(words, after_s):
            return after_s
        shutil.rmtree(store)
    raise SystemExit(f"{_DRAWS} runs in a row ended before they were killed")


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run it; returns what is printed.  Raises SystemExit where a store differs."""
    parser = argparse.ArgumentParser(prog="tools.kill_ingest", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--folder", type=Path, help="for a store at a time; beside the source")
    parser.add_argument("--mem", default="512M")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="")
    own, options = split_options(words)
    given = parser.parse_args(own)
    parent = given.folder or given.source.absolute().parent
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=parent) as name:
        store = Path(name) / "store"
        command = ingest_words(given.source, store, given.mem, options)
        whole_s, _, stages = run_to_end(command)
        expected = file_digests(store)
        shutil.rmtree(store)
        moments = random.Random(given.seed)
        for number in range(1, given.kills + 1):
            killed_s = kill_once(command, store, moments, whole_s)
            was_there = store.exists()  # killed behind the rename
            seconds, kept, rerun = (0.0, stages, []) if was_there else run_to_end(command)
            if other := differences(expected, file_digests(store)):
                raise SystemExit(f"kill {number}, {killed_s:.2f} s: {', '.join(other)} differ")
            shutil.rmtree(store)
            left = sorted(p.name for p in Path(name).iterdir())
            if left and not was_there:
                raise SystemExit(f"kill {number}, {killed_s:.2f} s: {', '.join(left)} left behind")
            lines.append({
                "kill": number, "after_s": round(killed_s, 3), "stages_kept": len(kept),
                "stages_rerun": rerun, "seconds": round(seconds, 3), "same": True,
            })  # fmt: skip
            _put(lines[-1], given.out)
    lines.append({
        "bench": "kills of an ingest", "date": today(), "machine": machine(), "mem": given.mem,
        "source": str(given.source), "options": options, "seed": given.seed,
        "kills": given.kills, "undisturbed_s": round(whole_s, 3), "num_stages": len(stages),
        "sha256": one_digest(expected),
    })  # fmt: skip
    _put(lines[-1], given.out)
    return lines


def _put(line: dict[str, Any], out: str) -> None:
    print(json.dumps(line), flush=True)
    if out:
        with Path(out).open("a") as f:
            f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
