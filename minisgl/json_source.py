"""Where JSON Schemas come from, and where their references lead.

`load` takes a dict or bool, JSON text, a Pydantic model class or a dataclass. `Document` resolves `$ref` inside
one schema: JSON pointers, `$anchor`, and `$id`s of embedded resources. Nothing is ever fetched.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Union
from urllib.parse import unquote, urldefrag, urljoin

from .expressions import GrammarError, UnsupportedGrammar

Schema = dict[str, Any] | bool


def load(source: Any) -> Schema:
    """The schema as plain JSON data. Raises GrammarError when there is none in `source`."""
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"json_schema is not valid JSON: {error}") from None
    elif isinstance(source, type) and hasattr(source, "model_json_schema"):
        source = source.model_json_schema()
    elif isinstance(source, type) and dataclasses.is_dataclass(source):
        source = _from_dataclass(source)
    elif isinstance(source, Mapping):
        source = dict(source)
    if not isinstance(source, (dict, bool)):
        raise GrammarError(
            "json_schema must be a dict, a bool, JSON text, a Pydantic model class or a dataclass, "
            f"not {type(source).__name__}"
        )
    return source


# ---- dataclasses

_PLAIN_TYPES = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: True,
}


def _from_dataclass(cls: type) -> Schema:
    defs: dict[str, Schema] = {}
    reference = _annotation(cls, defs)
    return {"$defs": defs, **reference} if isinstance(reference, dict) else reference


def _annotation(kind: Any, defs: dict[str, Any]) -> Schema:
    """The schema of a type annotation; dataclasses go to `defs` by name, so that they may contain themselves."""
    try:
        if kind in _PLAIN_TYPES:
            return _PLAIN_TYPES[kind]
    except TypeError:
        pass  # an unhashable annotation
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotation(arguments[0], defs)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_annotation(option, defs) for option in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _annotation(arguments[0], defs)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _annotation(arguments[1], defs)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _annotation(arguments[0], defs)}
    if origin is tuple:
        items = [_annotation(option, defs) for option in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in defs:
            defs[name] = {}
            defs[name] = _fields(kind, defs)
        return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):
        raise GrammarError(f"json_schema: {kind.__name__} is a Pydantic model inside a dataclass")
    raise GrammarError(f"json_schema: no JSON Schema for the annotation {kind!r}")


def _fields(cls: type, defs: dict[str, Any]) -> Schema:
    try:
        kinds = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise GrammarError(f"json_schema: an annotation of {cls.__name__} can't be resolved: {error}") from None
    fields = [field for field in dataclasses.fields(cls) if field.init]
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    properties = {field.name: _annotation(kinds[field.name], defs) for field in fields}
    return {
        "title": cls.__name__,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


# ---- references


class Located:
    """A schema at its place: compared by identity, one object per place and sign.

    base: the URI that references in it are relative to. negated: stands for `not` this schema.
    """

    __slots__ = ("base", "negated", "order", "schema")

    def __init__(self, schema: Schema, base: str, negated: bool, order: int):
        self.schema, self.base, self.negated, self.order = schema, base, negated, order


_CHILD = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_CHILDREN = ("allOf", "anyOf", "oneOf", "prefixItems")
_CHILD_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


class Document:
    """One schema with all its subschemas and references."""

    def __init__(self, root: Schema):
        self._located: dict[tuple[int, str, bool], Located] = {}
        self._kept: list[Schema] = []  # schemas that are looked up by id() stay alive
        self._resources: dict[str, tuple[Schema, str]] = {}
        self._anchors: dict[str, tuple[Schema, str]] = {}
        self._index(root, "")
        self._resources[""] = (root, _base_of(root, ""))
        self.root = self.at(root, "")

    def at(self, schema: Any, base: str, negated: bool = False) -> Located:
        """The place of a subschema that stands where references are relative to `base`."""
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"json_schema: {json.dumps(schema, default=str)[:60]} is not a schema")
        base = _base_of(schema, base)
        key = (schema if isinstance(schema, bool) else id(schema), base if schema is not True else "", negated)
        found = self._located.get(key)
        if found is None:
            self._kept.append(schema)
            found = self._located[key] = Located(schema, base, negated, len(self._located))
        return found

    def negation(self, place: Located) -> Located:
        """The place that stands for `not` this one."""
        return self.at(place.schema, place.base, not place.negated)

    def resolve(self, reference: Any, base: str) -> Located:
        """Where a `$ref` leads. Raises GrammarError for what isn't in this document."""
        if not isinstance(reference, str):
            raise GrammarError("json_schema: $ref must be a string")
        uri, fragment = urldefrag(urljoin(base, reference))
        if uri not in self._resources:
            raise UnsupportedGrammar(f"json_schema: $ref {reference!r} leads out of the schema, which is not supported")
        schema, at = self._resources[uri]
        if not fragment:
            return self.at(schema, at)
        if fragment.startswith("/"):
            return self._pointer(schema, at, unquote(fragment), reference)
        anchor = self._anchors.get(f"{uri}#{fragment}")
        if anchor is None:
            raise GrammarError(f"json_schema: $ref {reference!r} names an unknown anchor")
        return self.at(*anchor)

    def _pointer(self, schema: Any, base: str, pointer: str, reference: str) -> Located:
        for step in pointer[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            base = _base_of(schema, base)
            if isinstance(schema, dict) and step in schema:
                schema = schema[step]
            elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
                schema = schema[int(step)]
            else:
                raise GrammarError(f"json_schema: $ref {reference!r} leads nowhere")
        return self.at(schema, base)

    def _index(self, root: Any, base: str) -> None:
        """Find the `$id`s and `$anchor`s of all subschemas."""
        stack = [(root, base)]
        seen = set()
        while stack:
            schema, base = stack.pop()
            if not isinstance(schema, dict) or (id(schema), base) in seen:
                continue
            seen.add((id(schema), base))
            base = _base_of(schema, base)
            if isinstance(schema.get("$id"), str):
                self._resources[base] = (schema, base)
            if isinstance(schema.get("$anchor"), str):
                self._anchors[f"{base}#{schema['$anchor']}"] = (schema, base)
            stack += [(schema.get(word), base) for word in _CHILD]
            for word in _CHILDREN:
                stack += [(sub, base) for sub in _items(schema.get(word))]
            for word in _CHILD_MAPS:
                stack += [(sub, base) for sub in _values(schema.get(word))]


def _base_of(schema: Any, base: str) -> str:
    if isinstance(schema, dict) and isinstance(schema.get("$id"), str):
        return urldefrag(urljoin(base, schema["$id"]))[0]
    return base


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []
