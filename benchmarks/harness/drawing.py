"""Pictures of the documentation as SVG: system fonts, readable in light and dark, words of the glossary."""

import re
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

GLOSSARY = Path(__file__).parents[2] / "docs/glossary.md"
LABEL = 15
"""The height of a label of a line."""
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; } .strong { font-weight: 600; } .middle { text-anchor: middle; }
  .end { text-anchor: end; } .paper { fill: #ffffff; } .box { fill: #f6f8fa; stroke: #818b98; }
  .work { fill: #b6e3ff; } .pause { fill: #d1d9e0; } .memory { fill: #aceebb; } .storage { fill: #ffd8b5; }
  .line { stroke: #59636e; stroke-width: 1.5; fill: none; } .dashed { stroke-dasharray: 5 4; }
  .lost { stroke: #cf222e; stroke-width: 3; } .mark { fill: #1f2328; } text.inverse { fill: #ffffff; font-weight: 600; }
  .tip { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #b1bac4; } .paper { fill: #0d1117; } .box { fill: #151b23; stroke: #656c76; }
    .work { fill: #0c3d75; } .pause { fill: #3d444d; } .memory { fill: #0f5323; } .storage { fill: #762d0a; }
    .line { stroke: #b1bac4; } .lost { stroke: #ff7b72; } .mark { fill: #f0f6fc; } text.inverse { fill: #0d1117; }
    .tip { fill: #b1bac4; }
  }
"""


@cache
def words() -> frozenset[str]:
    """Return the words that the glossary defines."""
    rows = re.findall(r"^\| ([a-z][a-z, ]*?)(?: \([a-z ]+\))? \|", GLOSSARY.read_text(), re.MULTILINE)
    return frozenset(word for row in rows for word in row.split(", ")) - {"word"}


def word(name: str) -> str:
    """A word that the glossary has."""
    if name not in words():
        raise KeyError(f"{name!r} is not in {GLOSSARY.name}")
    return name


class Drawing:
    """Shapes and text, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, list[str]()

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="3"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{attribute} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def line(self, points: list[tuple[float, float]], kind: str = "line") -> None:
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{path}"/>')

    def labelled_line(
        self, points: list[tuple[float, float]], x: float, above: float, text: str, kind: str = "line"
    ) -> float:
        """A line with a label at ``x``, as high as its end or below the label ``above``; returns the label's height."""
        self.line(points, kind)
        y = max(points[-1][1], above + LABEL)
        self.line([points[-1], (x, y)], "line dashed")
        self.text(x + 4, y + 4, text, "small")
        return y

    def arrow(self, points: list[tuple[float, float]], kind: str = "line") -> None:
        """A line whose last part, which is horizontal or vertical, ends in a tip."""
        (x0, y0), (x, y) = points[-2:]
        along = ((x > x0) - (x < x0), (y > y0) - (y < y0))
        back = (x - 8 * along[0], y - 8 * along[1])
        self.line([*points[:-1], back], kind)
        side = (4 * along[1], 4 * along[0])
        self.parts.append(
            f'<path class="tip" d="M{x:.1f} {y:.1f} L{back[0] + side[0]:.1f} {back[1] + side[1]:.1f} '
            f'L{back[0] - side[0]:.1f} {back[1] - side[1]:.1f} Z"/>'
        )

    def mark(self, x: float, y: float, number: int) -> None:
        self.parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
        self.text(x, y + 4.5, str(number), "inverse middle")

    def svg(self) -> str:
        width, height = self.size
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img">\n<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n'
            f'<rect class="paper" width="{width}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
        )
