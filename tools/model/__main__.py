"""A model of epochs: bytes and seconds from degrees, sizes and rates (docs/scale.md).

python -m tools.model calibrate FOLDER --out FILE            rates of its disk, and of kernels
python -m tools.model predict STORE --mem 1G 2G --machines 1     plans that the store can be read by
python -m tools.model check STORE:1G,2G --plans PLAN --fanouts 10 10      and counted
python -m tools.model paper --rates FILE                     graphs that we have no disk for

`python -m tools.model COMMAND --help` has all options.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from blockstore.errors import StoreError
from blockstore.store import open_store
from blockstore.units import parse_bytes
from loaderd.api.errors import Refused
from loaderd.sessions.engine import default_settings
from tools.command import append, parse, stamped, table
from tools.model.check import HEAD, Workload, compare, possible_plans, row
from tools.model.graph import read_graph
from tools.model.paper import paper_tables
from tools.model.predict import CHUNKS, MACRO, Job, predict
from tools.model.rates import calibrate, load_rates

_CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class CalibrateOptions:
    folder: Annotated[Path, "on the disk that is measured; a graph of 0.6 GB stays there"]
    out: Path = Path("rates.json")


def _calibrate(given: CalibrateOptions) -> None:
    found = calibrate(given.folder)
    given.out.write_bytes(msgspec.json.encode(found))
    print(f"{found}; written to {given.out}")


@dataclass(frozen=True)
class PredictOptions:
    store: Path
    mem: tuple[str, ...] = ("1G",)
    rates: Path = Path("rates.json")
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    machines: int = 1
    cores: Annotated[int, "of each machine"] = _CORES


def _predict(given: PredictOptions) -> None:
    sizes = {mem: parse_bytes(mem) for mem in given.mem}
    store, rates = open_store(given.store), load_rates(given.rates)
    graph, job = read_graph(store, "train"), Job(given.machines, given.cores)
    rows = [["--mem", "plan", "GB first", "GB an epoch", "s first", "s an epoch", "limit"]]
    for mem, num_bytes in sizes.items():
        for plan in possible_plans(given.store):
            asked = Workload(given.store, mem, plan, given.fanouts, given.batch_size, 0).request
            found = predict(store.manifest, graph, default_settings(num_bytes), asked, rates, job)
            read = [f"{part.bytes / 1e9:.2f}" for part in (found.first, found.epoch)]
            times = [f"{part:.1f}" for part in (found.first_s, found.epoch_s)]
            rows.append([mem, plan, *read, *times, found.limit])
    print(table(rows))


@dataclass(frozen=True)
class CheckOptions:
    stores: Annotated[tuple[str, ...], "STORE:MEM,MEM,..."]
    plans: Annotated[tuple[str, ...], "none: all that a store can be read by"] = ()
    rates: Path = Path("rates.json")
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    steps: Annotated[int, "of minibatches that do not stay in memory"] = 4
    out: Path | None = None


def _check(given: CheckOptions) -> None:
    split = [named.rpartition(":") for named in given.stores]
    asked = [(Path(path), mem) for path, _, mems in split for mem in mems.split(",")]
    for _, mem in asked:  # report a wrong size before anything is read
        parse_bytes(mem)
    rates, rows, once = load_rates(given.rates), [list(HEAD)], set[tuple[Path, str]]()
    graphs = {path: read_graph(open_store(path), "train") for path, _ in asked}
    for path, mem in asked:
        for plan in given.plans or tuple(possible_plans(path)):
            if (path, plan) in once:  # reads the same for any memory
                continue
            if plan in (MACRO, CHUNKS):
                once.add((path, plan))
            workload = Workload(path, mem, plan, given.fanouts, given.batch_size, given.steps)
            try:
                found = compare(workload, graphs[path], rates, _CORES)
            except (Refused, StoreError) as error:
                print(f"{path} {mem} {plan}: {error}", file=sys.stderr)
                continue
            rows.append(row(found))
            print(" | ".join(rows[-1]), flush=True)
            line = found._asdict() | {"workload": workload._asdict()}
            append([stamped("model", **line)], given.out)
    print(table(rows))


@dataclass(frozen=True)
class PaperOptions:
    rates: Path = Path("rates.json")


def _paper(given: PaperOptions) -> None:
    for title, rows in paper_tables(load_rates(given.rates)):
        print(f"\n{title}\n\n{table(rows)}")


def main(words: Sequence[str]) -> None:
    commands: dict[str, Callable[[Any], None]] = {
        "calibrate": _calibrate, "predict": _predict, "check": _check, "paper": _paper
    }  # fmt: skip
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print(__doc__)
        return
    if name not in commands:
        raise SystemExit(f"{name!r}: expected one of {', '.join(commands)}")
    work = commands[name]
    given: Any = parse(get_type_hints(work)["given"], words[1:], f"python -m tools.model {name}")
    try:
        work(given)
    except (OSError, StoreError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
