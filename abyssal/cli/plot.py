"""Plots of a few curves, as text for a terminal and as SVG, without a plotting library."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

MARKS = "o123456789abcdefghijklmnpqrstuvwxyz"
COLOURS = ("#222222", "#1f77b4", "#17becf", "#2ca02c", "#bcbd22", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")
WIDTH, HEIGHT, MARGIN = 720, 440, 60
COLUMNS, LINES = 64, 18


@dataclass(frozen=True)
class Curve:
    """A named list of points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_text(curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """A scatter plot in characters; each curve has a mark of its own. Empty without points."""
    scale = _Scale.of(curves)
    if scale is None:
        return ""
    canvas = [[" "] * COLUMNS for _ in range(LINES)]
    marks = _marks(curves)
    for curve in reversed(curves):  # the first curve lies on top
        for x, y in curve.points:
            column = round(scale.x(x) * (COLUMNS - 1))
            line = round((1 - scale.y(y)) * (LINES - 1))
            canvas[line][column] = marks[curve.name]
    rows = [f"{y_label} (up to {scale.y_most:,.1f})", *(" |" + "".join(line).rstrip() for line in canvas)]
    rows.append(" +" + "-" * COLUMNS)
    rows.append(f"  {x_label} (up to {scale.x_most:,.1f})   " + "  ".join(f"{marks[c.name]} {c.name}" for c in curves))
    return "\n".join(rows)


def draw_svg(curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """The same as an SVG document, points joined in their order."""
    scale = _Scale.of(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    if scale is not None:
        parts += _axes(scale, x_label, y_label)
        for i, curve in enumerate(curves):
            parts += _curve(scale, curve, COLOURS[i % len(COLOURS)], MARGIN + 18 * i)
    return "\n".join([*parts, "</svg>", ""])


def _marks(curves: Sequence[Curve]) -> dict[str, str]:
    """A character for each curve: the first of its name, if no other has it."""
    marks: dict[str, str] = {}
    for curve in curves:
        free = [mark for mark in (curve.name[:1], *MARKS) if mark.strip() and mark not in marks.values()]
        marks[curve.name] = free[0]
    return marks


@dataclass(frozen=True)
class _Scale:
    """From zero to the largest value on both axes."""

    x_most: float
    y_most: float

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> _Scale | None:
        points = [point for curve in curves for point in curve.points]
        if not points:
            return None
        return cls(max(max(x for x, _ in points), 1e-9), max(max(y for _, y in points), 1e-9))

    def x(self, value: float) -> float:
        return value / self.x_most

    def y(self, value: float) -> float:
        return value / self.y_most

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the SVG."""
        inner_width, inner_height = WIDTH - 2 * MARGIN - 80, HEIGHT - 2 * MARGIN
        return MARGIN + self.x(x) * inner_width, HEIGHT - MARGIN - self.y(y) * inner_height


def _axes(scale: _Scale, x_label: str, y_label: str) -> list[str]:
    left, bottom = scale.place(0, 0)
    right, top = scale.place(scale.x_most, scale.y_most)
    parts = [f'<path d="M{left:.1f} {top:.1f} V{bottom:.1f} H{right:.1f}" fill="none" stroke="#888888"/>']
    for i in range(5):
        x, y = scale.x_most * i / 4, scale.y_most * i / 4
        at_x, at_y = scale.place(x, y)
        parts.append(f'<text x="{at_x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x:,.3g}</text>')
        parts.append(f'<text x="{left - 6:.1f}" y="{at_y + 4:.1f}" text-anchor="end">{y:,.3g}</text>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(f'<text x="{left:.1f}" y="{top - 14:.1f}" text-anchor="middle">{html.escape(y_label)}</text>')
    return parts


def _curve(scale: _Scale, curve: Curve, colour: str, legend_y: float) -> list[str]:
    placed = [scale.place(x, y) for x, y in curve.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
    parts.append(f'<text x="{WIDTH - 100}" y="{legend_y}" fill="{colour}">{html.escape(curve.name)}</text>')
    return parts
