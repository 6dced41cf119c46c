"""Pictures: the page's colours and nothing else, the same text every time, on a page and alone."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from eyas.figure import color, hint, svg, svg_file
from eyas.page import stylesheet


def paint(axes):
    (bar,) = axes.bar([1], [3], color=color("series-1"), alpha=0.5)
    hint(bar, "3 rows < 4")
    axes.set_xlabel("day")


def test_a_picture_says_variables_of_the_page_where_matplotlib_says_colours():
    picture = svg(paint, "rows & days")
    assert ElementTree.fromstring(picture).get("aria-label") == "rows & days"
    assert not re.findall("(?:fill|stroke): #", picture)
    variables = set(re.findall(r"var\((.*?)\)", picture))
    assert "--series-1" in variables
    for variable in variables:
        assert stylesheet().count(f"{variable}:") == 2, variable  # light and dark
    assert "<title>3 rows &lt; 4</title>" in picture
    assert ">day</text>" in picture  # real text
    assert svg(paint, "rows & days") == picture


def test_a_picture_in_a_file_brings_the_colours_for_light_and_dark():
    drawn = svg_file(paint, "rows by day")
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn
    for variable in set(re.findall(r"var\((.*?)\)", drawn)):
        assert drawn.count(f"{variable}:") == 2, variable
