"""A timeline as inline SVG: lanes of coloured bars over one axis of time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from fastckpt._core.report.goodput import TRAINING
from fastckpt_run.cli.output import plain

WIDTH = 2000
"""Units of a lane's width; a bar has at least one."""
_HEIGHT = 20
_MARK = 4.0
"""Units of the width of an instant."""
_THINNEST = 0.05
"""Units of the width of a bar too narrow to be seen."""
_TRUE = TRAINING
"""Events so frequent that they must not be drawn wider than they are."""
_CROWD = WIDTH // 2
"""Number of bars from which on none is drawn in a lane that they fill: they would hide most of the time's use."""

_STRIPES = "M{0} 10L{2} 0M-{1} 2.5L{1} -2.5M{3} 12.5L{4} 7.5"
HATCHES = '<svg class="hatches" aria-hidden="true">{}{}</svg>'.format(
    *(
        f'<pattern id="{name}" width="{width}" height="10" patternUnits="userSpaceOnUse">'
        f'<rect width="{width}" height="10"></rect>'
        f'<path d="{_STRIPES.format(0, width // 4, width, width * 3 // 4, width * 5 // 4)}"></path></pattern>'
        for name, width in (("hatch", 16), ("hatch-narrow", 64))  # units, which a phone makes narrow
    )
)
"""Patterns of repeated work, once in a page: its colour and that of useful work are alike to some eyes."""


@dataclass(frozen=True)
class Bar:
    """A stretch of time in a lane: nanoseconds, its kind (a class of the style sheet), and its title."""

    begin: int
    end: int
    kind: str
    title: str = ""


@dataclass(frozen=True)
class Axis:
    """The time that a chart shows, in nanoseconds."""

    begin: int
    end: int

    def at(self, instant: int) -> float:
        """The place of an instant on the axis, from 0 to 1."""
        return min(1.0, max(0.0, (instant - self.begin) / max(1, self.end - self.begin)))

    def ticks(self, most: int) -> list[tuple[int, str]]:
        """Round times since the beginning, about so many at most, and their labels."""
        length = max(1, self.end - self.begin)
        step = next(step for step in _steps() if step * most >= length)
        name, unit = next(((name, unit) for name, unit in _UNITS.items() if step % unit == 0), ("ns", 1))
        return [(tick, f"{tick // unit:,} {name}" if tick else "0") for tick in range(0, length + 1, step)]


_SECOND = 10**9
_UNITS = {"d": 86400 * _SECOND, "h": 3600 * _SECOND, "min": 60 * _SECOND, "s": _SECOND, "ms": 10**6, "us": 10**3}


def _steps() -> Iterator[int]:
    """Steps between ticks, in nanoseconds: round to those who count in tens, minutes, hours and days."""
    for power in range(3, 10):
        yield from (factor * 10**power for factor in (1, 2, 5))
    seconds = [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200]
    yield from (second * 10**9 for second in seconds)
    days = 1
    while True:
        yield days * 86400 * 10**9
        days *= 2


def lane(bars: Iterable[Bar], axis: Axis) -> str:
    """The bars of a lane, first ones below; those too thin to be distinguished are drawn as one."""
    distinct = list(_merged(bars, axis))
    filled = 2 * sum(bar.end - bar.begin for bar in distinct) > axis.end - axis.begin
    crowded = filled and len(distinct) > _CROWD
    drawn = "".join(_rectangle(bar, axis, crowded=crowded) for bar in distinct)
    return f'<svg viewBox="0 0 {WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'


def _merged(bars: Iterable[Bar], axis: Axis) -> Iterator[Bar]:
    # One unit of the drawing: a page with a million bars would not open in a browser.
    unit = max(1, (axis.end - axis.begin) // WIDTH)
    waiting: Bar | None = None
    for bar in bars:
        if waiting is not None and waiting.kind == bar.kind and bar.end - waiting.begin < unit:
            waiting = Bar(waiting.begin, max(waiting.end, bar.end), bar.kind, waiting.title)
            continue
        if waiting is not None:
            yield waiting
        waiting = bar
    if waiting is not None:
        yield waiting


def _rectangle(bar: Bar, axis: Axis, *, crowded: bool) -> str:
    left, right = axis.at(bar.begin) * WIDTH, axis.at(bar.end) * WIDTH
    is_true = crowded or bar.kind in _TRUE
    least = _MARK if bar.begin == bar.end else 0.0 if is_true else 1.0
    if crowded and max(least, right - left) < _THINNEST:
        return ""
    title = f"<title>{escape(plain(bar.title))}</title>" if bar.title else ""
    place = f'x="{min(left, WIDTH - least):.1f}" width="{max(least, right - left):.1f}" height="{_HEIGHT}"'
    return f'<rect class="{escape(bar.kind)}" {place}>{title}</rect>'
