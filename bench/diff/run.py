"""The comparison: B generates. A is compared with B for the q, k and v of B's run, and again in a separate run of A."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from headway.bench.diff.results import Error, Flip, LayerDiff, PhaseDiff, size
from headway.bench.diff.sides import DiffStep, Side, SideRun
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.metadata import Phase
from headway.core.contract.model import Attention, AttentionFunctions, Model, state_layers

MAX_FLIPS = 20
"""Maximum number of flipped tokens to list; all flipped tokens are counted."""


class RelativeErrors:
    """||a - b|| / ||b|| of each layer and head over all added tokens, in float64, accumulated on the tensors' device."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, layer: int, a: Tensor, b: Tensor) -> None:
        """Add outputs of a layer. a, b: [num_tokens, heads, dim]."""
        a, b = a.double(), b.double()
        sums = torch.stack([(a - b).square().sum((0, 2)), b.square().sum((0, 2))])  # [2, heads]
        self._sums[layer] = self._sums[layer] + sums if layer in self._sums else sums

    def layers(self) -> list[int]:
        """Return the indices of the layers that were added."""
        return sorted(self._sums)

    def heads(self, layer: int) -> list[Error]:
        """Return the relative error of each head of a layer."""
        return [_relative(*pair) for pair in self._sums[layer].T.tolist()]

    def whole(self, layer: int) -> Error:
        """Return the relative error of all heads together."""
        return _relative(*self._sums[layer].sum(1).tolist())


class NextTokens:
    """Greedy tokens and distributions of two sides' logits, by position."""

    def __init__(self) -> None:
        self.positions = 0
        self.flipped = 0
        self.flips: list[Flip] = []
        self.logits = RelativeErrors()
        self._kl_sum = 0.0
        self._kl_max = 0.0

    def add(self, a: Tensor, b: Tensor, places: list[tuple[int, int]]) -> None:
        """Add logits. a, b: [rows, vocab_size]. places: prompt and position of each row."""
        self.logits.add(0, a[:, None], b[:, None])
        a, b = a.double(), b.double()
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl = (log_a.exp() * (log_a - log_b)).sum(-1).clamp_min(0)  # rounding may make it slightly negative
        self.positions += len(places)
        self._kl_sum += float(kl.sum())
        largest = float(kl.max())
        self._kl_max = largest if math.isnan(largest) else max(self._kl_max, largest)
        tokens_a, tokens_b = a.argmax(-1), b.argmax(-1)
        rows = (tokens_a != tokens_b).nonzero().flatten().tolist()
        self.flipped += len(rows)
        for row in rows[: MAX_FLIPS - len(self.flips)]:
            token_a, token_b = int(tokens_a[row]), int(tokens_b[row])
            gap = _number(float(b[row, token_b] - b[row, token_a]))
            prompt, position = places[row]
            near = _number(float(kl[row]))
            self.flips.append(Flip(prompt=prompt, position=position, token_a=token_a, token_b=token_b, gap=gap, kl=near))

    @property
    def flip_rate(self) -> float:
        """Fraction of positions with different greedy tokens."""
        return self.flipped / self.positions

    @property
    def kl_mean(self) -> Error:
        """Mean KL divergence in nats."""
        return _number(self._kl_sum / self.positions)

    @property
    def kl_max(self) -> Error:
        """Largest KL divergence of a position in nats."""
        return _number(self._kl_max) if self.kl_mean is not None else None


def first_beyond(errors: list[Error], tolerance: float) -> int | None:
    """Return the first index whose error exceeds the tolerance or is not finite."""
    return next((index for index, error in enumerate(errors) if size(error) > tolerance), None)


def _relative(difference: float, expected: float) -> Error:
    """Return the relative error from sums of squares. If `expected` is zero, return 0 for no difference, else None."""
    if difference == 0:
        return 0.0
    return _number(math.sqrt(difference / expected)) if expected else None


def _number(value: float) -> Error:
    return value if math.isfinite(value) else None


BATCH = 16
"""Number of prompts per batch."""
_LOGIT_ROWS = 64
"""Number of positions whose logits are computed at a time, since vocabularies are large."""


class _Phase:
    """Statistics accumulated over one phase."""

    def __init__(self) -> None:
        self.forced = RelativeErrors()
        self.free = RelativeErrors()
        self.hidden = RelativeErrors()
        self.next = NextTokens()


class _Twin:
    """Attention that returns B's result and compares A's result for the same q, k and v with it. Stores B's results of the
    step."""

    def __init__(self, a: SideRun, b: SideRun, counted: RelativeErrors) -> None:
        self._a = a
        self._b = b
        self._counted = counted
        self.answers: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        answer = self.answers[layer] = self._b(layer, q, k, v)
        self._counted.add(layer, self._a(layer, q, k, v), answer)
        return answer.to(q.dtype)


class _FreeRun:
    """Attention that returns A's result and compares it with the result from B's run."""

    def __init__(self, a: SideRun, answers: dict[int, Tensor], counted: RelativeErrors) -> None:
        self._a = a
        self._answers = answers
        self._counted = counted

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        answer = self._a(layer, q, k, v)
        self._counted.add(layer, answer, self._answers[layer])
        return answer.to(q.dtype)


def check_prompts(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """:raises PromptError: if a prompt is empty or leaves no room for max_tokens."""
    most = model.max_position_embeddings - max_tokens
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= most:
            need = f"1 to {most} tokens ({model.max_position_embeddings} positions, {max_tokens} for the output)"
            raise PromptError(f"prompt {number}", need, f"{len(prompt)} tokens", "shorten it or lower --max-tokens")


def num_steps(prompts: Sequence[Sequence[int]], max_tokens: int, extend: bool) -> int:
    """Return the number of times that `compare` calls `advance`."""
    batches = [prompts[first : first + BATCH] for first in range(0, len(prompts), BATCH)]
    return sum(sum(1 for _ in _steps(list(map(len, batch)), max_tokens, extend)) for batch in batches)


@torch.inference_mode()
def compare(
    model: Model,
    a: Side,
    b: Side,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    extend: bool = True,
    advance: Callable[[], None] = lambda: None,
    model_a: Model | None = None,
) -> list[PhaseDiff]:
    """Compare A with B on the prompts and on B's `max_tokens` greedy tokens after each prompt, for each phase that occurs.
    model_a: model for A's own run, of the same shape with other weights; None means `model`. extend: split prompts of at least
    three tokens in two, so that the second chunk has a cached context.
    :raises ConfigError: if the model has state layers.
    :raises PromptError: if a prompt is empty or too long.
    :raises BackendError: if a backend raised an error.
    """
    if states := state_layers(model):
        raise ConfigError("headway diff", "a model of attention layers alone", f"layers with a state: {states[0].spec}")
    check_prompts(model, prompts, max_tokens)
    model_a = model if model_a is None else model_a
    counted: dict[Phase, _Phase] = {}
    for first in range(0, len(prompts), BATCH):
        tokens = [list(prompt) for prompt in prompts[first : first + BATCH]]
        lens = [len(row) for row in tokens]
        most = [length + max_tokens for length in lens]
        forced, leader, free = a.open(most), b.open(most), a.open(most)
        for step in _steps(lens, max_tokens, extend):
            phase = counted.setdefault(step.phase, _Phase())
            forced.begin(step)
            leader.begin(step)
            twin = _Twin(forced, leader, phase.forced)
            hidden_b = _forward(model, tokens, step, AttentionFunctions(twin))
            free.begin(step)  # not earlier: the backend instances are shared with `forced` and may keep only one plan
            hidden_a = _forward(model_a, tokens, step, AttentionFunctions(_FreeRun(free, twin.answers, phase.free)))
            phase.hidden.add(0, hidden_a[:, None], hidden_b[:, None])
            greedy = _logits(model_a, model, hidden_a, hidden_b, step, phase.next, first)
            ends = accumulate(step.query_lens)
            for row, context, query, end in zip(step.rows, step.context_lens, step.query_lens, ends, strict=True):
                if context + query == len(tokens[row]) < most[row]:
                    tokens[row].append(greedy[end - 1])
            advance()
    return [_summary(phase, counted[phase], a, b) for phase in Phase if phase in counted]


def _steps(lens: Sequence[int], max_tokens: int, extend: bool) -> Iterator[DiffStep]:
    """Yield the steps: prompts or their first halves, the second halves, then one token per sequence at a time."""
    first_lens = [length // 2 if extend and length > 2 else length for length in lens]
    yield DiffStep(Phase.PREFILL, range(len(lens)), first_lens, [0] * len(lens))
    rest = [row for row, length in enumerate(lens) if first_lens[row] < length]
    if rest:
        yield DiffStep(Phase.EXTEND, rest, [lens[row] - first_lens[row] for row in rest], [first_lens[row] for row in rest])
    for number in range(max_tokens):
        yield DiffStep(Phase.DECODE, range(len(lens)), [1] * len(lens), [length + number for length in lens])


def _forward(model: Model, tokens: list[list[int]], step: DiffStep, attention: Attention) -> Tensor:
    device = model.attention_specs[0].device
    ids: list[int] = []
    positions: list[int] = []
    for row, context, query in zip(step.rows, step.context_lens, step.query_lens, strict=True):
        ids += tokens[row][context : context + query]
        positions += range(context, context + query)
    return model(torch.tensor(ids, device=device), torch.tensor(positions, device=device), attention)


def _logits(
    model_a: Model, model_b: Model, hidden_a: Tensor, hidden_b: Tensor, step: DiffStep, counted: NextTokens, first: int
) -> list[int]:
    """Add the logits of all positions of a step to `counted`. Return B's greedy token after each position."""
    shares = zip(step.rows, step.context_lens, step.query_lens, strict=True)
    places = [(first + row, context + n) for row, context, query in shares for n in range(query)]
    greedy: list[int] = []
    for start in range(0, len(places), _LOGIT_ROWS):
        rows = slice(start, start + _LOGIT_ROWS)
        a, b = model_a.compute_logits(hidden_a[rows]), model_b.compute_logits(hidden_b[rows])
        counted.add(a, b, places[rows])
        greedy += b.argmax(-1).tolist()
    return greedy


def _summary(phase: Phase, counted: _Phase, a: Side, b: Side) -> PhaseDiff:
    layers = [
        LayerDiff(
            layer=layer,
            relative_error=counted.forced.whole(layer),
            heads=counted.forced.heads(layer),
            free_running=counted.free.whole(layer),
        )
        for layer in counted.forced.layers()
    ]
    tolerance = a.tolerance(phase) + b.tolerance(phase)
    return PhaseDiff(
        phase=phase,
        backend_a=a.backend(phase),
        backend_b=b.backend(phase),
        kernel_a=a.kernel(phase),
        kernel_b=b.kernel(phase),
        tokens=counted.next.positions,
        tolerance=tolerance,
        layers=layers,
        first_beyond=first_beyond([layer.relative_error for layer in layers], tolerance),
        hidden_error=counted.hidden.whole(0),
        logits_error=counted.next.logits.whole(0),
        flip_rate=counted.next.flip_rate,
        flips=counted.next.flips,
        kl_mean=counted.next.kl_mean,
        kl_max=counted.next.kl_max,
    )
