"""Runs the comparison: side B writes, side A is held against it on B's q, k and v, and once more on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from headway.bench.diff.measures import NextTokens, RelativeErrors, first_beyond
from headway.bench.diff.results import LayerDiff, PhaseDiff
from headway.bench.diff.sides import DiffStep, Side, SideRun
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.metadata import Phase
from headway.core.contract.model import Attention, AttentionFunctions, Model, state_layers

BATCH = 16
"""Prompts in one batch; their steps run together."""
_LOGIT_ROWS = 64
"""Positions whose logits are held at a time: a vocabulary is large."""


class _Phase:
    """What is counted in one phase."""

    def __init__(self) -> None:
        self.forced = RelativeErrors()
        self.free = RelativeErrors()
        self.hidden = RelativeErrors()
        self.next = NextTokens()


class _Twin:
    """Attends with B; A attends to the same q, k and v beside it. Keeps B's answers of the step."""

    def __init__(self, a: SideRun, b: SideRun, counted: RelativeErrors) -> None:
        self._a = a
        self._b = b
        self._counted = counted
        self.answers: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        answer = self.answers[layer] = self._b(layer, q, k, v)
        self._counted.add(layer, self._a(layer, q, k, v), answer)
        return answer.to(q.dtype)


class _Lone:
    """Attends with A alone; its answers are held against those of B's run."""

    def __init__(self, a: SideRun, answers: dict[int, Tensor], counted: RelativeErrors) -> None:
        self._a = a
        self._answers = answers
        self._counted = counted

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        answer = self._a(layer, q, k, v)
        self._counted.add(layer, answer, self._answers[layer])
        return answer.to(q.dtype)


def check_prompts(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """:raises PromptError: a prompt is empty or has no room for max_tokens more."""
    most = model.max_position_embeddings - max_tokens
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= most:
            need = f"1 to {most} tokens ({model.max_position_embeddings} positions, {max_tokens} for the output)"
            raise PromptError(f"prompt {number}", need, f"{len(prompt)} tokens", "shorten it or lower --max-tokens")


def num_steps(prompts: Sequence[Sequence[int]], max_tokens: int, extend: bool) -> int:
    """How often `compare` will call `advance`."""
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
    """Hold A against B on the prompts and on B's `max_tokens` greedy tokens after each, for each phase that occurs.

    model_a: what A runs on its own, of the same shape with other weights; None: the model of both.
    extend: cut prompts of three tokens and more in two, so that the later chunk attends to a cached context.

    :raises ConfigError: the model's layers keep states.
    :raises PromptError: a prompt is empty or too long.
    :raises BackendError: a backend raised.
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
            free.begin(step)  # only now: the backend's instances are those of `forced`, and may keep a plan to themselves
            hidden_a = _forward(model_a, tokens, step, AttentionFunctions(_Lone(free, twin.answers, phase.free)))
            phase.hidden.add(0, hidden_a[:, None], hidden_b[:, None])
            greedy = _logits(model_a, model, hidden_a, hidden_b, step, phase.next, first)
            ends = accumulate(step.query_lens)
            for row, context, query, end in zip(step.rows, step.context_lens, step.query_lens, ends, strict=True):
                if context + query == len(tokens[row]) < most[row]:
                    tokens[row].append(greedy[end - 1])
            advance()
    return [_summary(phase, counted[phase], a, b) for phase in Phase if phase in counted]


def _steps(lens: Sequence[int], max_tokens: int, extend: bool) -> Iterator[DiffStep]:
    """Prompts, whole or their first halves; the second halves; then one token of each sequence at a time."""
    cut = [length // 2 if extend and length > 2 else length for length in lens]
    yield DiffStep(Phase.PREFILL, range(len(lens)), cut, [0] * len(lens))
    rest = [row for row, length in enumerate(lens) if cut[row] < length]
    if rest:
        yield DiffStep(Phase.EXTEND, rest, [lens[row] - cut[row] for row in rest], [cut[row] for row in rest])
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
    """Count all positions of a step; returns B's greedy token after each."""
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
