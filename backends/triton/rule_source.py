"""Write the functions of an attention rule as Triton source, with a line for each recorded operation of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

KEYED = frozenset({"k_pos", "score"})
"""Arguments that change with the key. Values that depend on others only are computed once per query tile."""
NARROW = 2**30  # Integers below this are 32-bit in Triton, so that sums and differences of two do not overflow


class NotInlined(Exception):
    """A rule does something that Triton does not inline. The argument is what it does."""


@dataclass(slots=True)
class Value:
    """A recorded tensor: an expression in Triton, or a number."""

    text: str
    dtype: torch.dtype
    depends: frozenset[str] = frozenset()
    """Arguments that the value depends on."""
    natural: bool = False
    """True if it is an integer and never negative."""
    number: float | None = None

    @classmethod
    def of(cls, number: float, dtype: torch.dtype) -> Value:
        """Return the value of a number."""
        return cls("", dtype, natural=not dtype.is_floating_point and number >= 0, number=number)


@dataclass(slots=True)
class Table:
    """A parameter, or a part of it: elements of a buffer."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class SourceWriter:
    """Source of a rule's functions. Expressions that keys do not change go into `rows`, called once per query tile."""

    wide: bool
    needs_wide: bool = False
    count: int = 0
    shared: list[str] = field(default_factory=list)
    """Lines of `rows`."""
    lines: list[str] = field(default_factory=list)
    """Lines of the function that is being recorded."""
    exported: list[str] = field(default_factory=list)
    """Expressions that `rows` returns."""
    functions: list[str] = field(default_factory=list)
    keyed: bool = True
    """True if the line that is being written is part of the function, False if it is part of `rows`."""

    def assign(self, text: str, dtype: torch.dtype, depends: frozenset[str], natural: bool = False) -> Value:
        """Return a new variable of the value `text`, assigned in `rows` if no key changes it."""
        lines = self.lines if depends & KEYED else self.shared
        known = next((line.split()[0] for line in lines if line.endswith(f" = {text}")), None)
        name = known or f"v{self.count}"
        if known is None:
            lines.append(f"    {name} = {text}")
            self.count += 1
        return Value(name, dtype, depends, natural and not dtype.is_floating_point)

    def export(self, text: str) -> str:
        """Return how the function that is being recorded reads a value of `rows`."""
        if text not in self.exported:
            self.exported.append(text)
        return f"rows[{self.exported.index(text)}]"

    def type_of(self, dtype: torch.dtype) -> str:
        """Return Triton's type for a type of torch. Variables have 32 bits if they are floats, and 32 or 64 if integers."""
        if dtype.is_floating_point:
            return "tl.float32"
        return "tl.int1" if dtype == torch.bool else "tl.int64" if dtype == torch.int64 and self.wide else "tl.int32"

    def cast(self, value: Value, dtype: torch.dtype) -> str:
        """Return a value's expression in another type, as the function that is being recorded reads it."""
        if value.number is not None:
            return self.literal(value.number, dtype)
        text = value.text if value.depends & KEYED or not self.keyed else self.export(value.text)
        own, wanted = self.type_of(value.dtype), self.type_of(dtype)
        if own == wanted:
            return text
        return f"({text} != 0)" if wanted == "tl.int1" else f"{text}.to({wanted})"

    def literal(self, number: float, dtype: torch.dtype) -> str:
        """Return a number's expression in a type."""
        if dtype == torch.bool:
            return str(bool(number))
        if dtype.is_floating_point:
            return repr(float(number)) if math.isfinite(number) else f'float("{float(number)}")'
        if abs(number) >= NARROW:
            self.needs_wide = True
        return str(int(number))

    def element(self, table: Table, indices: Sequence[Value]) -> Value:
        """Return a new variable: the element of a parameter at `indices`, one for each dimension."""
        places, depends = [str(table.offset)], frozenset[str]().union(*(index.depends for index in indices))
        self.keyed = bool(depends & KEYED)
        for index, size, stride in zip(indices, table.shape, table.strides, strict=True):
            text = self.cast(index, index.dtype)
            if index.number is None:  # a position after the sequence's end may exceed the table
                text = text if index.natural else f"tl.where({text} < 0, {text} + {size}, {text})"
                text = f"tl.minimum(tl.maximum({text}, 0), {max(size - 1, 0)})"
            places.append(text if stride == 1 else f"{text} * {stride}")
        text = f"parameter({' + '.join([self.export(table.buffer) if self.keyed else table.buffer, *places])})"
        return self.assign(f"{text} != 0" if table.dtype == torch.bool else text, table.dtype, depends)

    def result(self, call: TorchCall) -> Value:
        """Return a new variable: an operation's result."""
        name, values, dtype = call.name, call.values, call.dtype
        depends = frozenset[str]().union(*(value.depends for value in values))
        self.keyed = bool(depends & KEYED)
        if dtype in (torch.uint8, torch.int8, torch.int16) or (name in ("add", "sub", "rsub") and dtype == torch.bool):
            raise NotInlined(f"torch.{name} with a result of {dtype} (convert its operands to int64 or float32)")
        if name in ("mul", "lshift", "bitwise_left_shift", "pow") and dtype == torch.int64:
            self.needs_wide = True
        text = OPERATIONS[name](call)
        natural = name in _NATURAL and all(value.natural for value in values[: _NATURAL[name]])
        if name in ("and", "bitwise_and"):
            natural = any(value.natural for value in values)
        elif name == "sub":  # a query sees no later key, and results for other keys are not used
            natural = [value.text for value in values] == ["q_pos", "k_pos"] and "alpha" not in call.kwargs
        return self.assign(text, dtype, depends, natural)

    def end_function(self, part: str, value: Value) -> None:
        """Add the function that has been recorded to the source. part: its name. value: its result."""
        self.keyed = True
        text = self.cast(value, torch.bool if part == "mask" else torch.float32)
        if part == "score":
            text = f"tl.broadcast_to({text}, score.shape)" if value.depends else f"tl.full(score.shape, {text}, tl.float32)"
        first = "score, rows" if part == "score" else "rows"
        head = ["", "", "@triton.jit", f"def {part}({first}, k_pos, DOT: tl.constexpr):"]
        cast = ["    k_pos = k_pos.to(tl.int64)"] if self.wide else []
        self.functions += [*head, *cast, *self.lines, f"    return {text}"]
        self.lines = []

    def source(self) -> str:
        """Return the module's source."""
        cast = ["    q_pos = q_pos.to(tl.int64)", "    head = head.to(tl.int64)"] if self.wide else []
        returned = f"    return ({', '.join([*self.exported, 'q_pos'])},)"
        rows = ["@triton.jit", "def rows(q_pos, head, floats, ints):", *cast, *self.shared, returned]
        head = ["import triton", "import triton.language as tl", "", "from headway.backends.triton.tiles import parameter, tanh"]
        return "\n".join([*head, "", "", *rows, *self.functions, ""])


@dataclass(slots=True)
class TorchCall:
    """One operation of torch with its operands, for the functions of `OPERATIONS`."""

    writer: SourceWriter
    name: str
    values: Sequence[Value]
    dtype: torch.dtype
    args: Any
    kwargs: Any
    value_of: Callable[[Any], Value]
    """Function that returns the recorded value of an argument."""

    def text(self, number: int, dtype: torch.dtype | None = None) -> str:
        """Return an operand's expression in a type. Default: the result's."""
        return self.writer.cast(self.values[number], dtype or self.dtype)

    def inverse(self, number: int) -> str:
        """Return 1 / operand, computed once per query tile, for operands that do not depend on keys. A division per score would
        take as long as an exponential."""
        divisor = self.values[number]
        if divisor.number:
            return repr(1.0 / divisor.number)
        self.writer.keyed = False
        text = self.text(number)
        self.writer.keyed = True
        return self.writer.cast(self.writer.assign(f"1.0 / {text}", self.dtype, divisor.depends), self.dtype)


def _infix(sign: str, kind: Callable[[TorchCall], torch.dtype] = lambda call: call.dtype) -> Callable[[TorchCall], str]:
    """Return the writer of an infix operation. kind: function that returns the type of the operands."""
    return lambda call: f"{call.text(0, kind(call))} {sign} {call.text(1, kind(call))}"


def _function(name: str) -> Callable[[TorchCall], str]:
    return lambda call: f"{name}({call.text(0)})"


def _added(sign: str) -> Callable[[TorchCall], str]:
    def write(call: TorchCall) -> str:
        alpha = call.kwargs.get("alpha", 1)
        factor = "" if alpha == 1 else f" * {call.writer.literal(alpha, call.dtype)}"
        first, second = (1, 0) if call.name == "rsub" else (0, 1)
        return f"{call.text(first)} {sign} {call.text(second)}{factor}"

    return write


def _rounded(name: str) -> Callable[[TorchCall], str]:
    return lambda call: f"{name}({call.text(0)})" if call.dtype.is_floating_point else call.text(0)


def _divided(call: TorchCall) -> str:
    """Write a division. Integers are rounded down, as in torch; Triton rounds them towards zero."""
    mode = "floor" if call.name == "floor_divide" else call.kwargs.get("rounding_mode")
    a, b = call.text(0), call.text(1)
    if mode is None and "score" in call.values[0].depends and not call.values[1].depends & KEYED:
        return f"{a} * {call.inverse(1)}"
    if call.dtype.is_floating_point:
        return f"{a} / {b}" if mode is None else f"tl.floor({a} / {b})" if mode == "floor" else _refuse("div with trunc")
    if mode == "trunc" or all(value.natural for value in call.values):
        return f"{a} // {b}"
    return f"{a} // {b} - (({a} % {b} != 0) & (({a} < 0) != ({b} < 0))).to({call.writer.type_of(call.dtype)})"


def _remainder(call: TorchCall) -> str:
    """Write a remainder, which has the divisor's sign, as in torch; in Triton it has the dividend's."""
    a, b = call.text(0), call.text(1)
    if call.name == "fmod" or all(value.natural for value in call.values):
        return f"{a} % {b}"
    zero = "0.0" if call.dtype.is_floating_point else "0"
    return f"tl.where(({a} % {b} != {zero}) & (({a} < {zero}) != ({b} < {zero})), {a} % {b} + {b}, {a} % {b})"


def _power(call: TorchCall) -> str:
    a, exponent = call.values[0].number, call.values[1].number
    if exponent is not None and exponent == int(exponent) and 1 <= abs(exponent) <= 8:
        product = " * ".join([call.text(0)] * int(abs(exponent)))
        return product if exponent > 0 else f"1.0 / ({product})"
    if exponent == 0.5:
        return f"tl.sqrt({call.text(0)})"
    if exponent is not None and exponent != int(exponent):
        return f"tl.exp2({exponent!r} * tl.log2({call.text(0)}))"
    if a is not None and a > 0 and call.dtype.is_floating_point:
        return f"tl.exp2({call.text(1)} * {math.log2(a)!r})"
    return _refuse("pow with other exponents than numbers up to 8 and fractions")


def _clamped(call: TorchCall) -> str:
    """Write a clamp, whose limits may be None."""
    limits = [call.kwargs.get("min"), call.kwargs.get("max")]
    limits = [*call.args[1:], *limits[len(call.args) - 1 :]]
    lower, upper = limits if call.name == "clamp" else (limits[0], None) if call.name == "clamp_min" else (None, limits[0])
    text = call.text(0)
    for function, limit in (("maximum", lower), ("minimum", upper)):
        if limit is not None:
            text = f"tl.{function}({text}, {call.writer.cast(call.value_of(limit), call.dtype)})"
    return text


def _refuse(what: str) -> str:
    raise NotInlined(f"torch.{what}")


_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}  # in the type in which torch compares
_LOGICAL = {"and": "&", "or": "|", "xor": "^"}
OPERATIONS: dict[str, Callable[[TorchCall], str]] = {
    "add": _added("+"),
    "sub": _added("-"),
    "rsub": _added("-"),
    "mul": _infix("*"),
    "div": _divided,
    "floor_divide": _divided,
    "remainder": _remainder,
    "fmod": _remainder,
    "pow": _power,
    "square": lambda call: f"{call.text(0)} * {call.text(0)}",
    "reciprocal": lambda call: f"1.0 / {call.text(0)}",
    "neg": lambda call: f"-{call.text(0)}",
    **{name: _function(f"tl.{name}") for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "erf")},
    "log1p": lambda call: f"tl.log(1.0 + {call.text(0)})",
    "rsqrt": lambda call: f"1.0 / tl.sqrt({call.text(0)})",
    "sigmoid": lambda call: f"1.0 / (1.0 + tl.exp(-{call.text(0)}))",
    "tanh": lambda call: f"tanh({call.text(0)}, {'DOT' if call.writer.keyed else 'tl.float32'})",
    "relu": lambda call: f"tl.maximum({call.text(0)}, {call.writer.literal(0, call.dtype)})",
    "floor": _rounded("tl.floor"),
    "ceil": _rounded("tl.ceil"),
    "minimum": lambda call: f"tl.minimum({call.text(0)}, {call.text(1)})",
    "maximum": lambda call: f"tl.maximum({call.text(0)}, {call.text(1)})",
    "clamp": _clamped,
    "clamp_min": _clamped,
    "clamp_max": _clamped,
    **{name: _infix(sign, lambda call: torch.result_type(*call.args[:2])) for name, sign in _COMPARED.items()},
    **{f"{kind}{name}": _infix(sign) for kind in ("", "bitwise_") for name, sign in _LOGICAL.items()},
    **{f"logical_{name}": _infix(sign, lambda call: torch.bool) for name, sign in _LOGICAL.items()},
    "bitwise_not": lambda call: f"{call.text(0)} == 0" if call.dtype == torch.bool else f"~{call.text(0)}",
    "lshift": _infix("<<"),
    "rshift": _infix(">>"),
    "bitwise_left_shift": _infix("<<"),
    "bitwise_right_shift": _infix(">>"),
    "logical_not": lambda call: f"{call.text(0, torch.bool)} == 0",
    "where": lambda call: f"tl.where({call.text(0, torch.bool)}, {call.text(1)}, {call.text(2)})",
    "masked_fill": lambda call: f"tl.where({call.text(1, torch.bool)}, {call.text(2)}, {call.text(0)})",
    "to_copy": lambda call: call.text(0),
}
"""Operations that Triton inlines: how each is written."""
_NATURAL = dict.fromkeys(("add", "floor_divide", "remainder", "minimum", "maximum", "rshift", "bitwise_right_shift"), 2)
_NATURAL |= {"or": 2, "xor": 2, "bitwise_or": 2, "bitwise_xor": 2, "to_copy": 1, "clamp": 3, "clamp_min": 2, "clamp_max": 2}
"""Operations that return no negative integers if the first operands are not negative, and the number of these operands."""
