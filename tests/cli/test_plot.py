"""Where points lie in the plots."""

import xml.etree.ElementTree as ET

from abyssal.cli.plot import Curve, draw_svg, draw_text

CURVES = [Curve("off", [(10.0, 10.0), (5.0, 20.0)]), Curve("auto", [(20.0, 20.0), (0.0, 0.0)]), Curve("open <x>", [])]


def test_text():
    lines = draw_text(CURVES, "a user", "in all").splitlines()
    assert lines[0] == "in all (up to 20.0)"
    assert lines[-1].startswith("  a user (up to 20.0)")
    assert all(mark in lines[-1] for mark in ("o off", "a auto"))
    canvas = [line[2:].ljust(64) for line in lines[1:-2]]
    marks = {(line, column): mark for line, row in enumerate(canvas) for column, mark in enumerate(row) if mark.strip()}
    assert len(canvas) == 18
    assert marks == {(0, 63): "a", (17, 0): "a", (0, 16): "o", (8, 32): "o"}


def test_svg():
    root = ET.fromstring(draw_svg(CURVES, "a < user", "in all"))
    space = "{http://www.w3.org/2000/svg}"
    lines = [[tuple(map(float, p.split(","))) for p in e.get("points").split()] for e in root.iter(f"{space}polyline")]
    (first, second), (right_top, left_bottom), empty = lines
    assert empty == []
    assert right_top[0] > first[0] > second[0] > left_bottom[0]
    assert right_top[1] == second[1] < first[1] < left_bottom[1]
    texts = [e.text for e in root.iter(f"{space}text")]
    assert {"off", "auto", "open <x>", "a < user", "in all", "20"} <= set(texts)


def test_nothing_to_draw():
    assert draw_text([], "x", "y") == ""
    assert ET.fromstring(draw_svg([], "x", "y")).tag.endswith("svg")
