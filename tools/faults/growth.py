"""Samples of what processes hold over time, and checks that it does not grow.

A kernel that is used for the first time is compiled, or loaded, in the process: it takes a megabyte
or two, once, and adds machine code.  Memory and mappings that come with it do not count as growth;
more machine code than `ALLOWED` does.

Resources that go up and down with a process's work have no trend.  Every sample is compared with a
bound instead: a trainer that attaches again and again has touched from one to all pages of its
arena, but maps one arena at a time.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.bench.resources import PROC, counts_of
from tools.command import table

ALLOWED = {  # growth over a whole run that still counts as flat
    "anon_bytes": 2 << 20,
    "shared_bytes": 2 << 20,
    "descriptors": 0.5,
    "threads": 0.5,
    "mappings": 8.0,  # an allocator maps what it needs, arena by arena
    "code_bytes": 1 << 20,  # kernels that were not used before
}
NO_BOUNDS: Mapping[str, Any] = MappingProxyType({})
_WITH_CODE = ("anon_bytes", "mappings")  # they grow with machine code
# Sessions hold some of these, and their number varies: a leak shows in the minimum of each stretch
# of time.
_OF_SESSIONS = ("descriptors", "threads")
_STRETCHES = 40
_LOAD_S = 10.0  # duration of a load, before its code appears and after
_MAX_POINTS = 400  # most points of a fit


class ProcessSample(NamedTuple):
    """The resources that a process holds at one moment."""

    at_s: float
    anon_bytes: int
    shared_bytes: int  # shared memory that it has touched
    descriptors: int
    threads: int
    mappings: int
    code_bytes: int  # executable memory without a file: code compiled, or loaded as data
    arenas: int = 0  # mappings of daemons' arenas


class Growth(NamedTuple):
    """The growth of one figure after warm-up."""

    figure: str
    first: float  # median of the first tenth
    last: float  # median of the last tenth
    per_hour: float  # slope, leaving out loads of code
    flat: bool  # or within its bound
    bound: float | None = None

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return "flat" if self.flat else "GROWS"
        return f"{'within' if self.flat else 'BEYOND'} {self.bound:,.0f}"


def sample(pid: int, at_s: float) -> ProcessSample:
    """Sample a process.  Raises FileNotFoundError: it has ended."""
    folder = PROC / str(pid)
    fields = counts_of(folder / "status")
    if "RssAnon" not in fields:
        raise FileNotFoundError(f"process {pid} has ended")
    anon, shared = (fields[name] * 1024 for name in ("RssAnon", "RssShmem"))
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    maps = (folder / "maps").read_text().splitlines()
    code = sum(_code_bytes(line) for line in maps)
    arenas = sum("memfd:blockstore-arena" in line for line in maps)
    return ProcessSample(
        at_s, anon, shared, descriptors, fields["Threads"], len(maps), code, arenas
    )


def _code_bytes(mapping: str) -> int:
    """Bytes of a line of `maps`, if it is executable and has no file; else 0."""
    words = mapping.split()
    if len(words) > 5 or "x" not in words[1]:
        return 0
    low, high = (int(end, 16) for end in words[0].split("-"))
    return high - low


def without_loads(
    times: NDArray[np.float64], code: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The values without changes near a load of machine code.

    times   float64 (samples,)   s, ascending
    code    float64 (samples,)   bytes
    """
    changes = times[1:][np.diff(code) != 0]
    first = np.searchsorted(changes, times[1:] - _LOAD_S)
    near = np.searchsorted(changes, times[:-1] + _LOAD_S, "right") > first
    steps = np.where(near, 0, np.diff(values))
    found: NDArray[np.float64] = values[0] + np.concatenate([[0], np.cumsum(steps)])
    return found


def minimum(
    times: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The begin and the minimum of about `_STRETCHES` stretches of time."""
    begins = np.arange(0, times.size, max(1, times.size // _STRETCHES))
    return times[begins], np.minimum.reduceat(values, begins)


def slope(times: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Median of the slopes between pairs of points (Theil-Sen): ignores single peaks."""
    from scipy.stats import theilslopes  # takes a second of CPU in each process that imports it

    chosen = np.unique(np.linspace(0, times.size - 1, _MAX_POINTS).astype(np.int64))
    return float(theilslopes(values[chosen], times[chosen]).slope)


def growths(
    samples: Sequence[ProcessSample],
    warm_up: float,
    allowed: Mapping[str, float] = ALLOWED,
    bounds: Mapping[str, float] = NO_BOUNDS,
) -> list[Growth]:
    """Growth of each figure of `allowed` and `bounds`, after a share `warm_up` of the samples.

    A figure is flat if it shrinks, or grows by no more than `allowed`, both by its slope and from
    the first tenth to the last, leaving out loads of code and what sessions hold.  A figure of
    `bounds` may grow, but no sample may exceed its bound.  Raises ValueError: fewer than ten
    samples are left after warm-up.
    """
    kept = samples[int(len(samples) * warm_up) :]
    if len(kept) < 10:
        raise ValueError(f"{len(kept)} samples are left after warm-up, expected 10 or more")
    times = np.array([s.at_s for s in kept])
    code = np.array([s.code_bytes for s in kept], np.float64)
    span = times[-1] - times[0]
    found = []
    for figure in dict.fromkeys([*allowed, *bounds]):
        at, values = times, np.array([getattr(s, figure) for s in kept], np.float64)
        if figure in _OF_SESSIONS and figure not in bounds:
            at, values = minimum(times, values)
        tenth = at.size // 10
        first, last = np.median(values[:tenth]), np.median(values[-tenth:])
        own = without_loads(times, code, values) if figure in _WITH_CODE else values
        rise = slope(at, own)
        if (bound := bounds.get(figure)) is None:
            growth = max(rise * span, np.median(own[-tenth:]) - np.median(own[:tenth]))
            flat = growth <= allowed[figure]
        else:
            flat = values.max() <= bound
        found.append(Growth(figure, float(first), float(last), rise * 3600, bool(flat), bound))
    return found


def judge(
    series: Mapping[str, Sequence[ProcessSample]],
    warm_up: float,
    allowed: Mapping[str, float] = ALLOWED,
    bounds: Mapping[str, Mapping[str, float]] = NO_BOUNDS,
) -> dict[str, Any]:
    """Print a table of all figures; returns them by process, and under "grows" what grew.

    bounds   by process, of figures that go up and down
    """
    found: dict[str, Any] = {}
    rows = [["process", "figure", "first", "last", "an hour", ""]]
    for name, samples in series.items():
        found[name] = {}
        for g in growths(samples, warm_up, allowed, bounds.get(name, NO_BOUNDS)):
            found[name][g.figure] = {"first": g.first, "last": g.last, "per_hour": g.per_hour}
            ends = [f"{g.first:,.0f}", f"{g.last:,.0f}", f"{g.per_hour:+,.1f}"]
            rows.append([name, g.figure, *ends, g.verdict])
            if not g.flat:
                found.setdefault("grows", []).append(f"{name}: {g.figure}")
    print(table(rows), flush=True)
    return found
