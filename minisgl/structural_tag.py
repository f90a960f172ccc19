"""Structural tags: free text in which certain openings bind what follows, as tool calls need it.

    {"type": "structural_tag",
     "triggers": ["<function="],
     "structures": [{"begin": "<function=get_weather>", "schema": {...}, "end": "</function>"}, ...]}

The model may write anything. Once its text has come to a trigger, it must go on with the rest of a `begin` that the
trigger opens, JSON that the schema allows, and the `end`; then it is free again:

    Let me look that up. <function=get_weather>{"city": "Paris"}</function> In the meantime, ...
    |------ free ------||-trigger--|--------- enforced ------------------||--- free ----------

Free text is itself a language, "no trigger occurs": a state is how much of a trigger the text ends with (Aho and
Corasick, "Efficient String Matching", CACM 1975), and where a trigger is complete the only ways on are those of its
structures. So a structural tag is a grammar like others, with masks, forced tokens and all.

The format is that of SGLang and xgrammar. Exactness needs two rules: no trigger occurs inside another, and every
`begin` starts with a trigger.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .charsets import UTF8, any_text
from .expressions import Algebra, Arms, GrammarError, Node
from .json_schema import compile_schema

_FIELDS = {"begin", "schema", "end"}


@dataclass(frozen=True)
class Tag:
    """One structure: its texts are `begin`, JSON of `schema`, `end`."""

    begin: str
    schema: Any
    end: str


def compile_structural_tag(algebra: Algebra, source: Any, whitespace: str | None = None) -> tuple[Node, str]:
    """The language of a structural tag (a dict or JSON text), and the tag as text. Raises GrammarError, naming what
    is wrong with it or with the schema of a structure."""
    source = _load(source)
    triggers, tags = _triggers(source), _tags(source)
    free = _FreeText(algebra, triggers)
    for trigger in triggers:
        opened = [tag for tag in tags if tag.begin.startswith(trigger)]
        if not opened:
            raise GrammarError(f"structural_tag: no structure begins with the trigger {trigger!r}")
        rests = []
        for tag in opened:
            try:
                value, _ = compile_schema(algebra, tag.schema, whitespace)
            except GrammarError as error:
                raise type(error)(f"structural_tag: {tag.begin!r}: {error}") from None
            rest = tag.begin[len(trigger) :].encode()
            rests.append(algebra.concat(algebra.literal(rest), value, algebra.literal(tag.end.encode())))
        free.bound[trigger.encode()] = algebra.alt(rests)
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"structural_tag: no trigger begins {tag.begin!r}")
    return free.after(b"", free.text), json.dumps(source, ensure_ascii=False)


class _FreeText:
    """Makes the states of free text. bound: the rest of the structures that a trigger opens."""

    def __init__(self, algebra: Algebra, triggers: list[str]):
        self.algebra, self.triggers = algebra, [trigger.encode() for trigger in triggers]
        self.text = any_text(algebra, UTF8)
        self.bound: dict[bytes, Node] = {}
        # what a text may end with that matters, and the bytes that can change it
        self._begun = {trigger[:end] for trigger in self.triggers for end in range(len(trigger))}
        self._watched = sorted(set(b"".join(self.triggers)))

    def after(self, begun: bytes, left: Node) -> Node:
        """Free text that so far ends with the beginning `begun` of a trigger (b"": of none); `left`: what may follow
        of characters."""
        return self.algebra.intern(("free", begun, left), lambda: Free(self, begun, left))

    def ways(self, begun: bytes, left: Node) -> Arms:
        found: dict[Node, int] = {}
        for bits, after in self.algebra.arms(left):
            for byte in self._watched:
                if bits >> byte & 1:
                    bits &= ~(1 << byte)
                    node = self._step(begun + bytes([byte]), after)
                    found[node] = found.get(node, 0) | 1 << byte
            if bits:
                node = self.after(b"", after)
                found[node] = found.get(node, 0) | bits
        return tuple((bits, node) for node, bits in found.items())

    def _step(self, text: bytes, left: Node) -> Node:
        """`text`: the longest beginning of a trigger, and one byte more."""
        for start in range(len(text)):
            if text[start:] in self.bound:
                return self.algebra.concat(self.bound[text[start:]], self.after(b"", self.text))
            if text[start:] in self._begun:
                return self.after(text[start:], left)
        return self.after(b"", left)


class Free(Node):
    """A state of free text; the text may end between characters."""

    __slots__ = ("begun", "left", "machine")

    def __init__(self, machine: _FreeText, begun: bytes, left: Node):
        super().__init__(left.nullable)
        self.machine, self.begun, self.left = machine, begun, left

    def derive(self, algebra: Algebra) -> Arms:
        return self.machine.ways(self.begun, self.left)


# ---- reading it


def _load(source: Any) -> dict[str, Any]:
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"structural_tag is not valid JSON: {error}") from None
    if not isinstance(source, dict):
        raise GrammarError(f"structural_tag must be a dict or JSON text of an object, not {type(source).__name__}")
    if source.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"structural_tag: type must be 'structural_tag', not {source['type']!r}")
    unknown = sorted(set(source) - {"type", "structures", "triggers"})
    if unknown:
        raise GrammarError(f"structural_tag: {unknown[0]} is not supported; known: type, structures, triggers")
    return source


def _triggers(source: dict[str, Any]) -> list[str]:
    triggers = source.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("structural_tag: triggers must be a list of one or more non-empty strings")
    triggers = list(dict.fromkeys(triggers))
    for trigger in triggers:
        inside = next((other for other in triggers if other != trigger and other in trigger), None)
        if inside is not None:
            raise GrammarError(f"structural_tag: the trigger {inside!r} is part of {trigger!r}, which could never open")
        _check_text("trigger", trigger)
    return triggers


def _tags(source: dict[str, Any]) -> list[Tag]:
    structures = source.get("structures")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structural_tag: structures must be a list of one or more objects")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict) or set(structure) != _FIELDS:
            raise GrammarError("structural_tag: a structure has exactly the members begin, schema and end")
        for name in ("begin", "end"):
            if not isinstance(structure[name], str):
                raise GrammarError(f"structural_tag: {name} must be a string, not {type(structure[name]).__name__}")
            _check_text(name, structure[name])
        tags.append(Tag(**structure))
    return tags


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"structural_tag: {name} {text!r} has surrogates") from None
