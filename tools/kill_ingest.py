"""Kill an ingest at random moments: `python -m tools.kill_ingest SOURCE`.

Options of `blockstore ingest` stand behind `--`, as in `... SOURCE -- --undirected`.

One undisturbed run says how long it takes and what the store holds.  Then, `--kills` times, the
command is killed (SIGKILL, all its threads) at a moment drawn from the whole of that time, and run
again: it must end by itself, leave nothing beside the store, and every file of the store must have
the bytes of the undisturbed run.  A JSON line for each kill, then one for all; fails at the first
difference.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

from tools.bench.setup import command, stage_ends
from tools.command import byte_size, parse, put, split_options, stamped
from tools.tree import differences, file_digests, one_digest

_DRAWS = 10  # for each kill: a moment may lie behind the end of a run


@dataclass(frozen=True)
class KillOptions:
    source: Path
    folder: Annotated[Path | None, "for a store at a time; else beside the source"] = None
    mem: Annotated[str, byte_size] = "512M"
    kills: int = 20
    seed: int = 0
    out: Annotated[Path | None, "append the lines of JSON"] = None


def killed_after(words: list[str], seconds: float) -> bool:
    """Run one of our commands and kill it after so long; whether it was still running.

    Raises SystemExit: it failed by itself.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
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
    ends = stage_ends(command(*words))
    kept, rerun = ([e["stage"] for e in ends if e["resumed"] is was] for was in (True, False))
    return time.perf_counter() - begun, kept, rerun


def kill_once(
    words: list[str], store: Path, moments: Random, whole_s: float
) -> tuple[float, float]:
    """Kill a run at a random moment within `whole_s`; returns when, and how long a run may take.

    A run that was over already is removed; others will not take longer than it.
    """
    for _ in range(_DRAWS):
        after_s = moments.uniform(0, whole_s)
        if killed_after(words, after_s):
            return after_s, whole_s
        shutil.rmtree(store)
        whole_s = after_s
    raise SystemExit(f"{_DRAWS} runs in a row ended before they were killed")


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run it; returns what is printed.  Raises SystemExit: a store differs."""
    own, options = split_options(words)
    given = parse(KillOptions, own)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.folder or given.source.absolute().parent) as name:
        store = Path(name) / "store"
        words = ["preprocess", "ingest", str(given.source), str(store), "--mem", given.mem]
        words += ["--json", *options]
        whole_s, _, stages = run_to_end(words)
        expected = file_digests(store)
        shutil.rmtree(store)
        moments, most_s = Random(given.seed), whole_s
        for number in range(1, given.kills + 1):
            killed_s, most_s = kill_once(words, store, moments, most_s)
            was_there = store.exists()  # killed after the rename
            seconds, kept, rerun = (0.0, stages, []) if was_there else run_to_end(words)
            other = [f"{n} differs" for n in differences(expected, file_digests(store))]
            shutil.rmtree(store)
            if not was_there:
                other += [f"{p.name} is left" for p in sorted(Path(name).iterdir())]
            if other:
                raise SystemExit(f"kill {number}, {killed_s:.2f} s: {', '.join(other)}")
            line = {
                "kill": number, "after_s": round(killed_s, 3), "stages_kept": len(kept),
                "stages_rerun": rerun, "seconds": round(seconds, 3), "same": True,
            }  # fmt: skip
            lines.append(put(line, given.out))
    line = stamped(
        "kills of an ingest", mem=given.mem, source=str(given.source), options=options,
        seed=given.seed, kills=given.kills, undisturbed_s=round(whole_s, 3),
        num_stages=len(stages), sha256=one_digest(expected),
    )  # fmt: skip
    return [*lines, put(line, given.out)]


if __name__ == "__main__":
    main(sys.argv[1:])
