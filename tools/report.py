"""Figures and tables out of what benches wrote: `python -m tools.report LINES.jsonl... FOLDER`.

Draws, as PNG: bytes read against H and block size (as Fig. 9 of AGNES), seeds per second against
the memory budget (as Fig. 10), partitioners side by side, accuracy against the size of chunks (as
Table 6 of PP-GNN) and, out of a trace, the time line of a daemon's stages; prints Markdown tables.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blockstore.units import parse_bytes
from loaderd.trace import STAGE, STAGES
from tools.pairs import HOP_ACCURACY, interval
from tools.traces import read_trace

_WIDTH, _HEIGHT = 6.4, 4.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a bench, without those that failed."""
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line for line in found if "failed" not in line and "skipped" not in line]


def median(line: dict[str, Any], figure: str) -> float:
    """A figure's median, nan where the line has none."""
    value = line.get(figure)
    return float(value["median"]) if isinstance(value, dict) else float("nan")


def _series(
    axes: Axes,
    lines: list[dict[str, Any]],
    x: Callable[[dict[str, Any]], float],
    y: Callable[[dict[str, Any]], float],
    name: Callable[[dict[str, Any]], str],
) -> None:
    """A marked line for each name, points by ascending x."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        groups.setdefault(name(line), []).append((x(line), y(line)))
    for label, points in sorted(groups.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", label=label)
    if len(groups) > 1:
        axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def draw_reads(lines: list[dict[str, Any]], target: Path) -> None:
    """Bytes read per seed against minibatches built together, a line for each store."""
    figure = Figure((_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    _series(
        axes, [line for line in lines if line.get("size")],
        lambda line: line["size"], lambda line: median(line, "bytes_per_seed") / 1e3,
        lambda line: f"{line['store']}, --mem {line['mem']}",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="minibatches built together (H)")
    axes.set(ylabel="KB read per seed", title="Reads fall with the hyperbatch")
    figure.savefig(target, dpi=150)


def draw_budgets(lines: list[dict[str, Any]], target: Path) -> None:
    """Seeds per second against the memory of the whole process group."""
    figure = Figure((_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    _series(
        axes, [line for line in lines if not line.get("size")],
        lambda line: parse_bytes(line["limit"]) / 2**30, lambda line: median(line, "seeds_per_s"),
        lambda line: "mapped files, PyG's sampler" if line["case"] == "mapped" else "ours",
    )  # fmt: skip
    axes.set(yscale="log", xlabel="memory of daemon and client together (GiB)")
    axes.set(ylabel="seeds per second", title="Throughput against memory")
    figure.savefig(target, dpi=150)


def read_spans(trace: Path) -> list[tuple[str, float, float]]:
    """(stage, begin, end) in seconds since the first began."""
    found = [(STAGES[r.number], *r.ids.tolist()) for r in read_trace(trace) if r.kind == STAGE]
    zero = min((begin for _, begin, _ in found), default=0)
    return [(stage, (begin - zero) / 1e9, (end - zero) / 1e9) for stage, begin, end in found]


def draw_stages(spans: list[tuple[str, float, float]], target: Path) -> None:
    """A bar for each (stage, begin, end) in seconds, a row for each stage."""
    figure = Figure((2 * _WIDTH, _HEIGHT * 0.6), layout="constrained")
    axes = figure.subplots()
    rows = [stage for stage in STAGES if any(span[0] == stage for span in spans)]
    for stage, begin, end in spans:
        axes.barh(
            rows.index(stage), end - begin, left=begin, height=0.6, color=f"C{rows.index(stage)}"
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title="Stages of a run")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(target, dpi=150)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row for each line."""
    head = "| run | seeds/s | KB read / seed | share of the disk | longest wait | killed |"
    rows = [head, "| --- | --- | --- | --- | --- | --- |"]
    for line in lines:
        spread = line["seeds_per_s"]
        rate = f"{spread['median']:,.0f} ({spread['min']:,.0f} - {spread['max']:,.0f})"
        cells = [line["peer"], rate]
        for figure, scale, form in (
            ("bytes_per_seed", 1e-3, "{:.1f}"), ("share_of_disk", 1, "{:.2f}"),
            ("longest_wait_s", 1, "{:.2f} s"),
        ):  # fmt: skip
            value = median(line, figure) * scale
            cells.append("" if value != value else form.format(value))
        rows.append(f"| {' | '.join([*cells, str(line.get('kills', ''))])} |")
    return "\n".join(rows)


def draw_partitions(lines: list[dict[str, Any]], target: Path) -> None:
    """Neighbours kept with 1/8 of the partitions, and divergence of labels, beside each other."""
    groups = list(dict.fromkeys(f"{line['graph']}, {line['num_partitions']}" for line in lines))
    methods = list(dict.fromkeys(line["method"] for line in lines))
    figure = Figure((2 * _WIDTH, _HEIGHT), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("kept_8", "kl_mean"),
        ("Neighbours kept with 1/8 of the partitions", "Divergence of labels (nats)"),
        strict=True,
    ):  # fmt: skip
        for i, method in enumerate(methods):
            at = {f"{x['graph']}, {x['num_partitions']}": x[name] for x in lines
                  if x["method"] == method}  # fmt: skip
            places = [g + (i - len(methods) / 2 + 0.5) / (len(methods) + 1)
                      for g in range(len(groups))]  # fmt: skip
            heights = [at.get(group, float("nan")) for group in groups]
            axes.bar(places, heights, 1 / (len(methods) + 1), label=method)
        axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
        axes.set(title=label)
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
    figure.axes[1].set_yscale("symlog", linthresh=1e-3)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside right upper")
    figure.savefig(target, dpi=150)


def partition_table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row for each partition, against METIS on the same graph where it is there."""
    metis = {(x["graph"], x["num_partitions"]): x for x in lines if x["method"] == "metis"}
    rows = [
        "| graph, k | partitioner | cut | kept at 1/8 (of METIS) | at 1/16 | label KL, mean, max "
        "| KL / random | METIS KL / it | largest, training | scores / (E + V) a pass "
        "| M edges/s a pass (CPU) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for x in lines:
        peer = metis.get((x["graph"], x["num_partitions"]))
        share = f" ({x['kept_8'] / peer['kept_8']:.3f})" if peer else ""
        random, cpu = x["kl_random"], x["pass_cpu_s"]
        size = x["num_edges"] + x["num_nodes"]
        cells = [
            f"{x['graph']}, {x['num_partitions']}", x["method"], f"{x['cut']:.3f}",
            f"{x['kept_8']:.3f}{share}", f"{x['kept_16']:.3f}",
            f"{x['kl_mean']:.3g}, {x['kl_max']:.3g}" if random else "",
            f"{x['kl_mean'] / random:.2f}" if random else "",
            f"{peer['kl_mean'] / x['kl_mean']:.0f}" if random and peer and x["kl_mean"] else "",
            f"{x['node_balance']:.3f}, {x['train_balance']:.3f}",
            f"{x['evaluations'] / x['passes'] / size:.2f}" if x["passes"] else "",
            f"{x['pass_edges'] / x['pass_s'] / 1e6:.0f} ({x['pass_edges'] / cpu / 1e6:.0f})"
            if cpu else "",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw_chunks(lines: list[dict[str, Any]], target: Path) -> None:
    """Test accuracy against rows of a chunk, and what it is beyond that of rows in any order.

    Of each model; bars are 95 % intervals of the mean of paired differences.
    """
    accuracy: dict[str, dict[int, dict[int, float]]] = {}  # model -> chunk, 0: rows -> seed
    for line in lines:
        model, _, order = line["way"].partition(", ")
        chunk = int(order.rpartition(" ")[2]) if order.startswith("chunks") else 0
        accuracy.setdefault(model, {}).setdefault(chunk, {})[line["seed"]] = line["accuracy"]
    figure = Figure((2 * _WIDTH, _HEIGHT), layout="constrained")
    level, beyond = figure.subplots(1, 2)
    for number, (model, found) in enumerate(accuracy.items()):
        chunks, rows = sorted(c for c in found if c), found.get(0, {})
        means = [statistics.fmean(found[c].values()) for c in chunks]
        level.plot(chunks, means, marker="o", label=model, color=f"C{number}")
        if rows:
            level.axhline(statistics.fmean(rows.values()), color=f"C{number}", ls=":", lw=1)
        pairs = [[a - rows[s] for s, a in found[c].items() if s in rows] for c in chunks]
        places = [c * 1.12 ** (number - len(accuracy) / 2) for c in chunks]
        beyond.errorbar(
            places, [statistics.fmean(p) if p else float("nan") for p in pairs],
            [interval(p) if len(p) > 1 else 0.0 for p in pairs],
            marker="o", ls="", capsize=3, color=f"C{number}",
        )  # fmt: skip
    level.set(ylabel="test accuracy (%); dotted: rows in any order")
    figure.legend(frameon=False, loc="outside right upper")
    beyond.set(ylabel="points beyond rows in any order")
    for edge in (-0.5, 0.5):
        beyond.axhline(edge, color="gray", ls="--", lw=1)
    for axes in (level, beyond):
        axes.set(xscale="log", xlabel="rows of a chunk")
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=150)


def main(words: list[str]) -> None:
    """Draw what there are lines for."""
    parser = argparse.ArgumentParser(prog="tools.report", description=__doc__)
    parser.add_argument(
        "lines", type=Path, nargs="*",
        help="of `--out` of `tools.bench hyperbatch`, `tools.partition` or `tools.hop_accuracy`",
    )  # fmt: skip
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", type=Path, help="of `loaderd serve --trace`: its stages")
    given = parser.parse_args(words)
    found = [line for path in given.lines for line in read_lines(path)]
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in found:
        of[line.get("bench", "")].append(line)
    if not (given.trace or of.keys() & {"partition", HOP_ACCURACY, "hyperbatch"}):
        parser.error(f"{len(found)} lines, expected some of a bench that is drawn")
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.trace:
        draw_stages(read_spans(given.trace), given.folder / "stages.png")
    if partitions := of["partition"]:
        draw_partitions(partitions, given.folder / "partitions.png")
        print(partition_table(partitions))
    if chunks := of[HOP_ACCURACY]:
        draw_chunks(chunks, given.folder / "chunks.png")
    if lines := of["hyperbatch"]:
        if any(line.get("size") for line in lines):
            draw_reads(lines, given.folder / "reads.png")
        if any(not line.get("size") for line in lines):
            draw_budgets(lines, given.folder / "budgets.png")
        print(table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
