"""Random schemas over every supported keyword, and random instances that hit their edges."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ["^a", "b$", "^[a-c]{1,3}$", "a|b", "[0-9]", "^x?y?$", "\\d+", "é", "^.{2}$", "[^a]", "\\S", "^\\w*$"]
NAMES = ["a", "b", "ab", "foo", "x1", "é", 'q"']
STRINGS = ["", "a", "b", "ab", "abc", "x", "xy", "é", "1", "a1", "foo", "2024-02-29", 'q"', "\\", "\n", "😀", " "]
NUMBERS = [0, 1, -1, 2, 3, 5, 10, 12, 100, 0.5, -0.5, 1.5, 2.25, 99.9, -7, 1e3]
CONSTANTS = [None, True, False, *STRINGS[:8], *NUMBERS[:12], [], [1], {}, {"a": 1}, [None, "a"], {"a": {"b": [1]}}]


class SchemaMaker:
    def __init__(self, rng: random.Random, negation: bool = True):
        self.rng, self.negation = rng, negation

    def schema(self, depth: int = 3) -> Any:
        """A schema; True, False and {} occur too."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.04:
            return rng.choice([True, False, {}, True])
        if depth > 0 and roll < 0.3:
            return self.combined(depth)
        kind = rng.choice(["null", "boolean", "integer", "number", "string", "array", "object", "enum", "const"])
        if depth == 0 and kind in ("array", "object"):
            kind = "string"
        schema = getattr(self, kind)(depth)
        if kind not in ("enum", "const") and rng.random() < 0.85:
            schema["type"] = kind if rng.random() < 0.8 else [kind, rng.choice(["null", "string", "integer"])]
            if isinstance(schema["type"], list):
                schema["type"] = sorted(set(schema["type"]))
        return schema

    def combined(self, depth: int) -> Any:
        rng = self.rng
        subs = [self.schema(depth - 1) for _ in range(rng.randint(1, 3))]
        kinds = ["anyOf", "allOf", "oneOf", "siblings"] + (["not", "if"] if self.negation else [])
        kind = rng.choice(kinds)
        if kind == "not":
            return {"not": subs[0]}
        if kind == "if":
            whole = {"if": subs[0], "then": self.schema(depth - 1), "else": self.schema(depth - 1)}
            if rng.random() < 0.3:
                del whole[rng.choice(["then", "else"])]
            return whole
        if kind == "siblings":
            base = self.schema(depth - 1)
            return {**base, "anyOf": subs} if isinstance(base, dict) else {"anyOf": subs}
        return {kind: subs}

    def maybe(self, schema: dict, keyword: str, value: Any, chance: float = 0.4) -> None:
        if self.rng.random() < chance:
            schema[keyword] = value

    def null(self, depth: int) -> dict:
        return {}

    boolean = null

    def enum(self, depth: int) -> dict:
        return {"enum": self.rng.sample(CONSTANTS, self.rng.randint(1, 5))}

    def const(self, depth: int) -> dict:
        return {"const": self.rng.choice(CONSTANTS)}

    def integer(self, depth: int) -> dict:
        rng, schema = self.rng, {}
        self.maybe(schema, rng.choice(["minimum", "exclusiveMinimum"]), rng.choice([-5, 0, 1, 7, 0.5, 9]))
        self.maybe(schema, rng.choice(["maximum", "exclusiveMaximum"]), rng.choice([-2, 3, 10, 99, 12.5]))
        self.maybe(schema, "multipleOf", rng.choice([1, 2, 3, 5, 7]), 0.2)
        return schema

    def number(self, depth: int) -> dict:
        rng, schema = self.rng, {}
        self.maybe(schema, rng.choice(["minimum", "exclusiveMinimum"]), rng.choice([-5, 0, 1, 0.5, -0.25, 2.25]))
        self.maybe(schema, rng.choice(["maximum", "exclusiveMaximum"]), rng.choice([-2, 3, 0, 99.9, 12.5]))
        return schema

    def string(self, depth: int) -> dict:
        rng, schema = self.rng, {}
        self.maybe(schema, "minLength", rng.randint(0, 3), 0.3)
        self.maybe(schema, "maxLength", rng.randint(0, 4), 0.3)
        self.maybe(schema, "pattern", rng.choice(PATTERNS))
        self.maybe(schema, "format", rng.choice(["date", "ipv4", "uuid"]), 0.06)
        return schema

    def array(self, depth: int) -> dict:
        rng, schema = self.rng, {}
        self.maybe(schema, "prefixItems", [self.schema(depth - 1) for _ in range(rng.randint(1, 3))])
        self.maybe(schema, "items", self.schema(depth - 1))
        self.maybe(schema, "minItems", rng.randint(0, 3), 0.3)
        self.maybe(schema, "maxItems", rng.randint(0, 4), 0.3)
        return schema

    def object(self, depth: int) -> dict:
        rng, schema = self.rng, {}
        names = rng.sample(NAMES, rng.randint(1, 3))
        self.maybe(schema, "properties", {name: self.schema(depth - 1) for name in names}, 0.7)
        self.maybe(schema, "required", rng.sample(NAMES[:5], rng.randint(1, 2)))
        self.maybe(schema, "additionalProperties", self.schema(depth - 1), 0.5)
        self.maybe(schema, "patternProperties", {rng.choice(PATTERNS): self.schema(depth - 1)}, 0.2)
        self.maybe(schema, "propertyNames", self.string(0), 0.1)
        self.maybe(schema, "minProperties", rng.randint(0, 2), 0.15)
        self.maybe(schema, "maxProperties", rng.randint(0, 3), 0.15)
        self.maybe(schema, "dependentRequired", {rng.choice(NAMES): [rng.choice(NAMES)]}, 0.08)
        return schema

    def instance(self, depth: int = 2) -> Any:
        """Any JSON value."""
        rng = self.rng
        roll = rng.random()
        if depth > 0 and roll < 0.25:
            return [self.instance(depth - 1) for _ in range(rng.randint(0, 4))]
        if depth > 0 and roll < 0.55:
            return {rng.choice(NAMES): self.instance(depth - 1) for _ in range(rng.randint(0, 3))}
        return rng.choice(CONSTANTS[:3] + STRINGS + NUMBERS)
