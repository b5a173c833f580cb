"""`AttentionRule`: a variant of attention as a few lines of torch, which every backend either computes or refuses."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, ClassVar, Self, cast, dataclass_transform

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError

PerHead = tuple[float, ...]
"""Type of a parameter with one number for each query head. A rule's functions get the number of their head."""
PARTS = ("score", "mask", "gate", "blocks")
"""Names of the functions that a rule may override."""


class Parameters(SimpleNamespace):
    """Parameters of a rule, as its functions get them."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"params has {', '.join(vars(self)) or 'nothing'}, not {name}")


@dataclass_transform(frozen_default=True, eq_default=False)
class AttentionRule:
    """Base class of attention rules. Subclasses override `score`, `mask`, `gate` or `blocks`, and declare parameters as fields.

    `score`, `mask` and `gate` get positions and heads as integer tensors that broadcast against each other, and return a tensor
    that broadcasts with them. They must be elementwise: one element may depend only on the same element of each argument and on
    the parameters. In a causal rule, 0 <= k_pos <= q_pos. The parameters are attributes of `params`: numbers as they are,
    `PerHead` as the number of the head, and tensors to be indexed, such as `params.table[q_pos - k_pos]`.
    """

    name: ClassVar[str] = ""
    """Name in messages and tables. Default: the name of the class."""
    causal: ClassVar[bool] = True
    """True if a query sees no later keys, whatever the mask says. A rule with `ahead` sets it to False."""
    ahead: ClassVar[int] = 0
    """Number of tokens at the start of a sequence that may see each other, if the mask allows it (prefix-LM). They are computed
    in one step, so a prompt must have at least this number of tokens. Later tokens see no later keys."""
    max_len: ClassVar[int] = 1 << 20
    """Maximum length of a sequence in tokens, such as the length of a table that is indexed by position."""
    block_keys: ClassVar[int] = 64
    """Number of keys in a block of `blocks`. Block b has positions b * block_keys to (b + 1) * block_keys - 1."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name") or cls.__name__
        try:
            dataclass(frozen=True, eq=False, repr=False)(cls)
        except (TypeError, ValueError) as error:
            need = "parameters whose defaults are numbers, tuples or tensors, after those without one"
            raise ConfigError(f"attention rule {cls.name}", need, error) from error

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Check that each parameter has a value, and each value a parameter."""
        signature = inspect.signature(MethodType(cls.__init__, cls))
        try:
            signature.bind(*values, **named)
        except TypeError as error:
            own = [*signature.parameters]
            unknown = next((name for name in named if name not in own), "")
            hint = f"declare {unknown} as a field, or remove it" if unknown else "give the fields defaults, or pass them by name"
            need = f"parameters out of {', '.join(own) or 'none'}"
            raise ConfigError(f"attention rule {cls.name}", need, unknown or error, hint) from error
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Copy tensors, make lists tensors, and `PerHead` parameters tuples. Later changes of the caller's have no effect."""
        for field, value in self._fields():
            try:
                if _is_per_head(field):
                    object.__setattr__(self, field.name, tuple(map(float, value)))
                elif isinstance(value, (Tensor, list)):
                    object.__setattr__(self, field.name, torch.as_tensor(value).detach().clone())
            except (TypeError, ValueError):
                need = "one number for each query head" if _is_per_head(field) else "a tensor, or nested lists of numbers"
                raise ConfigError(f"attention rule {self.name}, {field.name}", need, repr(value)) from None

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        """Return the changed score. score: float32 q.k * scale."""
        return score

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        """Return a bool tensor: True where the query sees the key."""
        return (k_pos <= q_pos) | (not self.causal)

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        """Return the factor of a key's value. It multiplies the weight after the softmax, and so does not change its sum."""
        return torch.ones_like(k_pos, dtype=torch.float32)

    def blocks(self, q: Tensor, summaries: Tensor, q_pos: Tensor, params: Any) -> Tensor:
        """Return bool [queries, heads, blocks]: True if the query sees the keys of the block. heads: query heads, kv heads or 1.

        All queries of a call are in the same block, and only the blocks before it are passed, which are complete. A query always
        sees its own block. The result is thus the same in every chunk of a prompt, and if tokens come one by one.

        q: float32 [queries, num_heads, head_dim]. summaries: float32 [blocks, num_kv_heads, head_dim], the results of `summary`.
        q_pos: [queries]. params: as for `score`, but `PerHead` parameters are [num_heads, 1].
        """
        return torch.ones(len(q), 1, len(summaries), dtype=torch.bool, device=q.device)

    def summary(self, keys: Tensor) -> Tensor:
        """Return a summary of blocks of keys for `blocks`. keys: float32 [..., block_keys, head_dim]. Default: the mean."""
        return keys.mean(-2)

    @property
    def parts(self) -> frozenset[str]:
        """Names of the functions that the rule overrides, out of PARTS."""
        return frozenset(name for name in PARTS if getattr(type(self), name) is not getattr(AttentionRule, name))

    @property
    def num_heads(self) -> int | None:
        """Number of query heads that the first `PerHead` parameter is for, or None without such a parameter."""
        return next((len(value) for field, value in self._fields() if _is_per_head(field)), None)

    @property
    def per_head(self) -> frozenset[str]:
        """Names of the parameters with one number for each query head."""
        return frozenset(field.name for field, _ in self._fields() if _is_per_head(field))

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of SHA-256 over the source of the class, the functions and values of its module that it uses, and
        the parameters. Rules with equal digests are equal.

        :raises ConfigError: if the class has no source, such as a class typed into an interpreter.
        """
        hashed, shard = hashlib.sha256(), self._shard
        facts = (_fact(field.name, value) for field, value in self._fields())
        for fact in (*_facts(type(self)), *facts) if shard is None else [f"{shard[0].digest} {shard[1:]}".encode()]:
            hashed.update(fact)
        return hashed.hexdigest()[:16]

    @property
    def _shard(self) -> tuple[AttentionRule, int, int] | None:
        """Rule of which this rule is a shard, with the arguments of `for_heads`. None if it is not a shard."""
        return self.__dict__.get("_of")

    def for_heads(self, first: int, count: int) -> AttentionRule:
        """Return the rule for a rank's query heads. `PerHead` parameters are cut, and the functions get the model's head numbers.

        first: number of the rank's first head. count: number of its heads.
        """
        kind = type(self)

        def shifted(part: str) -> Callable[..., Tensor]:
            def function(*given: Any) -> Tensor:
                *others, head, params = given
                found: Tensor = getattr(kind, part)(*[*others, head + first, params])
                return found

            return function

        own = {part: shifted(part) for part in self.parts - {"blocks"}} if first else {}
        cut = type(kind.__name__, (kind,), {**own, "name": kind.name, "__module__": kind.__module__})
        made = cut(**{each.name: value[first : first + count] if _is_per_head(each) else value for each, value in self._fields()})
        made.__dict__["_of"] = self, first, count
        return cast("AttentionRule", made)

    def params(self, head: Tensor) -> Any:
        """Return the object that the rule's functions get as `params`. head: integer tensor of this rule's query heads."""
        found = Parameters()
        placed = self.__dict__.setdefault("_placed", {}).setdefault(head.device, {})
        for field, value in self._fields():
            if isinstance(value, Tensor) or _is_per_head(field):
                if field.name not in placed:
                    dtype = None if isinstance(value, Tensor) else torch.float32
                    placed[field.name] = torch.as_tensor(value, dtype=dtype).to(head.device)
                value = placed[field.name][head] if _is_per_head(field) else placed[field.name]
            setattr(found, field.name, value)
        return found

    def changed(self, scores: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores with the rule's changes, -inf where its mask hides a key, and the factors of `gate`, or None.

        This function is for backends that compute scores in torch. It does not apply causality, nor `blocks`.
        """
        k_pos, params, parts = torch.minimum(k_pos, q_pos.clamp(min=self.ahead - 1)), self.params(head), self.parts
        if "score" in parts:
            scores = self.score(scores, q_pos, k_pos, head, params)
        if "mask" in parts:
            scores = scores.masked_fill(~self.mask(q_pos, k_pos, head, params), -torch.inf)
        return scores, self.gate(q_pos, k_pos, head, params) if "gate" in parts else None

    def seen_blocks(self, q: Tensor, keys: Tensor, first: int) -> Tensor:
        """Return bool [num_heads, queries, kv_len]: True if the query sees the key by `blocks`.

        q: [queries, num_heads, head_dim], at positions `first` and after. keys: [kv_len, num_kv_heads, head_dim] of the sequence.
        """
        size, (count, heads, _), kv_len = self.block_keys, q.shape, len(keys)
        whole = keys[: kv_len // size * size].float().unflatten(0, (-1, size)).transpose(1, 2)
        summaries, params = self.summary(whole), self.params(torch.arange(heads, device=q.device)[:, None])
        seen = torch.ones(heads, count, kv_len, dtype=torch.bool, device=q.device)
        for start in range(first - first % size, first + count, size):
            if start:
                rows = slice(max(start - first, 0), min(start + size - first, count))
                q_pos = torch.arange(first + rows.start, first + rows.stop, device=q.device)
                chosen = self.blocks(q[rows].float(), summaries[: start // size], q_pos, params)
                chosen = chosen.transpose(0, 1).repeat_interleave(size, 2)
                seen[:, rows, :start] = chosen.repeat_interleave(heads // len(chosen), 0)
        return seen

    def _fields(self) -> Iterator[tuple[Field[Any], Any]]:
        return ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling to a process that cannot import the rule's module by name: it reads the file."""
        if self._shard is not None:
            return AttentionRule.for_heads, self._shard
        kind = type(self)
        module: Any = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        if file is None or getattr(module, kind.__qualname__, None) is None:
            need, hint = "a class at the top level of a file, which other processes read", f"write it to FILE.py, as {self.name}"
            raise ConfigError(f"attention rule {self.name}", need, f"{kind.__module__}.{kind.__qualname__}", hint)
        return _again, (kind.__module__, file, kind.__qualname__, {field.name: value for field, value in self._fields()})

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, AttentionRule) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"

    __repr__ = __str__


def rule_of(given: AttentionRule | type[AttentionRule], parameters: Mapping[str, Any]) -> AttentionRule:
    """Return a rule with other values of its parameters. given: a rule, or a class whose other parameters have defaults.

    :raises ConfigError: if a parameter is unknown, or has neither a value nor a default.
    """
    if isinstance(given, AttentionRule) and parameters:
        parameters = {field.name: value for field, value in given._fields()} | dict(parameters)
        given = type(given)
    made = given if isinstance(given, AttentionRule) else given(**parameters)
    assert made.digest  # of the source as it was loaded, before the file changes
    return made


def _is_per_head(field: Field[Any]) -> bool:
    return str(field.type) == str(PerHead) or str(field.type).rpartition(".")[2] == "PerHead"


def _again(module: str, file: str, name: str, values: Mapping[str, Any]) -> AttentionRule:
    """Return an unpickled rule. file: file of its module, which is imported if the name stands for another module here."""
    found: Any = sys.modules.get(module)
    if found is None and module != "__main__":
        with suppress(ImportError):
            found = importlib.import_module(module)
    if getattr(found, "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(f"headway_rule_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        sys.path.append(str(Path(file).parent))
        spec.loader.exec_module(found)
    kind: Callable[..., AttentionRule] = getattr(found, name)
    return kind(**values)


def _fact(name: str, value: object) -> bytes:
    """Return a value as bytes that differ if it differs in another way than by its device."""
    if not isinstance(value, Tensor):
        return f"{name}={value!r};".encode()
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{name}={value.dtype}{tuple(value.shape)}".encode() + data


def _facts(kind: type) -> Iterator[bytes]:
    """Yield the sources of a rule's classes, and the functions and values outside of them that their functions use."""
    done = set[int]()
    for each in kind.__mro__[: kind.__mro__.index(AttentionRule)]:
        yield _source(each, kind.__name__)
        for function in vars(each).values():
            yield from _used(function.fget if isinstance(function, property) else function, kind.__name__, done)


def _used(function: object, owner: str, done: set[int]) -> Iterator[bytes]:
    """Yield the sources of the functions and the values that a function uses, of its module and of the functions around it."""
    if not isinstance(function, FunctionType) or id(function) in done:
        return
    done.add(id(function))
    around = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    for name in sorted(_names(function.__code__)):
        value = around.get(name, function.__globals__.get(name))
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            if id(value) not in done:
                yield _source(value, owner)
                yield from _used(value, owner, done)
        elif isinstance(value, type) and value.__module__ == function.__module__:
            if id(value) not in done and not issubclass(value, AttentionRule):
                done.add(id(value))
                yield _source(value, owner)
        elif isinstance(value, (int, float, str, bool, tuple, list, dict, Tensor)):
            yield _fact(name, value)


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inner))


def _source(of: Any, owner: str) -> bytes:
    """Return the source of a class or function. :raises ConfigError: if it has none."""
    try:
        return textwrap.dedent(inspect.getsource(of)).encode()
    except (OSError, TypeError):
        need, hint = "a class in a file, because its source identifies the rule", f"write it to FILE.py and pass FILE.py:{owner}"
        raise ConfigError(f"attention rule {owner}", need, f"{of.__name__} without source", hint) from None


_PLACES = {0, 1, 2, 511, 512, 4095, 4096, *(edge + by for edge in (16, 64, 128, 1024, 1 << 17) for by in (-1, 0, 1)), 1 << 19}
"""Positions at which a rule is checked: at the edges of blocks and tiles, and far ones."""
_NEAR = 8192
"""Number of positions from 0 at which one result after the other must be a number."""
_TOLERANCE = 1e-4
"""Relative difference of two calls that counts as rounding: torch rounds differently in vectors and single elements."""


def check_rule(rule: AttentionRule, num_heads: int, num_kv_heads: int, head_dim: int, longest: int) -> None:
    """Run a rule's functions on small and far positions, as a matrix, twice, and one query at a time with fewer heads and keys.

    longest: maximum length of a sequence in tokens.

    :raises ConfigError: if a function raises an exception, returns another shape or dtype or NaN, changes its arguments, or gives
        another result in another call. The message names the rule, the function, the position and the value.
    """
    checked = _CheckedRule(rule, num_heads)
    if not rule.parts:
        own = ", ".join(name for name in vars(type(rule)) if not name.startswith("_") and name != "name") or "none"
        raise checked.error("", f"a function out of {', '.join(PARTS)}", own)
    if not 0 <= rule.ahead <= longest or bool(rule.ahead) == rule.causal:
        need = f"ahead of 1 to {longest} with causal = False, or neither"
        raise checked.error("", need, f"ahead={rule.ahead}, causal={rule.causal}")
    for field, value in rule._fields():
        if _is_per_head(field) and len(value) != num_heads:
            raise checked.error(field.name, f"one number for each of {num_heads} heads", f"{len(value)} of them")
    places = sorted({place for place in _PLACES | {longest - 2, longest - 1} if 0 <= place < longest})
    for part in sorted(rule.parts - {"blocks"}):
        checked.check_elements(part, torch.tensor(places))
    if "blocks" in rule.parts:
        checked.check_blocks(num_kv_heads, head_dim)


class _CheckedRule:
    """A rule in `check_rule`."""

    def __init__(self, rule: AttentionRule, num_heads: int) -> None:
        self._rule = rule
        self._heads = num_heads
        self._random = torch.Generator().manual_seed(0)

    def error(self, part: str, need: str, got: str, hint: str = "") -> ConfigError:
        """Return the error of a part of the rule."""
        return ConfigError(f"attention rule {self._rule.name}" + f", {part}" * bool(part), need, got, hint)

    def check_elements(self, part: str, places: Tensor) -> None:
        """Check `score`, `mask` or `gate` with queries and keys at these positions."""
        heads, count = torch.arange(self._heads)[:, None, None], len(places)
        kind = torch.bool if part == "mask" else torch.float32
        scores = torch.randn(self._heads, count, count, generator=self._random) * 4
        found = self._call(part, kind, scores, places[:, None], places, heads)
        again = self._call(part, kind, scores, places[:, None], places, heads)
        self._compare(part, "the same in two calls", found, again, places, 0)
        for row in reversed(range(count)):  # one query by itself, with the keys that it sees
            head, keys = row % self._heads, slice(0, row + 1)
            one = slice(head, head + 1), slice(row, row + 1), keys
            alone = self._call(part, kind, scores[one], places[one[1], None], places[keys], heads[one[0]])
            need = "the same for a query by itself, without other queries, heads and later keys"
            self._compare(part, need, found[one], alone, places, row, head)
        self._check_numbers(part, found, places[:, None], places)
        near = torch.arange(min(int(places[-1]) + 1, _NEAR))
        for q_pos, k_pos in ((near[-1:, None], near), (near[:, None], near[:, None])):  # the last query, and each query's own key
            scores = torch.zeros(self._heads, len(q_pos), k_pos.shape[-1])
            self._check_numbers(part, self._call(part, kind, scores, q_pos, k_pos, heads), q_pos, k_pos)

    def _check_numbers(self, part: str, found: Tensor, q_pos: Tensor, k_pos: Tensor) -> None:
        """Check that results are numbers. A score may be -inf, as a mask's result."""
        bad = found.isnan() | ((found == torch.inf) if part == "score" else found.isinf())
        bad = bad & (k_pos <= q_pos)
        if bad.any():
            head, row, key = bad.nonzero()[0].tolist()
            need = "a number, or -inf for a key that is not seen" if part == "score" else "a number"
            at = f"q_pos={q_pos[row, 0]}, k_pos={k_pos.expand(found.shape[1:])[row, key]}, head={head}"
            raise self.error(part, need, f"{found[head, row, key]:g} at {at}")

    def _call(self, part: str, kind: torch.dtype, scores: Tensor, q_pos: Tensor, k_pos: Tensor, heads: Tensor) -> Tensor:
        """Return the result of a function in the shape of the scores."""
        rule = self._rule
        k_pos = torch.minimum(k_pos, q_pos.clamp(min=rule.ahead - 1))
        kept = [*([scores] if part == "score" else []), q_pos, k_pos, heads]
        given = [each.clone() for each in kept]
        try:
            found = getattr(rule, part)(*[*given, rule.params(heads)])
        except Exception as error:  # any exception of a user's function
            if scores.numel() > 1:  # the first element that raises it
                for head, row, key in torch.ones_like(scores).nonzero().tolist():
                    one = scores[head, row, key].view(1, 1, 1)
                    self._call(part, kind, one, q_pos[row : row + 1], k_pos[row : row + 1, key : key + 1], heads[head : head + 1])
            at = f"q_pos={q_pos.max()}, k_pos={k_pos.max()}, head={heads.max()}"
            got = f"{type(error).__name__} at {at}: {' '.join(str(error).split())}"
            outside = "out of bounds" in str(error)
            hint = "max_len states a rule's positions; the check of a table by head needs --model" if outside else ""
            raise self.error(part, "no exception", got, hint) from error
        if not isinstance(found, Tensor) or found.dtype != kind:
            got = str(found.dtype) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise self.error(part, f"a tensor of {kind}", got)
        try:
            whole = found.expand(scores.shape)
        except RuntimeError:
            need = f"a shape that broadcasts to {list(scores.shape)} (heads, queries, keys)"
            raise self.error(part, need, f"{list(found.shape)}") from None
        if not all(map(torch.equal, given, kept)):
            raise self.error(part, "arguments left as they are", "changed arguments", "use functions without a trailing _")
        return whole

    def _compare(
        self, part: str, need: str, found: Tensor, other: Tensor, places: Tensor, first: int, first_head: int = 0
    ) -> None:
        """Check that two results are equal but for rounding. first, first_head: query and head of the first element."""
        kind = found.dtype.is_floating_point
        near = torch.isclose(found, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) if kind else found == other
        if not near.all():
            head, row, key = (~near).nonzero()[0].tolist()
            one, two = (each[head, row, key].item() for each in (found, other))
            values = f"{one:.6g} and {two:.6g}" if kind else f"{one} and {two}"
            raise self.error(part, need, f"{values} at {self._place(places, head + first_head, row + first, key)}")

    def _place(self, places: Tensor, head: int, row: int, key: int) -> str:
        query = int(places[row])
        return f"q_pos={query}, k_pos={min(int(places[key]), max(query, self._rule.ahead - 1))}, head={head}"

    def check_blocks(self, num_kv_heads: int, head_dim: int) -> None:
        """Check `summary` and `blocks`: queries of block 5 together and one at a time, and queries of the blocks before it."""
        size, before = self._rule.block_keys, 5
        if size < 1:
            raise self.error("block_keys", "at least 1", str(size))
        shapes = (min(size, 8), self._heads, head_dim), (num_kv_heads, before, size, head_dim)
        q, keys = (torch.randn(shape, generator=self._random) for shape in shapes)
        q_pos, summaries = torch.arange(len(q)) + before * size, self._rule.summary(keys.transpose(0, 1))
        if summaries.shape != (before, num_kv_heads, head_dim) or not summaries.isfinite().all():
            raise self.error("summary", f"finite numbers {[before, num_kv_heads, head_dim]}", f"{list(summaries.shape)}")
        found, again = (self._chosen(q, summaries, q_pos) for _ in range(2))
        alone = torch.cat([self._chosen(q[n : n + 1], summaries, q_pos[n : n + 1]) for n in range(len(q))])
        for need, other in (("the same in two calls", again), ("the same for a query by itself", alone)):
            if not torch.equal(found, other):
                row, head, block = (found != other).nonzero()[0].tolist()
                got = f"{bool(found[row, head, block])} and {bool(other[row, head, block])}"
                raise self.error("blocks", need, f"{got} at q_pos={q_pos[row]}, block={block}, head={head}")
        for blocks in range(1, before):
            self._chosen(q, summaries[:blocks], q_pos - (before - blocks) * size)

    def _chosen(self, q: Tensor, summaries: Tensor, q_pos: Tensor) -> Tensor:
        """Return the result of `blocks`."""
        try:
            found = self._rule.blocks(q, summaries, q_pos, self._rule.params(torch.arange(self._heads)[:, None]))
        except Exception as error:  # any exception of a user's function
            got = f"{type(error).__name__} at q_pos={q_pos[0]}, with {len(summaries)} blocks: {' '.join(str(error).split())}"
            raise self.error("blocks", "no exception", got) from error
        shapes = [(len(q), heads, len(summaries)) for heads in (self._heads, summaries.shape[1], 1)]
        if not isinstance(found, Tensor) or found.dtype != torch.bool or tuple(found.shape) not in shapes:
            got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise self.error("blocks", f"torch.bool {list(shapes[0])} (queries, heads, blocks)", got)
        return found
