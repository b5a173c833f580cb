"""Triton code for attention rules: records a rule's functions as torch operations and writes them as functions of Triton."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.contract.errors import BackendError
from headway.core.contract.rule import AttentionRule
from headway.core.contract.support import YES, Support
from headway.core.system.files import read_text
from headway.kernels.runtime.triton_cache import KernelCache, import_file
from headway.kernels.runtime.triton_launch import hash_helpers_first

PARTS = {"score": ("score", "q_pos", "k_pos", "head"), "mask": ("q_pos", "k_pos", "head"), "gate": ("q_pos", "k_pos", "head")}
"""Functions of a rule that Triton inlines, and their arguments before `params`."""
KEYED = frozenset({"k_pos", "score"})
"""Arguments that change with the key. Values that depend on others only are computed once per query tile."""
_SHAPE = (2, 3)  # of the tensors with which the functions are recorded
_NARROW = 2**30  # Integers below this are 32-bit in Triton, so that sums and differences of two do not overflow


class RuleCode(str):
    """Triton functions of a rule. Kernels get the object as a compile-time constant and inline the functions.

    As text, it is the name of the functions' module, which contains a digest of their source. Equal names mean equal code. Triton
    writes constants as JSON when a hook watches compilations, so they must be text or numbers.
    """

    rows: Any = None
    """Function of (q_pos, head, floats, ints) that returns a tuple: what the other functions need and keys do not change."""
    score: Any = None
    """Function of (score, rows, k_pos, DOT) that returns the changed score. None if the rule changes no scores."""
    mask: Any = None
    """Function of (rows, k_pos, DOT) that returns whether a query sees a key. None if the rule has no mask."""
    gate: Any = None
    """Function of (rows, k_pos, DOT) that returns the factor of a key's value. None if the rule has no gate."""
    by_head: bool = False
    """True if the mask depends on the query head."""

    @property
    def cache_key(self) -> str:
        """Digest that Triton includes in the keys of its caches."""
        return str(self)


NO_RULE = RuleCode("no_rule")


@dataclass(frozen=True, slots=True)
class TracedRule:
    """Source of a rule's functions, and how its parameters are stored."""

    source: str
    by_head: bool
    wide: bool
    """True if integers are 64-bit, as in torch. Otherwise 32 bits suffice."""

    def code(self) -> RuleCode:
        """Return the functions, after importing the source from a file in the cache folder."""
        name = f"headway_rule_{hashlib.sha256(self.source.encode()).hexdigest()[:16]}"
        cache = KernelCache(name)
        path = cache.get_file(f"{name}.py")
        if path is None or read_text(Path(path)) != self.source:
            path = cache.put(self.source, f"{name}.py", binary=False)
        module = import_file(name, path)
        functions = {part: getattr(module, part, None) for part in ("rows", *PARTS)}
        for function in functions.values():
            hash_helpers_first(function)
        code = RuleCode(name)
        for part, function in (*functions.items(), ("by_head", self.by_head)):
            setattr(code, part, function)
        return code

    def pack(self, rule: AttentionRule, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rule's parameters as the functions read them: float32 and integer buffers on a device."""
        values = [_numbers(value) for _, value in _stored(rule)]
        floats = [value.float() for value in values if value.is_floating_point()]
        ints = [value for value in values if not value.is_floating_point()]
        packed = torch.cat([*floats, torch.zeros(1)]), torch.cat([*ints, torch.zeros(1, dtype=torch.int64)])
        return packed[0].to(device), (packed[1] if self.wide else packed[1].int()).to(device)


class _Refusal(Exception):
    """A rule does something that Triton does not inline. The argument is what it does."""


def traced_rule(rule: AttentionRule) -> TracedRule:
    """Return the source of a rule's functions. :raises BackendError: if Triton does not inline the rule."""
    found = _traced(rule)
    if isinstance(found, Support):
        raise BackendError(f"triton: {found.brief}")
    return found


@lru_cache(maxsize=256)
def _traced(rule: AttentionRule) -> TracedRule | Support:
    """Return the source of a rule's functions, or the refusal that names the operation that Triton does not inline."""
    try:  # in inference mode, torch converts types by operations with other names
        with torch.inference_mode(False), torch.no_grad():
            return _trace(rule, wide=False) or _trace(rule, wide=True)  # type: ignore[return-value]
    except _Refusal as refusal:
        return Support.no(f"rule {rule.name}", "elementwise operations that triton inlines", str(refusal), "name another backend")


def inlines(rule: AttentionRule | None) -> Support:
    """Return whether Triton inlines a rule."""
    found = YES if rule is None else _traced(rule)
    return found if isinstance(found, Support) else YES


def _stored(rule: AttentionRule) -> list[tuple[str, Tensor | Sequence[float]]]:
    """Return the parameters that functions read from memory: tensors, and numbers for each head."""
    values = ((each.name, getattr(rule, each.name)) for each in fields(rule))  # type: ignore[arg-type]
    return [(name, value) for name, value in values if isinstance(value, Tensor) or name in rule.per_head]


def _numbers(value: Tensor | Sequence[float]) -> Tensor:
    """Return a parameter as a flat tensor on the CPU: float32 or float64, or int64."""
    flat = value.detach().cpu().reshape(-1) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
    return flat if flat.is_floating_point() else flat.long()


@dataclass(slots=True)
class _Value:
    """A recorded tensor: an expression in Triton, or a number."""

    text: str
    dtype: torch.dtype
    depends: frozenset[str] = frozenset()
    """Arguments that the value depends on."""
    natural: bool = False
    """True if it is an integer and never negative."""
    number: float | None = None


@dataclass(slots=True)
class _Table:
    """A parameter, or a part of it: elements of a buffer."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _trace(rule: AttentionRule, wide: bool) -> TracedRule | None:
    """Return the traced rule, or None if it needs 64-bit integers and `wide` is False."""
    writer = _Writer(wide)
    by_head = False
    for part in PARTS:
        if part not in rule.parts:
            continue
        recorder = _Recorder(writer, part)
        arguments: list[Any] = [
            recorder.argument(name, torch.zeros(_SHAPE, dtype=torch.float32 if name == "score" else torch.int64))
            for name in PARTS[part]
        ]
        arguments.append(rule.params(arguments[-1]))
        _take_parameters(rule, arguments[-1], recorder)
        try:
            with recorder:
                result = getattr(rule, part)(*arguments)
            depends = recorder.finish(result)
        except _Refusal as refusal:
            raise _Refusal(f"{refusal} in {part}") from None
        except Exception as error:
            raise _Refusal(f"{type(error).__name__} in {part}: {str(error).splitlines()[0] if str(error) else ''}") from error
        by_head |= part == "mask" and "head" in depends
    if writer.needs_wide and not wide:
        return None
    return TracedRule(writer.source(), by_head, wide)


def _take_parameters(rule: AttentionRule, params: Any, recorder: _Recorder) -> None:
    """Make the parameters known to a recorder, at their places in the buffers of `TracedRule.pack`."""
    sizes = {"floats": 0, "ints": 0}
    for name, value in _stored(rule):
        numbers = _numbers(value)
        buffer = "floats" if numbers.is_floating_point() else "ints"
        given = getattr(params, name)
        if isinstance(value, Tensor):
            given = value.detach().cpu()
            setattr(params, name, given)
            strides = tuple(given.contiguous().stride())
            recorder.tables[id(given)] = _Table(buffer, sizes[buffer], tuple(given.shape), strides, given.dtype)
            if buffer == "ints" and len(numbers) and int(numbers.abs().max()) >= _NARROW:
                recorder.writer.needs_wide = True
        elif isinstance(given, Tensor):
            load = f"parameter(floats + {sizes[buffer]} + head)"
            recorder.values[id(given)] = recorder.writer.assign(load, given.dtype, frozenset({"head"}))
        recorder.kept.append(given)
        sizes[buffer] += len(numbers)


@dataclass(slots=True)
class _Writer:
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

    def assign(self, text: str, dtype: torch.dtype, depends: frozenset[str], natural: bool = False) -> _Value:
        """Return a new variable of the value `text`, assigned in `rows` if no key changes it."""
        lines = self.lines if depends & KEYED else self.shared
        known = next((line.split()[0] for line in lines if line.endswith(f" = {text}")), None)
        name = known or f"v{self.count}"
        if known is None:
            lines.append(f"    {name} = {text}")
            self.count += 1
        return _Value(name, dtype, depends, natural and not dtype.is_floating_point)

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

    def source(self) -> str:
        """Return the module's source."""
        cast = ["    q_pos = q_pos.to(tl.int64)", "    head = head.to(tl.int64)"] if self.wide else []
        returned = f"    return ({', '.join([*self.exported, 'q_pos'])},)"
        rows = ["@triton.jit", "def rows(q_pos, head, floats, ints):", *cast, *self.shared, returned]
        head = ["import triton", "import triton.language as tl", "", "from headway.backends.triton.tiles import parameter, tanh"]
        return "\n".join([*head, "", "", *rows, *self.functions, ""])


class _Recorder(TorchDispatchMode):
    """Records one function of a rule: every operation of torch becomes a line of Triton."""

    def __init__(self, writer: _Writer, part: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writer = writer
        self.values: dict[int, _Value] = {}
        """Recorded tensors, by their ids."""
        self.tables: dict[int, _Table] = {}
        """Parameters, and parts of them, by their ids."""
        self.kept: list[Any] = []  # Tensors whose ids are in use
        self.keyed = True
        """True if the line that is being written is part of the function, False if it is part of `rows`."""
        self._part = part
        writer.lines = []

    def argument(self, name: str, sample: Tensor) -> Tensor:
        """Return `sample`, which from now on means the argument `name`."""
        self.kept.append(sample)
        self.values[id(sample)] = _Value(name, sample.dtype, frozenset({name}), natural=name != "score")
        return sample

    def finish(self, result: Any) -> frozenset[str]:
        """Add the recorded function to the source. Return the arguments that its result depends on."""
        dtype = torch.bool if self._part == "mask" else torch.float32
        self.keyed = True
        value = self._value(result)
        text = self._cast(value, dtype)
        if self._part == "score":
            text = f"tl.broadcast_to({text}, score.shape)" if value.depends else f"tl.full(score.shape, {text}, tl.float32)"
        first = ["score", "rows"] if self._part == "score" else ["rows"]
        head = ["", "", "@triton.jit", f"def {self._part}({', '.join(first)}, k_pos, DOT: tl.constexpr):"]
        cast = ["    k_pos = k_pos.to(tl.int64)"] if self.writer.wide else []
        self.writer.functions += [*head, *cast, *self.writer.lines, f"    return {text}"]
        return value.depends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__.strip("_"), kwargs or {}
        if name == "local_scalar_dense":
            raise _Refusal("a branch or a number that depends on a tensor's value")
        if func._schema.is_mutable:
            raise _Refusal(f"torch.{name}, which changes a tensor in place")
        result = self._index(name, args)
        if result is not None:
            return result
        result = func(*args, **kwargs)
        operands: list[Any] = [each for each in args if isinstance(each, Tensor | bool | int | float)]
        operands += [each for each in kwargs.values() if isinstance(each, Tensor)]
        if not isinstance(result, Tensor) or any(id(each) in self.tables and each.dim() for each in operands):
            raise _Refusal(f"torch.{name} of a whole parameter or with several results")
        self.kept.append(result)
        values = [self._value(each) for each in operands]
        for each in (result, *operands):
            if isinstance(each, Tensor) and each.dim() and each.shape != _SHAPE:
                raise _Refusal(f"torch.{name} with the shape {list(each.shape)}, which is not elementwise")
        if name in _FILLED or (name in _OPERATIONS and all(each.number is not None for each in values)):
            self.values[id(result)] = _number(result.flatten()[0].item(), result.dtype)
        elif name in _SAME:
            self.values[id(result)] = values[0]
        elif name in _OPERATIONS:
            if result.dtype in (torch.bfloat16, torch.float16):  # torch would round it to 16 bits
                raise _Refusal(f"torch.{name} with a result of {result.dtype} instead of float32")
            self.values[id(result)] = self._write(name, values, result.dtype, args, kwargs)
        else:
            raise _Refusal(f"torch.{name}")
        return result

    def _index(self, name: str, args: Any) -> Tensor | None:
        """Return an element or a part of a parameter. Return None for other operations."""
        table = self.tables.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if table is None or name not in ("select", "index"):
            return None
        given: Tensor = args[0]
        part: Tensor
        if name == "select":
            _, axis, at = args
            place = at + table.shape[axis] if at < 0 else at
            left = [number for number in range(len(table.shape)) if number != axis % len(table.shape)]
            shape, strides = (tuple(each[number] for number in left) for each in (table.shape, table.strides))
            part = given.select(int(axis), int(at))
            self.tables[id(part)] = _Table(table.buffer, table.offset + place * table.strides[axis], shape, strides, given.dtype)
            self.kept.append(part)
            return part
        indices = args[1]
        if len(indices) != len(table.shape) or not all(isinstance(each, Tensor) for each in indices):
            raise _Refusal(f"a parameter of {len(table.shape)} dimensions with {len(indices)} indices")
        values = [self._value(each) for each in indices]
        if any(value.dtype == torch.bool for value in values):
            raise _Refusal("a bool tensor as index")
        places, depends = [str(table.offset)], frozenset[str]().union(*(value.depends for value in values))
        self.keyed = bool(depends & KEYED)
        for value, size, stride in zip(values, table.shape, table.strides, strict=True):
            text = self._cast(value, value.dtype)
            if value.number is None:  # positions after the end of a sequence must not read outside of the memory
                text = text if value.natural else f"tl.where({text} < 0, {text} + {size}, {text})"
                text = f"tl.minimum(tl.maximum({text}, 0), {max(size - 1, 0)})"
            places.append(text if stride == 1 else f"{text} * {stride}")
        part = given.new_zeros(torch.broadcast_shapes(*(each.shape for each in indices)))
        self.kept.append(part)
        self.values[id(part)] = self._load(table, " + ".join(places), depends)
        return part

    def _load(self, table: _Table, place: str, depends: frozenset[str]) -> _Value:
        buffer = self.writer.export(table.buffer) if depends & KEYED else table.buffer
        text = f"parameter({buffer} + {place})"
        return self.writer.assign(f"{text} != 0" if table.dtype == torch.bool else text, table.dtype, depends)

    def _value(self, given: Any) -> _Value:
        """Return the recorded value of an operand."""
        if not isinstance(given, Tensor):
            if not isinstance(given, bool | int | float):
                raise _Refusal(f"a {type(given).__name__} instead of a tensor")
            return _number(given, torch.tensor(given).dtype)
        known = self.values.get(id(given))
        if known is None and (table := self.tables.get(id(given))) is not None and not table.shape:
            known = self.values[id(given)] = self._load(table, str(table.offset), frozenset())
        if known is None and given.numel() == 1:
            known = _number(given.item(), given.dtype)
        if known is None:
            raise _Refusal("a tensor that is not a parameter")
        return known

    def _cast(self, value: _Value, dtype: torch.dtype) -> str:
        """Return a value's expression in another type, as the function that is being recorded reads it."""
        if value.number is not None:
            return self._literal(value.number, dtype)
        text = value.text if value.depends & KEYED or not self.keyed else self.writer.export(value.text)
        own, wanted = self.writer.type_of(value.dtype), self.writer.type_of(dtype)
        if own == wanted:
            return text
        return f"({text} != 0)" if wanted == "tl.int1" else f"{text}.to({wanted})"

    def _literal(self, number: float, dtype: torch.dtype) -> str:
        if dtype == torch.bool:
            return str(bool(number))
        if dtype.is_floating_point:
            return repr(float(number)) if math.isfinite(number) else f'float("{float(number)}")'
        if abs(number) >= _NARROW:
            self.writer.needs_wide = True
        return str(int(number))

    def _write(self, name: str, values: Sequence[_Value], dtype: torch.dtype, args: Any, kwargs: Any) -> _Value:
        """Return a new variable: an operation's result."""
        depends = frozenset[str]().union(*(value.depends for value in values))
        self.keyed = bool(depends & KEYED)
        if dtype in (torch.uint8, torch.int8, torch.int16) or (name in ("add", "sub", "rsub") and dtype == torch.bool):
            raise _Refusal(f"torch.{name} with a result of {dtype} (convert its operands to int64 or float32)")
        if name in ("mul", "lshift", "bitwise_left_shift", "pow") and dtype == torch.int64:
            self.writer.needs_wide = True
        text = _OPERATIONS[name](_Call(self, name, values, dtype, args, kwargs))
        natural = name in _NATURAL and all(value.natural for value in values[: _NATURAL[name]])
        if name in ("and", "bitwise_and"):
            natural = any(value.natural for value in values)
        elif name == "sub":  # a query sees no later key, and results for other keys are not used
            natural = [value.text for value in values] == ["q_pos", "k_pos"] and "alpha" not in kwargs
        return self.writer.assign(text, dtype, depends, natural)


def _number(number: float, dtype: torch.dtype) -> _Value:
    return _Value("", dtype, natural=not dtype.is_floating_point and number >= 0, number=number)


@dataclass(slots=True)
class _Call:
    """One operation with its operands, for the functions of `_OPERATIONS`."""

    recorder: _Recorder
    name: str
    values: Sequence[_Value]
    dtype: torch.dtype
    args: Any
    kwargs: Any

    def text(self, number: int, dtype: torch.dtype | None = None) -> str:
        """Return an operand's expression in a type. Default: the result's."""
        return self.recorder._cast(self.values[number], dtype or self.dtype)

    def inverse(self, number: int) -> str:
        """Return 1 / operand, computed once per query tile, for operands that do not depend on keys. A division per score would
        take as long as an exponential."""
        divisor = self.values[number]
        if divisor.number:
            return repr(1.0 / divisor.number)
        self.recorder.keyed = False
        text = self.text(number)
        self.recorder.keyed = True
        return self.recorder._cast(self.recorder.writer.assign(f"1.0 / {text}", self.dtype, divisor.depends), self.dtype)


def _infix(sign: str, kind: Callable[[_Call], torch.dtype] = lambda call: call.dtype) -> Callable[[_Call], str]:
    """Return the writer of an infix operation. kind: function that returns the type of the operands."""
    return lambda call: f"{call.text(0, kind(call))} {sign} {call.text(1, kind(call))}"


_compared = partial(_infix, kind=lambda call: torch.result_type(*call.args[:2]))  # in which torch compares
_logical = partial(_infix, kind=lambda call: torch.bool)


def _function(name: str) -> Callable[[_Call], str]:
    return lambda call: f"{name}({call.text(0)})"


def _added(sign: str) -> Callable[[_Call], str]:
    def write(call: _Call) -> str:
        alpha = call.kwargs.get("alpha", 1)
        factor = "" if alpha == 1 else f" * {call.recorder._literal(alpha, call.dtype)}"
        first, second = (1, 0) if call.name == "rsub" else (0, 1)
        return f"{call.text(first)} {sign} {call.text(second)}{factor}"

    return write


def _rounded(name: str) -> Callable[[_Call], str]:
    return lambda call: f"{name}({call.text(0)})" if call.dtype.is_floating_point else call.text(0)


def _divided(call: _Call) -> str:
    """Write a division. Integers are rounded down, as in torch; Triton rounds them towards zero."""
    mode = "floor" if call.name == "floor_divide" else call.kwargs.get("rounding_mode")
    a, b = call.text(0), call.text(1)
    if mode is None and "score" in call.values[0].depends and not call.values[1].depends & KEYED:
        return f"{a} * {call.inverse(1)}"
    if call.dtype.is_floating_point:
        return f"{a} / {b}" if mode is None else f"tl.floor({a} / {b})" if mode == "floor" else _refuse("div with trunc")
    if mode == "trunc" or all(value.natural for value in call.values):
        return f"{a} // {b}"
    return f"{a} // {b} - (({a} % {b} != 0) & (({a} < 0) != ({b} < 0))).to({call.recorder.writer.type_of(call.dtype)})"


def _remainder(call: _Call) -> str:
    """Write a remainder, which has the divisor's sign, as in torch; in Triton it has the dividend's."""
    a, b = call.text(0), call.text(1)
    if call.name == "fmod" or all(value.natural for value in call.values):
        return f"{a} % {b}"
    zero = "0.0" if call.dtype.is_floating_point else "0"
    return f"tl.where(({a} % {b} != {zero}) & (({a} < {zero}) != ({b} < {zero})), {a} % {b} + {b}, {a} % {b})"


def _power(call: _Call) -> str:
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


def _clamped(call: _Call) -> str:
    """Write a clamp, whose limits may be None."""
    limits = [call.kwargs.get("min"), call.kwargs.get("max")]
    limits = [*call.args[1:], *limits[len(call.args) - 1 :]]
    lower, upper = limits if call.name == "clamp" else (limits[0], None) if call.name == "clamp_min" else (None, limits[0])
    text = call.text(0)
    for function, limit in (("maximum", lower), ("minimum", upper)):
        if limit is not None:
            text = f"tl.{function}({text}, {call.recorder._cast(call.recorder._value(limit), call.dtype)})"
    return text


def _refuse(what: str) -> str:
    raise _Refusal(f"torch.{what}")


_OPERATIONS: dict[str, Callable[[_Call], str]] = {
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
    "abs": _function("tl.abs"),
    "exp": _function("tl.exp"),
    "exp2": _function("tl.exp2"),
    "log": _function("tl.log"),
    "log2": _function("tl.log2"),
    "log1p": lambda call: f"tl.log(1.0 + {call.text(0)})",
    "sqrt": _function("tl.sqrt"),
    "rsqrt": lambda call: f"1.0 / tl.sqrt({call.text(0)})",
    "sin": _function("tl.sin"),
    "cos": _function("tl.cos"),
    "erf": _function("tl.erf"),
    "sigmoid": lambda call: f"1.0 / (1.0 + tl.exp(-{call.text(0)}))",
    "tanh": lambda call: f"tanh({call.text(0)}, {'DOT' if call.recorder.keyed else 'tl.float32'})",
    "relu": lambda call: f"tl.maximum({call.text(0)}, {call.recorder._literal(0, call.dtype)})",
    "floor": _rounded("tl.floor"),
    "ceil": _rounded("tl.ceil"),
    "minimum": lambda call: f"tl.minimum({call.text(0)}, {call.text(1)})",
    "maximum": lambda call: f"tl.maximum({call.text(0)}, {call.text(1)})",
    "clamp": _clamped,
    "clamp_min": _clamped,
    "clamp_max": _clamped,
    "eq": _compared("=="),
    "ne": _compared("!="),
    "lt": _compared("<"),
    "le": _compared("<="),
    "gt": _compared(">"),
    "ge": _compared(">="),
    "and": _infix("&"),
    "or": _infix("|"),
    "xor": _infix("^"),
    "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"),
    "bitwise_xor": _infix("^"),
    "bitwise_not": lambda call: f"{call.text(0)} == 0" if call.dtype == torch.bool else f"~{call.text(0)}",
    "lshift": _infix("<<"),
    "rshift": _infix(">>"),
    "bitwise_left_shift": _infix("<<"),
    "bitwise_right_shift": _infix(">>"),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "logical_not": lambda call: f"{call.text(0, torch.bool)} == 0",
    "where": lambda call: f"tl.where({call.text(0, torch.bool)}, {call.text(1)}, {call.text(2)})",
    "masked_fill": lambda call: f"tl.where({call.text(1, torch.bool)}, {call.text(2)}, {call.text(0)})",
    "to_copy": lambda call: call.text(0),
}
"""Operations that Triton inlines: how each is written."""
_SAME = ("alias", "detach", "clone", "lift_fresh", "lift_fresh_copy")  # Operations that return their operand
_FILLED = ("ones_like", "zeros_like", "full_like", "scalar_tensor")  # Operations whose results are numbers
_NATURAL = dict.fromkeys(("add", "floor_divide", "remainder", "minimum", "maximum", "rshift", "bitwise_right_shift"), 2)
_NATURAL |= {"or": 2, "xor": 2, "bitwise_or": 2, "bitwise_xor": 2, "to_copy": 1, "clamp": 3, "clamp_min": 2, "clamp_max": 2}
"""Operations that return no negative integers if the first operands are not negative, and the number of these operands."""
