"""What processes hold as time goes on, and whether it grows: for runs that must stay flat."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

PROC = Path("/proc")
ALLOWED = {  # growth over a whole run that is still called flat
    "anon_bytes": 2 << 20,
    "shared_bytes": 2 << 20,
    "descriptors": 0.5,
    "threads": 0.5,
    "mappings": 8.0,  # an allocator maps what it needs, arena by arena
}
_MOST_POINTS = 400  # of a fit
_WIDTH, _HEIGHT = 9.0, 2.2


class Sample(NamedTuple):
    """What a process holds at a moment."""

    at_s: float
    anon_bytes: int
    shared_bytes: int  # shared memory that it has touched
    descriptors: int
    threads: int
    mappings: int


class Growth(NamedTuple):
    """How one figure went, after warm-up."""

    figure: str
    first: float  # median of the first tenth
    last: float  # median of the last tenth
    per_hour: float
    over_run: float  # what the slope makes of the whole run
    flat: bool


def sample(pid: int, at_s: float) -> Sample:
    """What a process holds now.  Raises FileNotFoundError: it has ended."""
    folder = PROC / str(pid)
    lines = (folder / "status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "RssAnon" not in fields:
        raise FileNotFoundError(f"process {pid} has ended")
    anon, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    mappings = (folder / "maps").read_text().count("\n")
    return Sample(at_s, anon, shared, descriptors, int(fields["Threads"]), mappings)


def slope(times: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Median of the slopes between all pairs of points: single peaks do not count.

    Source: Sen, JASA 63, 1968.
    """
    chosen = np.unique(np.linspace(0, times.size - 1, _MOST_POINTS).astype(np.int64))
    x, y = times[chosen], values[chosen]
    low, high = np.triu_indices(x.size, 1)
    return float(np.median((y[high] - y[low]) / (x[high] - x[low])))


def growths(samples: Sequence[Sample], warm_up: float) -> list[Growth]:
    """Of each figure, without the first share `warm_up` of the samples.

    Flat is what grows by no more than `ALLOWED`, both by its slope and from the first tenth to the
    last; what shrinks is.  Raises ValueError: fewer than ten samples are left.
    """
    kept = samples[int(len(samples) * warm_up) :]
    if len(kept) < 10:
        raise ValueError(f"{len(kept)} samples are left after warm-up, expected 10 or more")
    times = np.array([s.at_s for s in kept])
    tenth, span = len(kept) // 10, times[-1] - times[0]
    found = []
    for figure, allowed in ALLOWED.items():
        values = np.array([getattr(s, figure) for s in kept], np.float64)
        first, last = np.median(values[:tenth]), np.median(values[-tenth:])
        rise = slope(times, values)
        flat = max(rise * span, last - first) <= allowed
        found.append(
            Growth(figure, float(first), float(last), rise * 3600, rise * span, bool(flat))
        )
    return found


def draw(series: Mapping[str, Sequence[Sample]], warm_up: float, target: Path, title: str) -> None:
    """PNG: a row for each figure, a line for each process; warm-up is shaded."""
    figure = Figure((_WIDTH, _HEIGHT * len(ALLOWED)), layout="constrained")
    rows = figure.subplots(len(ALLOWED), 1, sharex=True)
    for axes, name in zip(rows, ALLOWED, strict=True):
        scale, unit = (2**20, " (MiB)") if name.endswith("_bytes") else (1, "")
        for label, samples in series.items():
            minutes = [s.at_s / 60 for s in samples]
            axes.plot(minutes, [getattr(s, name) / scale for s in samples], lw=1, label=label)
        last = max(s[-1].at_s for s in series.values()) / 60
        axes.axvspan(0, last * warm_up, color="0.92", zorder=0)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(name.removesuffix("_bytes") + unit)
        axes.grid(alpha=0.3)
    rows[0].legend(frameon=False, ncols=len(series), loc="lower right")
    rows[0].set_title(title)
    rows[-1].set_xlabel("minutes")
    figure.savefig(target, dpi=110)
