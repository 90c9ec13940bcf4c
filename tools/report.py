"""Figures and tables out of what benches wrote: `python -m tools.report LINES.jsonl... FOLDER`.

Draws, as PNG: bytes read against H and block size (as Fig. 9 of AGNES), seeds per second against
the memory budget (as Fig. 10), partitioners side by side, accuracy against the size of chunks (as
Table 6 of PP-GNN) and, out of a trace, the time line of a daemon's stages; prints Markdown tables.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blockstore.units import parse_bytes
from loaderd.trace import STAGE, STAGES
from tools import command
from tools.compare.pairs import interval
from tools.traces import read_trace

_WIDTH, _HEIGHT = 6.4, 4.0
Line = dict[str, Any]


@dataclass(frozen=True)
class Options:
    lines: Annotated[
        tuple[Path, ...],
        "`--out` of `tools.bench hyperbatch`, `tools.partition` or `tools.compare hops`",
    ]
    folder: Annotated[Path, "for the figures"]
    trace: Annotated[Path | None, "of `loaderd serve --trace`: its stages"] = None


def median(line: Line, figure: str) -> float:
    """A figure's median, nan if the line has none."""
    value = line.get(figure)
    return float(value["median"]) if isinstance(value, dict) else float("nan")


@contextmanager
def axes_of(target: Path, columns: int = 1, height: float = _HEIGHT) -> Iterator[list[Axes]]:
    """Axes beside each other, saved as PNG at the end."""
    figure = Figure((_WIDTH * max(columns, 1), height), layout="constrained")
    yield list(figure.subplots(1, columns, squeeze=False)[0])
    figure.savefig(target, dpi=150)


def _series(
    axes: Axes,
    lines: list[Line],
    x: Callable[[Line], float],
    y: Callable[[Line], float],
    name: Callable[[Line], str],
) -> None:
    """A marked line for each name, points by ascending x."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        groups[name(line)].append((x(line), y(line)))
    for label, points in sorted(groups.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    if len(groups) > 1:
        axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def draw_hyperbatches(lines: list[Line], folder: Path) -> None:
    """Bytes read per seed against H, a line for each store; seeds per second against memory."""
    sized, others = ([x for x in lines if bool(x.get("size")) is has] for has in (True, False))
    if sized:
        with axes_of(folder / "reads.png") as (axes,):
            _series(
                axes, sized, lambda x: x["size"], lambda x: median(x, "bytes_per_seed") / 1e3,
                lambda x: f"{x['store']}, --mem {x['mem']}",
            )  # fmt: skip
            axes.set(xscale="log", yscale="log", xlabel="minibatches built together (H)")
            axes.set(ylabel="KB read per seed", title="Reads fall with the hyperbatch")
    if others:
        with axes_of(folder / "budgets.png") as (axes,):
            _series(
                axes, others, lambda x: parse_bytes(x["limit"]) / 2**30,
                lambda x: median(x, "seeds_per_s"),
                lambda x: "mapped files, PyG's sampler" if x["case"] == "mapped" else "ours",
            )  # fmt: skip
            axes.set(yscale="log", xlabel="memory of daemon and client together (GiB)")
            axes.set(ylabel="seeds per second", title="Throughput against memory")


def hyperbatch_table(lines: list[Line]) -> str:
    rows = [["run", "seeds/s", "KB read / seed", "share of the disk", "longest wait", "killed"]]
    for line in lines:
        rate = "{median:,.0f} ({min:,.0f} - {max:,.0f})".format(**line["seeds_per_s"])
        figures = (
            ("{:.1f}", median(line, "bytes_per_seed") / 1e3),
            ("{:.2f}", median(line, "share_of_disk")),
            ("{:.2f} s", median(line, "longest_wait_s")),
        )
        cells = ["" if value != value else form.format(value) for form, value in figures]
        rows.append([line["side"], rate, *cells, str(line.get("kills", ""))])
    return command.table(rows)


def read_spans(trace: Path) -> list[tuple[str, float, float]]:
    """(stage, begin, end) in seconds since the first began."""
    found = [(STAGES[r.number], *r.ids.tolist()) for r in read_trace(trace) if r.kind == STAGE]
    zero = min((begin for _, begin, _ in found), default=0)
    return [(stage, (begin - zero) / 1e9, (end - zero) / 1e9) for stage, begin, end in found]


def draw_stages(spans: list[tuple[str, float, float]], target: Path) -> None:
    """A bar for each (stage, begin, end) in seconds, a row for each stage."""
    rows = [stage for stage in STAGES if any(span[0] == stage for span in spans)]
    with axes_of(target, height=_HEIGHT * 0.6) as (axes,):
        for stage, begin, end in spans:
            place = rows.index(stage)
            axes.barh(place, end - begin, left=begin, height=0.6, color=f"C{place}")
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set(xlabel="seconds", title="Stages of a run")
        axes.grid(axis="x", alpha=0.3)


def draw_partitions(lines: list[Line], folder: Path) -> None:
    """Neighbors kept with 1/8 of the partitions, and divergence of labels, beside each other."""
    groups = list(dict.fromkeys(f"{x['graph']}, {x['num_partitions']}" for x in lines))
    methods = list(dict.fromkeys(x["method"] for x in lines))
    titles = ("Neighbors kept with 1/8 of the partitions", "Divergence of labels (nats)")
    width = 1 / (len(methods) + 1)
    with axes_of(folder / "partitions.png", 2) as both:
        for axes, name, title in zip(both, ("kept_8", "kl_mean"), titles, strict=True):
            for i, method in enumerate(methods):
                own = [x for x in lines if x["method"] == method]
                places = [groups.index(f"{x['graph']}, {x['num_partitions']}") for x in own]
                shift = (i - len(methods) / 2 + 0.5) * width
                axes.bar([p + shift for p in places], [x[name] for x in own], width, label=method)
            axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
            axes.set(title=title)
            axes.set_axisbelow(True)
            axes.grid(axis="y", alpha=0.3)
        both[1].set_yscale("symlog", linthresh=1e-3)
        names = both[0].get_legend_handles_labels()
        both[0].figure.legend(*names, frameon=False, loc="outside right upper")


def partition_table(lines: list[Line]) -> str:
    """A row for each partition, against METIS on the same graph if there is a line of it."""
    metis = {(x["graph"], x["num_partitions"]): x for x in lines if x["method"] == "metis"}
    rows = [[
        "graph, k", "partitioner", "cut", "kept at 1/8 (of METIS)", "at 1/16",
        "label KL, mean, max", "KL / random", "METIS KL / it", "largest, training",
        "scores / (E + V) a pass", "M edges/s a pass (CPU)",
    ]]  # fmt: skip
    for x in lines:
        peer = metis.get((x["graph"], x["num_partitions"]))
        share = f" ({x['kept_8'] / peer['kept_8']:.3f})" if peer else ""
        random, cpu = x["kl_random"], x["pass_cpu_s"]
        size = x["num_edges"] + x["num_nodes"]
        rows.append([
            f"{x['graph']}, {x['num_partitions']}", x["method"], f"{x['cut']:.3f}",
            f"{x['kept_8']:.3f}{share}", f"{x['kept_16']:.3f}",
            f"{x['kl_mean']:.3g}, {x['kl_max']:.3g}" if random else "",
            f"{x['kl_mean'] / random:.2f}" if random else "",
            f"{peer['kl_mean'] / x['kl_mean']:.0f}" if random and peer and x["kl_mean"] else "",
            f"{x['node_balance']:.3f}, {x['train_balance']:.3f}",
            f"{x['evaluations'] / x['passes'] / size:.2f}" if x["passes"] else "",
            f"{x['pass_edges'] / x['pass_s'] / 1e6:.0f} ({x['pass_edges'] / cpu / 1e6:.0f})"
            if cpu else "",
        ])  # fmt: skip
    return command.table(rows)


def draw_chunks(lines: list[Line], folder: Path) -> None:
    """Test accuracy of each model against rows of a chunk, and against rows in any order.

    Bars are 95 % intervals of the mean of paired differences.
    """
    accuracy: dict[str, dict[int, dict[int, float]]] = {}  # model -> chunk, 0: rows -> seed
    for line in lines:
        model, _, order = line["way"].partition(", ")
        chunk = int(order.rpartition(" ")[2]) if order.startswith("chunks") else 0
        accuracy.setdefault(model, {}).setdefault(chunk, {})[line["seed"]] = line["accuracy"]
    with axes_of(folder / "chunks.png", 2) as (level, beyond):
        for number, (model, found) in enumerate(accuracy.items()):
            color, rows = f"C{number}", found.get(0, {})
            chunks = sorted(c for c in found if c)
            means = [fmean(found[c].values()) for c in chunks]
            level.plot(chunks, means, marker="o", label=model, color=color)
            if rows:
                level.axhline(fmean(rows.values()), color=color, ls=":", lw=1)
            pairs = [[a - rows[s] for s, a in found[c].items() if s in rows] for c in chunks]
            beyond.errorbar(
                [c * 1.12 ** (number - len(accuracy) / 2) for c in chunks],
                [fmean(p) if p else float("nan") for p in pairs],
                [interval(p) if len(p) > 1 else 0.0 for p in pairs],
                marker="o", ls="", capsize=3, color=color,
            )  # fmt: skip
        level.set(ylabel="test accuracy (%); dotted: rows in any order")
        level.legend(frameon=False)
        beyond.set(ylabel="points beyond rows in any order")
        for edge in (-0.5, 0.5):
            beyond.axhline(edge, color="gray", ls="--", lw=1)
        for axes in (level, beyond):
            axes.set(xscale="log", xlabel="rows of a chunk")
            axes.grid(alpha=0.3)


def main(words: list[str]) -> None:
    """Draw what there are lines for."""
    given = command.parse(Options, words, __doc__, "tools.report")
    of: dict[str, list[Line]] = defaultdict(list)
    for line in [x for path in given.lines for x in command.read_lines(path)]:
        if "failed" not in line and "skipped" not in line:
            chunks = line.get("bench") == "compare" and line["case"] == "hops"
            of["chunks" if chunks else line.get("bench", "")].append(line)
    if not (given.trace or of.keys() & {"partition", "chunks", "hyperbatch"}):
        total = sum(map(len, of.values()))
        raise SystemExit(f"error: {total} lines, expected some of a bench that is drawn")
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.trace:
        draw_stages(read_spans(given.trace), given.folder / "stages.png")
    if of["partition"]:
        draw_partitions(of["partition"], given.folder)
        print(partition_table(of["partition"]))
    if of["chunks"]:
        draw_chunks(of["chunks"], given.folder)
    if of["hyperbatch"]:
        draw_hyperbatches(of["hyperbatch"], given.folder)
        print(hyperbatch_table(of["hyperbatch"]))


if __name__ == "__main__":
    main(sys.argv[1:])
