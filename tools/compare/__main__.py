"""Accuracy in pairs: `python -m tools.compare CASE FOLDER [--out FILE]`.

Each seed trains the same model from the same parameters once in every way; only the loader
differs.  Differences to a baseline are paired by seed, with 95 % intervals.  The score is the mean
of tests in the last fifth of the epochs, or that of the epoch that was best on valid (hops).
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from preprocess.errors import BadInput
from tools.bench.setup import command, serving
from tools.command import parse
from tools.compare.cases import CASES, Way, train
from tools.compare.pairs import finish, run_each
from tools.compare.tasks import CompareOptions, ServedStore


def serve_all(
    case: str, options: CompareOptions, wanted: Sequence[Way], stack: ExitStack
) -> dict[tuple[str, ...], ServedStore]:
    """A store and a daemon for each way of ingesting.  Raises BadInput."""
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{case}-")))
    source, served = CASES[case].source(options, work), {}
    for number, ingest in enumerate(dict.fromkeys(way.ingest for way in wanted)):
        (folder := work / f"daemon-{number}").mkdir()
        words = [str(source), str(folder / "store"), "--no-summary", *ingest]
        command("preprocess", "ingest", *words, *["--undirected"] * options.undirected)
        few = ("--workers", "1", "--readers", "2")
        endpoint = stack.enter_context(serving(folder / "store", folder, options.mem, *few))
        served[ingest] = ServedStore(endpoint, folder / "store")
    return served


def main(words: Sequence[str]) -> str:
    """Do the runs that the file of lines lacks; returns the table of all."""
    about = "\n".join(f"  {name:10}{case.about}" for name, case in CASES.items())
    if not words or words[0] not in CASES:
        print(f"{__doc__}\ncases:\n{about}", file=sys.stderr)
        raise SystemExit(2)
    name, case = words[0], CASES[words[0]]
    options = parse(CompareOptions, words[1:], f"tools.compare {name}", case.about, case.defaults)
    begins = tuple(options.ways)
    wanted = [w for w in case.ways(options) if not begins or w.name.startswith(begins)]

    def runs(done: set[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            served = serve_all(name, options, wanted, stack)
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            left = (
                (name, options, served[way.ingest], way.name, seed)
                for seed in seeds
                for way in wanted
                if (way.name, seed) not in done
            )
            yield from run_each(train, left, options.jobs)

    try:
        return finish(options.out, runs)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main(sys.argv[1:])
