"""Plots place points where their axes say."""

from xml.etree import ElementTree

from hisparse.evaluation import svg


def test_points_lie_between_the_ends_of_the_axes() -> None:
    panel = svg.Panel("title", {"a": [(0, 0), (10, 2)]}, 2.0, svg.Axis(10, "end", [(5, "half")]), dots=True)
    tree = ElementTree.fromstring(svg.document([panel, panel]))
    circles = [node for node in tree.iter() if node.tag.endswith("circle")]
    places = [(float(node.attrib["cx"]), float(node.attrib["cy"])) for node in circles]
    bottom, right = svg.TOP + svg.HEIGHT, svg.LEFT + svg.WIDTH
    below = svg.HEIGHT + svg.GAP
    assert places == [
        (svg.LEFT, bottom), (right, svg.TOP), (svg.LEFT, bottom + below), (right, svg.TOP + below)
    ]  # fmt: skip
    (mark,) = {node.attrib["x1"] for node in tree.iter() if node.tag.endswith("}line")}
    assert float(mark) == svg.LEFT + svg.WIDTH / 2


def test_names_that_are_no_xml_are_escaped() -> None:
    panel = svg.Panel("a < b & c", {"<x>": [(0, 0)]}, 1.0, svg.Axis(1, "&"))
    texts = [node.text for node in ElementTree.fromstring(svg.document([panel])).iter() if node.tag.endswith("text")]
    assert "a < b & c" in texts
    assert "<x>" in texts
