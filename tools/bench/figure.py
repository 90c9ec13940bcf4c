"""Line charts as SVG: both axes logarithmic, limits as dashed lines."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 680, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 650, 70, 330
_MIN_APART = 40  # least distance of numbers on the horizontal axis
_CLASSES = ("ours", "peer", "third")
_STYLE = """
    .page { fill: #ffffff; }
    .ours { fill: #0969da; stroke: #0969da; }
    .peer { fill: #8c959f; stroke: #8c959f; }
    .third { fill: #bf8700; stroke: #bf8700; }
    path { stroke-width: 2; }
    .axis, .limit { stroke: #8c959f; stroke-width: 1; fill: none; }
    .limit { stroke-dasharray: 5 4; }
    text { font-family: system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 12px;
           fill: #1f2328; stroke: none; }
    .name { font-weight: 600; font-size: 15px; }
    .end { text-anchor: end; }
    .middle { text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; }
      .ours { fill: #58a6ff; stroke: #58a6ff; }
      text { fill: #e6edf3; }
    }"""


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]  # x ascending; both above 0


class Chart(NamedTuple):
    title: str
    x: str  # label of the axis
    y: str
    series: Sequence[Series]
    limits: Sequence[tuple[str, float]] = ()  # name and y of a dashed line


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    stop: float

    def place(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return round(self.start + share * (self.stop - self.start), 1)


def draw(chart: Chart) -> str:
    """The chart as SVG text.  Raises ValueError: there is no point."""
    points = [p for series in chart.series for p in series.points]
    if not points:
        raise ValueError(f"{chart.title}: no point to draw")
    xs = sorted({x for x, _ in points})
    ys = [y for _, y in points] + [y for _, y in chart.limits]
    ticks = _ticks(min(ys), max(ys))
    wide = _Scale(xs[0] / 1.1, xs[-1] * 1.1, _LEFT, _RIGHT)
    high = _Scale(min(*ys, ticks[0]) / 1.05, max(*ys, ticks[-1]) * 1.05, _BOTTOM, _TOP)
    said = "; ".join(
        f"{s.name}: " + ", ".join(f"{y:,.4g} at {x:,.4g}" for x, y in s.points)
        for s in chart.series
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-labelledby="title summary">',
        f'  <title id="title">{escape(chart.title)}</title>',
        f'  <desc id="summary">{escape(said)}</desc>',
        f"  <style>{_STYLE}\n  </style>",
        f'  <rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'  <text class="name" x="{_LEFT}" y="26">{escape(chart.title)}</text>',
        f'  <path class="axis" d="M{_LEFT} {_TOP} V{_BOTTOM} H{_RIGHT}"/>',
        f'  <text class="end" x="{_RIGHT}" y="{_BOTTOM + 42}">{escape(chart.x)}</text>',
        f'  <text x="12" y="{_TOP - 12}">{escape(chart.y)}</text>',
    ]
    last = -math.inf
    for x in xs:
        at = wide.place(x)
        if at - last >= _MIN_APART:
            lines.append(f'  <text class="middle" x="{at}" y="{_BOTTOM + 20}">{x:,.0f}</text>')
            last = at
    for y in ticks:
        at = high.place(y)
        lines.append(f'  <path class="axis" d="M{_LEFT - 4} {at} H{_LEFT}"/>')
        shown = f"{y:,.0f}" if y >= 1 else f"{y:g}"
        lines.append(f'  <text class="end" x="{_LEFT - 8}" y="{at + 4}">{shown}</text>')
    for name, y in chart.limits:
        at = high.place(y)
        lines.append(f'  <path class="limit" d="M{_LEFT} {at} H{_RIGHT}"/>')
        lines.append(f'  <text x="{_LEFT + 6}" y="{at - 6}">{escape(name)}</text>')
    for i, series in enumerate(chart.series):
        kind = _CLASSES[i % len(_CLASSES)]
        places = [(wide.place(x), high.place(y)) for x, y in series.points]
        way = " L".join(f"{x} {y}" for x, y in places)
        lines.append(f'  <path class="{kind}" style="fill: none" d="M{way}"/>')
        lines += [f'  <circle class="{kind}" cx="{x}" cy="{y}" r="4"/>' for x, y in places]
        at = _LEFT + 20 + 200 * i
        lines.append(f'  <circle class="{kind}" cx="{at - 10}" cy="44" r="4"/>')
        lines.append(f'  <text x="{at}" y="48">{escape(series.name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from the last below `low` to the first above `high`."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    steps = [m * 10.0**e for e in decades for m in (1, 2, 5)]
    first = max((i for i, s in enumerate(steps) if s <= low), default=0)
    last = min((i for i, s in enumerate(steps) if s >= high), default=len(steps) - 1)
    return steps[first : last + 1]
