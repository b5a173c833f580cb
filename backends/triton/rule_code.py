"""Triton functions of attention rules. A rule's functions run once, and their operations of torch are recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.backends.triton.rule_source import NARROW, OPERATIONS, NotInlined, SourceWriter, Table, TorchCall, Value
from headway.core.contract.errors import BackendError
from headway.core.contract.rule import AttentionRule
from headway.core.contract.support import YES, Support
from headway.core.system.files import read_text
from headway.kernels.runtime.triton_cache import KernelCache, import_file
from headway.kernels.runtime.triton_launch import hash_helpers_first

PARTS = {"score": ("score", "q_pos", "k_pos", "head"), "mask": ("q_pos", "k_pos", "head"), "gate": ("q_pos", "k_pos", "head")}
"""Functions of a rule that Triton inlines, and their arguments before `params`."""
_SHAPE = (2, 3)  # of the tensors with which the functions are recorded
_SAME = ("alias", "detach", "clone", "lift_fresh", "lift_fresh_copy")  # Operations that return their operand
_FILLED = ("ones_like", "zeros_like", "full_like", "scalar_tensor")  # Operations whose results are numbers


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
    except NotInlined as refusal:
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


def _trace(rule: AttentionRule, wide: bool) -> TracedRule | None:
    """Return the traced rule, or None if it needs 64-bit integers and `wide` is False."""
    writer, by_head = SourceWriter(wide), False
    for part in PARTS:
        if part not in rule.parts:
            continue
        recorder = _Recorder(writer)
        arguments: list[Any] = [
            recorder.argument(name, torch.zeros(_SHAPE, dtype=torch.float32 if name == "score" else torch.int64))
            for name in PARTS[part]
        ]
        arguments.append(rule.params(arguments[-1]))
        _take_parameters(rule, arguments[-1], recorder)
        try:
            with recorder:
                result = getattr(rule, part)(*arguments)
            value = recorder.value(result)
            writer.end_function(part, value)
        except NotInlined as refusal:
            raise NotInlined(f"{refusal} in {part}") from None
        except Exception as error:
            raise NotInlined(f"{type(error).__name__} in {part}: {str(error).splitlines()[0] if str(error) else ''}") from error
        by_head |= part == "mask" and "head" in value.depends
    return None if writer.needs_wide and not wide else TracedRule(writer.source(), by_head, wide)


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
            recorder.tables[id(given)] = Table(buffer, sizes[buffer], tuple(given.shape), strides, given.dtype)
            if buffer == "ints" and len(numbers) and int(numbers.abs().max()) >= NARROW:
                recorder.writer.needs_wide = True
        elif isinstance(given, Tensor):
            load = f"parameter(floats + {sizes[buffer]} + head)"
            recorder.values[id(given)] = recorder.writer.assign(load, given.dtype, frozenset({"head"}))
        recorder.kept.append(given)
        sizes[buffer] += len(numbers)


class _Recorder(TorchDispatchMode):
    """Records the operations of torch in one function of a rule."""

    def __init__(self, writer: SourceWriter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writer = writer
        self.values: dict[int, Value] = {}
        """Recorded tensors, by their ids."""
        self.tables: dict[int, Table] = {}
        """Parameters, and parts of them, by their ids."""
        self.kept: list[Any] = []  # Tensors whose ids are in use

    def argument(self, name: str, sample: Tensor) -> Tensor:
        """Return `sample`, which from now on means the argument `name`."""
        self.kept.append(sample)
        self.values[id(sample)] = Value(name, sample.dtype, frozenset({name}), natural=name != "score")
        return sample

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__.strip("_"), kwargs or {}
        if name == "local_scalar_dense":
            raise NotInlined("a branch or a number that depends on a tensor's value")
        if func._schema.is_mutable:
            raise NotInlined(f"torch.{name}, which changes a tensor in place")
        if (result := self._index(name, args)) is not None:
            return result
        result = func(*args, **kwargs)
        operands: list[Any] = [each for each in args if isinstance(each, Tensor | bool | int | float)]
        operands += [each for each in kwargs.values() if isinstance(each, Tensor)]
        if not isinstance(result, Tensor) or any(id(each) in self.tables and each.dim() for each in operands):
            raise NotInlined(f"torch.{name} of a whole parameter or with several results")
        self.kept.append(result)
        values = [self.value(each) for each in operands]
        for each in (result, *operands):
            if isinstance(each, Tensor) and each.dim() and each.shape != _SHAPE:
                raise NotInlined(f"torch.{name} with the shape {list(each.shape)}, which is not elementwise")
        if name in _FILLED or (name in OPERATIONS and all(each.number is not None for each in values)):
            self.values[id(result)] = Value.of(result.flatten()[0].item(), result.dtype)
        elif name in _SAME:
            self.values[id(result)] = values[0]
        elif name in OPERATIONS:
            if result.dtype in (torch.bfloat16, torch.float16):  # torch would round it to 16 bits
                raise NotInlined(f"torch.{name} with a result of {result.dtype} instead of float32")
            call = TorchCall(self.writer, name, values, result.dtype, args, kwargs, self.value)
            self.values[id(result)] = self.writer.result(call)
        else:
            raise NotInlined(f"torch.{name}")
        return result

    def _index(self, name: str, args: Any) -> Tensor | None:
        """Return an element or a part of a parameter. Return None for other operations."""
        table = self.tables.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if table is None or name not in ("select", "index"):
            return None
        given: Tensor = args[0]
        if name == "select":
            _, axis, at = args
            place = at + table.shape[axis] if at < 0 else at
            left = [number for number in range(len(table.shape)) if number != axis % len(table.shape)]
            shape, strides = (tuple(each[number] for number in left) for each in (table.shape, table.strides))
            part = given.select(int(axis), int(at))
            self.tables[id(part)] = Table(table.buffer, table.offset + place * table.strides[axis], shape, strides, given.dtype)
            self.kept.append(part)
            return part
        indices = args[1]
        if len(indices) != len(table.shape) or not all(isinstance(each, Tensor) for each in indices):
            raise NotInlined(f"a parameter of {len(table.shape)} dimensions with {len(indices)} indices")
        values = [self.value(each) for each in indices]
        if any(value.dtype == torch.bool for value in values):
            raise NotInlined("a bool tensor as index")
        part = given.new_zeros(torch.broadcast_shapes(*(each.shape for each in indices)))
        self.kept.append(part)
        self.values[id(part)] = self.writer.element(table, values)
        return part

    def value(self, given: Any) -> Value:
        """Return the recorded value of an operand."""
        if not isinstance(given, Tensor):
            if not isinstance(given, bool | int | float):
                raise NotInlined(f"a {type(given).__name__} instead of a tensor")
            return Value.of(given, torch.tensor(given).dtype)
        known = self.values.get(id(given))
        if known is None and (table := self.tables.get(id(given))) is not None and not table.shape:
            known = self.values[id(given)] = self.writer.element(table, ())
        if known is None and given.numel() == 1:
            known = Value.of(given.item(), given.dtype)
        if known is None:
            raise NotInlined("a tensor that is not a parameter")
        return known
