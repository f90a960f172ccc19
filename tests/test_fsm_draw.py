"""Drawings of automata: what is in them, and that they are XML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from minisgl.fsm import Grammar, GrammarError
from minisgl.fsm_draw import edges


def test_compression_joins_chains():
    automaton = Grammar.from_regex(r'\{"name": "(Bob|Al)"\}').automaton
    plain, compressed = edges(automaton, False), edges(automaton, True)
    assert [edge.label for edge in compressed][:1] == ['{"name":␣"']
    assert compressed[0].forced and not plain[0].forced
    assert len(compressed) == 3 + 2  # the choice B|A, then ob"} and l"} as one edge each
    assert len(plain) == 10 + 2 + 2 + 1 + 2  # both names share the last two edges


def test_labels():
    arrows = edges(Grammar.from_regex("[a-c0-9_ ]|é").automaton, False)
    assert {edge.label for edge in arrows} == {"␣ 0-9 _ a-c", "c3", "a9"}


@pytest.mark.parametrize("regex", ["[a-z]+(, [a-z]+)*", '<&"(true|false|null)', "a*b?c{2,3}"])
def test_svg_is_well_formed(regex):
    grammar = Grammar.from_regex(regex)
    for compressed in (None, False, True):
        root = ElementTree.fromstring(grammar.draw(compressed))
        assert root.tag.endswith("svg")
        groups = [child for child in root if child.tag.endswith("}g")]
        assert len(groups) == (2 if compressed is None else 1)
        circles = [item for item in groups[0] if item.tag.endswith("circle")]
        assert circles


def test_a_drawing_restyles_nothing_else_on_its_page():
    """Style sheets and ids inside an SVG hold for the whole page: every rule and id names our own drawings."""
    root = ElementTree.fromstring(Grammar.from_regex("ab(c|d)").draw())
    name = root.attrib["class"]
    style = next(item.text or "" for item in root.iter() if item.tag.endswith("style"))
    rules = [rule.split("{")[0] for rule in style.split("}") if rule]
    assert len(rules) > 3 and all(rule.startswith(f".{name} ") and "," not in rule for rule in rules)
    ids = {item.attrib["id"] for item in root.iter() if "id" in item.attrib}
    assert ids and all(i.startswith(f"{name}-") for i in ids)
    used = {item.attrib["marker-end"] for item in root.iter() if "marker-end" in item.attrib}
    assert used == {f"url(#{i})" for i in ids}


def test_big_automata_are_refused():
    with pytest.raises(GrammarError, match="draw"):
        Grammar.from_regex("[a-c]{100}").draw()
