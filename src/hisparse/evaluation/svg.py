"""Line plots as SVG, without a library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 860, 220, 60, 30, 60
"""Of a panel, the space left of it, above the first, and between two. Pixels."""

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis, from 0 to `end`. `marks`: places with a line and a name each, under the plot's lines."""

    end: float
    label: str
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one axis, from 0 to `top`, each with a name. `dots` shows the points themselves too."""

    title: str
    series: Mapping[str, Points]
    top: float
    axis: Axis
    dots: bool = False


def document(panels: Sequence[Panel]) -> str:
    """The panels under each other."""
    total = len(panels) * (HEIGHT + GAP) + TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 20}" height="{total}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{total}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        top = TOP + index * (HEIGHT + GAP)
        parts += [*_frame(panel, top), *_marks(panel.axis, top), *_lines(panel, top)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(panel: Panel, top: float) -> list[str]:
    bottom = top + HEIGHT
    return [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{LEFT}" y="{top - 8}">{escape(panel.title)}</text>',
        f'<text x="{LEFT - 8}" y="{top + 10}" text-anchor="end">{panel.top:.3g}</text>',
        f'<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{bottom + 16}" text-anchor="end">{escape(panel.axis.label)}</text>',
    ]


def _marks(axis: Axis, top: float) -> list[str]:
    parts = []
    for index, (place, name) in enumerate(axis.marks):
        x = LEFT + WIDTH * place / axis.end
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}" stroke="#ccc"/>')
        height = top + HEIGHT - 6 - 14 * (index % 4)
        parts.append(f'<text x="{x + 3:.1f}" y="{height:.1f}" fill="#666" font-size="10">{escape(name)}</text>')
    return parts


def _lines(panel: Panel, top: float) -> list[str]:
    parts = []
    for index, (name, points) in enumerate(panel.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(LEFT + WIDTH * x / panel.axis.end, top + HEIGHT * (1 - y / panel.top)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        if panel.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{LEFT + 160 + 110 * index}" y="{top - 8}" fill="{colour}">{escape(name)}</text>')
    return parts
