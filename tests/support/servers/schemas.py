"""JSON schemas of the kinds that public test sets hold, made up: nested objects, arrays, enums, patterns, ranges, anyOf, $ref."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "kind", "size", "tags", "items", "note", "price", "owner", "state", "x", "y")
PATTERNS = (
    r"^[A-Z]{2}-[0-9]{3}$",
    r"^(ab|cd)+$",
    r"^[a-f0-9]{4,8}$",
    r"^\d{4}/\d{2}$",
    r"^[a-z]+(_[a-z]+){0,2}$",
    r"^$|^x[yz]?$",
)
WORDS = ("red", "green", "blue", "north", "south", "a b", 'quo"te', "back\\slash", "")


class SchemaMaker:
    """Random schemas; equal seeds make equal ones."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._definitions: dict[str, Schema] = {}
        self._count = 0

    def make(self) -> Schema:
        """A whole schema: an object, an array, or one of several."""
        self._definitions = {}
        schema = self._random.choice([self._object, self._object, self._object, self._array, self._any_of])(3)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema} if self._random.random() < 0.3 else schema

    def _value(self, depth: int) -> Schema:
        simple = [self._string, self._integer, self._number, self._enum, self._const, self._plain]
        nested = [self._object, self._array, self._any_of, self._reference] if depth > 0 else []
        return self._random.choice([*simple, *nested])(depth - 1)

    def _object(self, depth: int) -> Schema:
        random = self._random
        names = random.sample(NAMES, random.randint(0 if depth < 3 else 1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        if random.random() < 0.8:
            schema["required"] = random.sample(names, random.randint(0, len(names)))
        if random.random() < 0.85:
            schema["additionalProperties"] = False
        elif random.random() < 0.5:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        return schema

    def _array(self, depth: int) -> Schema:
        random = self._random
        least = random.randint(0, 2)
        schema: Schema = {"type": "array", "minItems": least, "maxItems": least + random.randint(0, 3)}
        if random.random() < 0.2:
            schema["prefixItems"] = [self._value(depth) for _ in range(random.randint(1, 2))]
            schema["items"] = False
            schema["minItems"] = schema["maxItems"] = len(schema["prefixItems"])
        else:
            schema["items"] = self._value(depth)
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth) for _ in range(self._random.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        if not self._definitions or self._random.random() < 0.5:
            name, self._count = f"part{self._count}", self._count + 1
            self._definitions[name] = self._tree(name) if self._random.random() < 0.2 else self._value(min(depth, 1))
        return {"$ref": f"#/$defs/{self._random.choice(list(self._definitions))}"}

    def _tree(self, name: str) -> Schema:
        """One that refers to itself."""
        children = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 1}
        properties = {"value": {"type": "integer", "minimum": 0, "maximum": 99}, "children": children}
        return {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}

    def _string(self, depth: int) -> Schema:
        random, schema = self._random, {"type": "string"}
        kind = random.random()
        if kind < 0.35:
            return {**schema, "pattern": random.choice(PATTERNS)}
        if kind < 0.45:
            return {**schema, "format": random.choice(["uuid", "ipv4"])}
        least = random.randint(0, 4)
        return {**schema, "minLength": least, "maxLength": least + random.randint(0, 8)}

    def _integer(self, depth: int) -> Schema:
        random = self._random
        low = random.randint(-1000, 1000)
        high = low + random.choice([0, 1, 7, 90, 4096])
        below, above = random.choice([("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")])
        schema: Schema = {"type": "integer", below: low - (below[0] == "e"), above: high + (above[0] == "e")}
        return schema

    def _number(self, depth: int) -> Schema:
        low = round(self._random.uniform(-50, 50), self._random.randint(0, 2))
        return {"type": "number", "minimum": low, "maximum": low + self._random.choice([1, 2.5, 100])}

    def _enum(self, depth: int) -> Schema:
        values: list[Any] = [*WORDS, 1, -7, 2.5, True, None, [1, "a"], {"k": 0}]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._random.choice(["fixed", 0, False, None, ["x"], {"deep": {"er": 1}}])}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"], ["null", "boolean"]])}
