"""Rate and bytes read by memory, from the minimum to all in memory, and by hyperbatch size."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from blockstore.units import parse_bytes
from clients.torch import NeighborDataset
from tools.bench.epochs import ALL_STEPS, ServedEpochs
from tools.bench.figure import Chart, Series, draw
from tools.bench.harness import BenchOptions, BenchPlan, Side
from tools.bench.resources import bytes_read, cpu_seconds, descendants
from tools.bench.setup import counters, drop_cache, serving, total_bytes

_NAMES = ("all included", "after the first batch")
_CLIENT_BYTES = 768 << 20  # added to --mem for a control group: interpreters, torch and its batches


def run_cold(given: ServedEpochs) -> Mapping[str, float]:
    """Run a fresh daemon and session, and count everything from the attach on."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(given.store, Path(folder), given.mem, *given.serve) as endpoint,
    ):
        pids = descendants(os.getpid())
        read, cpu, begun = bytes_read(pids), cpu_seconds(pids), time.perf_counter()
        data: Any = NeighborDataset(endpoint, **given.options)
        seeds = steps = first_seeds = first_read = 0
        first_s = 0.0
        for batch in data:
            assert batch.x.size(0) >= batch.batch_size
            seeds, steps = seeds + int(batch.batch_size), steps + 1
            if steps == 1:
                first_s, first_seeds = time.perf_counter() - begun, seeds
                first_read = bytes_read(pids) - read
            if steps == given.steps:
                break
        seconds, read = time.perf_counter() - begun, bytes_read(pids) - read
        found = counters(endpoint)
        figures = {
            "seeds_per_s": seeds / seconds, "first_s": first_s, "KB_per_seed": read / seeds / 1e3,
            "seeds_per_s_later": (seeds - first_seeds) / (seconds - first_s),
            "KB_per_seed_later": (read - first_read) / max(1, seeds - first_seeds) / 1e3,
            "cpu_ms_per_batch": 1e3 * (cpu_seconds(pids) - cpu) / steps, "steps": steps,
            "groups": found.get("hyper_groups", 0), "rows_kept": found.get("hyper_stay_rows", 0),
        }  # fmt: skip
        data.close()
    return figures


@dataclass(frozen=True)
class BudgetOptions(BenchOptions):
    stores: Annotated[tuple[Path, ...], "each with figures of its own"] = ()
    mem: Annotated[tuple[str, ...], "of the daemon; the last one holds all"] = (
        "256M", "512M", "1G", "1350M", "2G", "3300M", "4G", "8G",
    )  # fmt: skip
    steps: Annotated[tuple[int, ...], "batches, by --mem; 0: an epoch"] = (
        16, 30, 60, 100, 200, 0, 0, 0,
    )  # fmt: skip
    sizes: Annotated[tuple[int, ...], "minibatches of a hyperbatch"] = (4, 16, 32, 64, 128)
    sizes_mem: Annotated[str, "for these; nothing if empty"] = "3300M"
    sizes_steps: int = 256
    figures: Annotated[Path | None, "folder for the pictures"] = None
    rounds: int = 1
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000


def budgets(given: BudgetOptions) -> Iterator[BenchPlan]:
    """Seeds a second and bytes a seed against memory, and against the size of hyperbatches.

    Cold, the attach and all first reads included, daemon and client in a control group of --mem and
    768 MiB.  With --figures the pictures are drawn, the rate with all in memory as a line in them.
    """
    for store in given.stores:
        setting = {"store": store.name, "store_bytes": total_bytes(store)}
        options = {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
        serve = ("--workers", "2", "--session-share", "1")

        def side(name: str, mem: str, steps: int, own: Mapping[str, Any]) -> Side:
            served = ServedEpochs(store, mem, {**options, **own}, serve, steps=steps or ALL_STEPS)  # noqa: B023
            limit = str(parse_bytes(mem) + _CLIENT_BYTES)
            return Side(name, run_cold, (served,), {"mem": mem, **own}, limit)

        memory = [
            side(mem, mem, steps, {}) for mem, steps in zip(given.mem, given.steps, strict=True)
        ]
        sizes = [
            side(f"H={size}", given.sizes_mem, given.sizes_steps, {"hyperbatch": size})
            for size in (given.sizes if given.sizes_mem else ())
        ]
        lines: list[dict[str, Any]] = []
        for sides in filter(None, (memory, sizes)):
            yield BenchPlan(
                sides, setting, before=partial(drop_cache, store), warm=False, lines=lines
            )
        if given.figures is not None:
            found = {line["side"]: line for line in lines}
            _draw(given, store, found, [s.name for s in memory], [s.name for s in sizes])


def _draw(
    given: BudgetOptions,
    store: Path,
    found: Mapping[str, Mapping[str, Any]],
    memory: Sequence[str],
    sizes: Sequence[str],
) -> None:
    """Draw three pictures: rate and bytes by memory, bytes by hyperbatch size."""

    def points(names: Sequence[str], xs: Sequence[float], figure: str) -> Series:
        values = [
            (x, found[n].get(figure, {}).get("median")) for n, x in zip(names, xs, strict=True)
        ]
        some = [(x, y) for x, y in values if y]  # no skipped sides; a log axis has no 0
        return Series(_NAMES[figure.endswith("_later")], some)

    assert given.figures is not None
    given.figures.mkdir(parents=True, exist_ok=True)
    mib = [parse_bytes(m) / 2**20 for m in given.mem]
    rate = points(memory, mib, "seeds_per_s")
    whole = found[memory[-1]].get("seeds_per_s", {}).get("median")
    limits = (("all in memory", whole),) if whole else ()
    charts = {
        "rate": Chart(
            "Seeds a second against memory", "--mem, MiB", "seeds a second",
            (rate, points(memory, mib, "seeds_per_s_later")), limits,
        ),
        "bytes": Chart(
            "KB read a seed against memory", "--mem, MiB", "KB a seed",
            (points(memory, mib, "KB_per_seed"),
             points(memory[:-1], mib[:-1], "KB_per_seed_later")),  # the last reads no more
        ),
        "groups": Chart(
            f"KB read a seed against minibatches together, --mem {given.sizes_mem}",
            "minibatches of a hyperbatch", "KB a seed",
            tuple(
                points(sizes, [float(s) for s in given.sizes], f)
                for f in ("KB_per_seed", "KB_per_seed_later")
            ) if sizes else (),
        ),
    }  # fmt: skip
    for name, chart in charts.items():
        if any(series.points for series in chart.series):
            path = given.figures / f"memory-{name}-{store.name}.svg"
            path.write_text(draw(chart))
            print(path, flush=True)
