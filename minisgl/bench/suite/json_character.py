"""JSON of fixed keys and short values: jump-forward's workload.

    {                                  most bytes can only be one thing: braces, keys, quotes, commas. A compressed
        "name": "Tom",                 automaton knows that before the model is asked, and jump-forward appends them
        "home": "Paris",               in one step instead of one step a token.
        "pet": "cat",
        "pet age": 7,
        ...

`json` constrains by a regular expression, `json-schema` by a JSON Schema of the same character.  Characters share
the instructions; what is gained here comes from the grammar rather than from the cache.
"""

from __future__ import annotations

import json
from functools import partial

import minisgl as sgl

from ..facts import ANIMALS, CAPITALS, NAMES, PLACES, THINGS
from ..programs import Programs, Setting, programs

PETS = [animal for kind in ("mammal", "bird") for animal in ANIMALS[kind][:6]]
_WORD = "[A-Z][a-z]{2,8}"
REGEX = "\n".join(
    (
        r"\{",
        f'    "name": "{_WORD}",',
        r'    "home": \{',
        f'        "city": "{_WORD}",',
        f'        "favourite place": "({"|".join(PLACES)})"',
        r"    \},",
        f'    "pet": "({"|".join(PETS)})",',
        '    "pet age": [1-9],',
        f'    "always carries": "({"|".join(THINGS)})",',
        '    "speaks with strangers": (true|false)',
        r"\}",
    )
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{_WORD}$"},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": f"^{_WORD}$"}, "favourite place": {"enum": PLACES}},
            "required": ["city", "favourite place"],
            "additionalProperties": False,
        },
        "pet": {"enum": PETS},
        "pet age": {"type": "integer", "minimum": 1, "maximum": 9},
        "always carries": {"enum": THINGS},
        "speaks with strangers": {"type": "boolean"},
    },
    "required": ["name", "home", "pet", "pet age", "always carries", "speaks with strangers"],
    "additionalProperties": False,
}
INSTRUCTIONS = (
    "Below is a character of a children's book, first in a sentence and then as JSON with the keys name, home, pet, "
    "pet age, always carries and speaks with strangers.\n\n"
)


@sgl.function
def character(s, sentence, grammar):
    s += INSTRUCTIONS + sentence + "\n"
    s += sgl.gen("json", max_tokens=200, **grammar)
    return s["json"]


def _build(setting: Setting, grammar: dict) -> Programs:
    rng = setting.rng(0)
    cities = [city for _, city in CAPITALS if " " not in city]
    count = setting.count(gpu=128, cpu=24, quick=10)
    sentences = [
        f"{rng.choice(NAMES)} from {rng.choice(cities)} has a {rng.choice(PETS)} and never leaves home without the "
        f"{rng.choice(THINGS)}."
        for _ in range(count)
    ]
    return Programs(character, [{"sentence": s, "grammar": grammar} for s in sentences], lambda i, text: is_valid(text))


def is_valid(text: str) -> bool:
    """Whether it is JSON with the keys of a character."""
    try:
        return list(json.loads(text)) == SCHEMA["required"]
    except ValueError:
        return False


programs("json", "characters as JSON under one regex: most bytes are forced", constrained=True)(
    partial(_build, grammar={"regex": REGEX})
)
programs("json-schema", "the same under a JSON Schema", constrained=True)(
    partial(_build, grammar={"json_schema": json.dumps(SCHEMA)})
)
