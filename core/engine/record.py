"""Records of steps: plain data and tensors in one safetensors file, and their comparison with float64, on any machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPES, KV_DTYPES, AttentionSpec
from headway.core.contract.state import StateParameters, StateSpec
from headway.core.oracle.oracle import attend
from headway.core.oracle.state_cases import gate_shapes
from headway.core.oracle.state_reference import SequenceState, advance
from headway.core.system.json_text import JsonError, parse_model
from headway.core.system.provenance import Origin

SCHEMA = "headway.record/1"
FACTOR = 8.0
"""Factor on a kernel's tolerance for one row of one head, whose error varies more than the error of a whole output. It applies
again to latent layers, whose absorbed queries and outputs are rounded too."""
CACHED = {torch.float32: 0.01, torch.float16: 0.4, torch.bfloat16: 0.6}
"""Maximum relative error of cached rows and states, which include the rounding of all lower layers."""
_QUANTIZED = 0.35
STATE_PARTS = ("recurrent", "conv")
WEIGHTS = tuple(each.name for each in fields(StateParameters) if each.init)
_PROJECTIONS = 8
_TILE = 64  # Number of rows of an output to store if all rows do not fit
_HEADER, _PLAIN = 120, 180  # Approximate bytes of a tensor's entry in the header of a file, and of the plain data of a call
_HINT = "write it again, and copy the whole file"

S = TypeVar("S", AttentionSpec, StateSpec)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class RecordedStep(_Part):
    """Lengths and kernels of one step, or of a prompt whose own steps are no longer in the ring."""

    sequences: list[int]
    """Index in `RecordMeta.sequences` of each sequence; -1 if its blocks have been overwritten."""
    rows: list[int]
    query_lens: list[int]
    context_lens: list[int]
    num_draft_tokens: list[int]
    state_slots: list[int]
    backends: list[str]
    """Names of the backends; "" for the usual one, which runs prompts again."""
    graph: bool


class RecordedSequence(_Part):
    """One sequence whose blocks are intact. Its block tables are the tensors table.GROUP.SEQUENCE."""

    request_id: str
    completion: int
    seed: int
    row: int
    num_tokens: int
    wrong_block: tuple[int, int, int, int] | None
    """First block in the executor's table that the scheduler did not assign: (cache group, index, block, assigned block)."""
    token_ids: list[int]
    """Empty without record_text."""


class RecordedLayer(_Part):
    """An attention or state layer. A record lists layers in the order in which the model calls them."""

    kind: Literal["attention", "state"]
    layer: int
    """Index among the layers of its kind."""
    spec: dict[str, Any]
    layout: str
    group: int = 0

    @property
    def group_size(self) -> int:
        """Number of query heads per kv head; 1 for states."""
        return int(self.spec["num_heads"]) // int(self.spec["num_kv_heads"]) if self.kind == "attention" else 1


class HeldRows(_Part):
    """Cached rows of one sequence in one layer. Tensors: key, value and digests of the reference's key and value."""

    place: int
    """Index of the layer in `RecordMeta.layers`."""
    sequence: int
    first: int
    """First position that is held; pages before it have left the window."""
    first_head: int = 0
    """First kv head that is held."""

    @property
    def key(self) -> str:
        """Prefix of the names of the tensors, which begin with the place."""
        return f"{self.place}.held.{self.sequence}"


class RecordedCall(_Part):
    """Rows of one sequence in one call of a layer. Tensors: q and out; x, gates, states and out for a layer with a state."""

    place: int
    step: int
    again: int
    """Number of earlier calls of the layer in the step."""
    sequence: int
    context: int
    """Number of tokens before the first recorded row."""
    first_row: int = 0
    phase: Phase
    backend: str
    allowed: float
    """Maximum error of a row of a head."""

    @property
    def key(self) -> str:
        """Prefix of the names of the tensors, which begin with the place."""
        return f"{self.place}.call.{self.step}.{self.again}.{self.sequence}"


class Checked(_Part):
    """Largest error of one layer in one phase, or in its cache."""

    place: int
    phase: str
    backend: str
    error: float
    allowed: float


class RecordMeta(_Part):
    """Plain data of a record."""

    origin: Origin
    torch: str
    device: str
    model: str
    dtype: str
    block_size: int
    reason: str
    time: str
    notes: list[str] = []
    """Parts that the record lacks, and why."""
    layers: list[RecordedLayer] = []
    sequences: list[RecordedSequence] = []
    steps: list[RecordedStep] = []
    calls: list[RecordedCall] = []
    held: list[HeldRows] = []
    checked: list[Checked] = []
    """Results when the file was written, including layers whose tensors the file does not hold."""


class Difference(NamedTuple):
    """First row of a head with a wrong result."""

    place: int
    step: int
    """Index of the step; -1 for cached rows."""
    sequence: int
    kv_head: int
    head: int
    """Query head, or head of a state. For cached rows, the first query head that reads them."""
    row: int
    position: int
    what: str
    error: float
    allowed: float


class Run(NamedTuple):
    """Output of one call."""

    backend: str
    out: Tensor
    allowed: float


class CallRows(NamedTuple):
    """Inputs of one attention call, for the heads that are held."""

    spec: AttentionSpec
    q: Tensor
    keys: Tensor
    """float64, with the cache's scales applied, as are `values`."""
    values: Tensor
    context: int
    """Number of keys before the first query."""
    first_head: int


@dataclass
class Record:
    """Plain data and tensors of some steps."""

    meta: RecordMeta
    tensors: dict[str, Tensor] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device that computes the reference."""

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        text, tensors = self.meta.model_dump_json(), {name: each.contiguous() for name, each in self.tensors.items()}
        tensors = tensors or {"none": torch.zeros(1)}
        return save(tensors, {"schema": SCHEMA, "record": text, "digest": _digest(text, tensors)})

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record in a file. :raises ConfigError: if it is not a record, is damaged, or has another version."""
        what = f"record {path}"
        try:
            with safe_open(path, "pt") as file:
                found = file.metadata() or {}
                if found.get("schema") != SCHEMA:
                    got = repr(found.get("schema"))[:80]
                    raise ConfigError(what, f"a file of schema {SCHEMA}", got, "replay it with the version that wrote it")
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            if found.get("digest") != _digest(found.get("record", ""), tensors):
                raise ConfigError(what, "the content that was written", "an edited file, whose digest differs", _HINT)
            return cls(parse_model(found["record"], RecordMeta, what, any_number=True), tensors)
        except (OSError, SafetensorError) as error:
            got = "a truncated file, or one of another kind" if path.is_file() else "no file"
            raise ConfigError(what, "a file that the flight recorder wrote", got, _HINT) from error
        except JsonError as error:
            raise ConfigError(what, f"plain data of schema {SCHEMA}", error.reason.got, _HINT) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            got = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ConfigError(what, f"plain data of schema {SCHEMA}", got, _HINT) from error

    def spec(self, place: int) -> AttentionSpec:
        """Return the spec of an attention layer. :raises ConfigError: if it is invalid."""
        return _spec_of(AttentionSpec, self.meta.layers[place].spec)

    def rows(self, call: RecordedCall, held: HeldRows | None) -> CallRows | None:
        """Return what an attention call computes; None if the cached rows that it reads are not held."""
        if held is None:
            return None
        spec, q = self.spec(call.place), self.tensors[f"{call.key}.q"]
        if spec.sliding_window is not None and max(call.context - spec.sliding_window + 1, 0) < held.first:
            return None
        end = call.context + len(q) - held.first
        keys, values = (self.tensors[f"{held.key}.{name}"][:end].to(self.device).double() for name in ("key", "value"))
        heads, first = keys.shape[1] * spec.group_size, held.first_head * spec.group_size
        slopes, sinks = (None if each is None else each[first : first + heads] for each in (spec.alibi_slopes, spec.sinks))
        part = replace(
            spec, num_heads=heads, num_kv_heads=keys.shape[1], alibi_slopes=slopes, sinks=sinks, k_scale=1.0, v_scale=1.0
        )
        keys, values = keys * spec.k_scale, values * spec.v_scale
        return CallRows(part, q.to(self.device), keys, values, call.context - held.first, held.first_head)

    def judge(self, runs: Mapping[str, Run] | None = None) -> tuple[list[Checked], Difference | None]:
        """Compare outputs, cached rows and states with float64. Return the largest errors and the first difference.

        runs: results of another backend by the key of their call. None means the recorded results.
        """
        found: dict[tuple[int, str, str], Checked] = {}
        differences = []
        for phase, backend, errors, of in self._errors(runs):
            worst = float(errors.max()) if errors.numel() else 0.0
            new = Checked(place=of.place, phase=phase, backend=backend, error=worst, allowed=of.allowed)
            known = found.setdefault((of.place, phase, backend), new)
            known.error = max(known.error, worst)
            for row, column in (errors > of.allowed).nonzero()[:1].tolist():
                group, output = self.meta.layers[of.place].group_size, of.what == "output"
                head = column + of.kv_head * group if output else (column + of.kv_head) * group
                at = of._replace(row=of.row + row, position=of.position + row, head=head, kv_head=head // group)
                differences.append(at._replace(error=float(errors[row, column])))
        first = min(differences, key=lambda each: (each.place, each.step, each.sequence, each.row), default=None)
        return sorted(found.values(), key=lambda each: each.place), first

    def _errors(self, runs: Mapping[str, Run] | None) -> Iterator[tuple[str, str, Tensor, Difference]]:
        """Yield (phase, backend, errors [rows, heads], difference of row 0 and head 0) of each check."""
        held = {(each.place, each.sequence): each for each in self.meta.held}
        for each in self.meta.held if runs is None else ():
            spec = self.spec(each.place)
            limit = max(CACHED[spec.dtype], _QUANTIZED if spec.cache_dtype != spec.dtype else 0.0)
            for name, scale in (("key", spec.k_scale), ("value", spec.v_scale)):
                if (right := self.tensors.get(f"{each.key}.{name}_digest")) is not None:
                    errors = _row_errors(row_digest(self.tensors[f"{each.key}.{name}"].float() * scale), right.double())
                    head, what = each.first_head, f"cached {name}"
                    yield "cache", "", errors, Difference(each.place, -1, each.sequence, head, 0, 0, each.first, what, 0.0, limit)
        for call in self.meta.calls:
            if runs is not None and call.key not in runs:
                continue
            run = Run(call.backend, self.tensors[f"{call.key}.out"], call.allowed) if runs is None else runs[call.key]
            of = Difference(call.place, call.step, call.sequence, 0, 0, call.first_row, call.context, "output", 0.0, run.allowed)
            if self.meta.layers[call.place].kind == "state":
                yield from self._state_errors(call, run.out, of)
            elif (given := self.rows(call, held.get((call.place, call.sequence)))) is not None:
                right = attend(given.spec, given.q[:, : given.spec.num_heads], given.keys, given.values, given.context)[0]
                errors = _row_errors(run.out[:, : given.spec.num_heads].to(right.device), right)
                yield call.phase.value, run.backend, (errors - _slack(given)).clamp_min(0), of._replace(kv_head=given.first_head)

    def _state_errors(self, call: RecordedCall, out: Tensor, of: Difference) -> Iterator[tuple[str, str, Tensor, Difference]]:
        spec = _spec_of(StateSpec, self.meta.layers[call.place].spec)
        parameters = StateParameters(**{name: self.tensors.get(f"{call.place}.weight.{name}") for name in WEIGHTS})
        x, *gates = (
            self.tensors[f"{call.key}.{name}"].double() for name in ("x", *(f"gate{n}" for n in range(len(gate_shapes(spec)))))
        )
        before = [self.tensors.get(f"{call.key}.before.{name}") for name in STATE_PARTS]
        state = SequenceState(*(None if part is None else part.double() for part in before))
        right = torch.stack([advance(spec, parameters, x[row], [gate[row] for gate in gates], state) for row in range(len(x))])
        heads = (-1, spec.num_heads, spec.value_dim) if spec.recurrent else (-1, 1, spec.conv_channels)
        yield call.phase.value, call.backend, _row_errors(out.view(heads), right.view(heads)), of
        last = of._replace(position=call.context + len(x) - 1, allowed=CACHED[spec.dtype])
        for name, expected in zip(STATE_PARTS, (state.recurrent, state.conv), strict=True):
            found = self.tensors.get(f"{call.key}.found.{name}")
            if found is not None and expected is not None:
                shape = (spec.num_heads if name == "recurrent" else 1, 1, -1)
                errors = _row_errors(found.reshape(shape), expected.reshape(shape)).T  # small heads are held to the usual head
                yield "cache", "", errors, last._replace(what=f"{name} state")

    def shorten(self, first: Difference | None, most: int) -> None:
        """Keep the tensors of the first differing layer, then of as many layers as `most` bytes hold.

        If a layer is too large, only the differing sequence is kept, or one kv head and some rows of it.
        """
        first = first or Difference(0, -1, 0, 0, 0, 0, 0, "", 0.0, 0.0)
        by_place: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            by_place[name.split(".")[0]][name] = tensor
        self.tensors = by_place.pop("table", {})
        left = most - len(self.meta.model_dump_json(exclude={"calls", "held"})) - _size(self.tensors)
        calls, held = self.meta.calls, self.meta.held
        self.meta.calls = []
        self.meta.held = []
        shortened = False
        for place in sorted(range(len(self.meta.layers)), key=lambda place: (place != first.place, place)):
            tensors = by_place[str(place)]
            own_calls = [each for each in calls if each.place == place]
            own_held = [each for each in held if each.place == place]
            if _size(tensors) + _PLAIN * len(own_calls) > left:
                own_calls = [each for each in own_calls if each.sequence == first.sequence and first.step in (-1, each.step)]
                own_held = [each for each in own_held if each.sequence == first.sequence]
                keys = (*(f"{each.key}." for each in own_calls), *(f"{each.key}." for each in own_held))
                tensors = {name: each for name, each in tensors.items() if name.startswith((*keys, f"{place}.weight."))}
                if _size(tensors) > left and own_held:
                    tensors = _narrowed(tensors, own_calls, own_held, first, self.meta.layers[place].group_size)
                note = f"from layer {place} on, the file holds only sequence {first.sequence}, in part"
                self.meta.notes += [] if shortened else [note]
                shortened = True
            size = _size(tensors) + _PLAIN * (len(own_calls) + len(own_held))
            if size <= left:
                left -= size
                self.tensors |= tensors
                self.meta.calls += own_calls
                self.meta.held += own_held


def _narrowed(
    tensors: Mapping[str, Tensor], calls: Sequence[RecordedCall], held: Sequence[HeldRows], first: Difference, group: int
) -> dict[str, Tensor]:
    """Return the tensors of one attention layer with only the kv head and the tile of rows of a difference."""
    found: dict[str, Tensor] = {}
    head = min([first.kv_head, *(tensors[f"{rows.key}.key"].shape[1] - 1 for rows in held)])
    heads = slice(head * group, (head + 1) * group)
    for rows in held:
        rows.first_head = head
        found |= {name: each[:, head, None] for name, each in tensors.items() if name.startswith(f"{rows.key}.")}
    for call in calls:
        start = first.row // _TILE * _TILE if len(tensors[f"{call.key}.q"]) > first.row else 0
        for name in ("q", "out"):
            found[f"{call.key}.{name}"] = tensors[f"{call.key}.{name}"][start : start + _TILE, heads]
        call.first_row = start
        call.context += start
    return found


def _slack(given: CallRows) -> Tensor:
    """Return the error of each row and head, [rows, heads], that results from float32 scores: it grows with the scores."""
    longest = given.keys.norm(dim=-1).amax(0).repeat_interleave(given.spec.group_size)
    scores = given.q[:, : given.spec.num_heads].double().norm(dim=-1) * longest * abs(given.spec.scale)
    slack: Tensor = 4 * torch.finfo(torch.float32).eps * scores
    return slack.nan_to_num(0.0, 0.0)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(each.nbytes + _HEADER for each in tensors.values())


def _row_errors(found: Tensor, right: Tensor) -> Tensor:
    """Return the error of each row and head, [rows, heads], relative to the size of the row or, if larger, of a usual row.

    found, right: [rows, heads, elements]. The error of a result that is not finite is infinite.
    """
    sizes = right.norm(dim=-1)
    sizes = torch.maximum(sizes, sizes.square().mean(0).sqrt()).clamp_min(1e-30)
    errors: Tensor = (found.double() - right).norm(dim=-1) / sizes
    return errors.nan_to_num(torch.inf, torch.inf)


def row_digest(rows: Tensor) -> Tensor:
    """Return float32 [rows, heads, 8]: products with fixed vectors of signs, whose distance estimates the distance of rows."""
    signs = numpy.random.RandomState(rows.shape[-1]).randint(0, 2, (rows.shape[-1], _PROJECTIONS)) * 2 - 1
    digest: Tensor = rows.float() @ torch.from_numpy(signs).float().to(rows.device)
    return digest


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(text.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


_ALL_DTYPES = {**DTYPES, **KV_DTYPES}


def plain_spec(spec: AttentionSpec | StateSpec) -> dict[str, Any]:
    """Return the fields of a spec as plain data. The device is left out, and the level of invariance: replay allows rounding."""
    plain = {each.name: getattr(spec, each.name) for each in fields(spec) if each.name not in ("device", "invariance")}
    names = {dtype: name for name, dtype in _ALL_DTYPES.items()}
    return {name: names[value] if isinstance(value, torch.dtype) else value for name, value in plain.items()}


def _spec_of(kind: type[S], plain: Mapping[str, Any]) -> S:
    """Return the spec that `plain_spec` describes. :raises ConfigError: if it is invalid."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    try:
        dtypes = {name: _ALL_DTYPES[given[name]] for name in ("dtype", "kv_dtype", "state_dtype") if given.get(name) is not None}
        return kind(**{**given, **dtypes})
    except (AssertionError, KeyError, TypeError) as error:
        raise ConfigError("record", f"the fields of {kind.__name__}", str(error), _HINT) from error
