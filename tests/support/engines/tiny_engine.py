"""Engines of small models: a model of a few lines, a registry with backends of a test's own, what was written and guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.core.contract.model import Attention, Model
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry, create_registry, hookimpl


class TextModel:
    """Base of small models: logits from the embeddings, and the tokens without a cache for comparison."""

    vocab_size = 50
    embed: Tensor
    attention_specs: list[AttentionSpec]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(hidden @ self.embed.T, 0.2, out=out)  # flat enough for sampling to show

    def dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a layer over a whole text."""
        spec = self.attention_specs[layer]
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (ages < 0) | (ages >= (spec.sliding_window or len(q)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens, from the whole text at every step and without a cache."""
        text = list(prompt)
        for _ in range(max_tokens):
            hidden = self(torch.tensor(text), torch.arange(len(text)), self.dense)  # type: ignore[operator]
            text.append(int(self.compute_logits(hidden[-1:]).argmax()))
        return text[len(prompt) :]


class TinyModel(TextModel):
    """Two attention layers over random embeddings; every token depends on all before it."""

    max_position_embeddings = 128

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.attention_specs = [AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)] * 2
        self.embed = torch.randn(self.vocab_size, 32, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, 32, generator=generator)
        self.qkv = torch.randn(2, 32, 64, generator=generator) * 0.3

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer in range(2):
            q, k, v = (x @ self.qkv[layer]).view(-1, 8, 8).split([4, 2, 2], dim=1)
            x = x + attention(layer, q, k, v).flatten(1)
        return x


class _Plugin:
    def __init__(self, backends: dict[str, type[AttentionBackend]]) -> None:
        self._backends = backends

    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        return [
            BackendInfo(name, "for tests", lambda each=each: each, api_version=2)  # type: ignore[misc]
            for name, each in self._backends.items()
        ]


def registering(*plugins: object, **backends: type[AttentionBackend]) -> Registry:
    """The built-in plugins, these, and one that brings the backends, by name."""
    return create_registry([_Plugin(backends), *plugins], load_entry_points=False)


def made_engine(model: Model, source: Registry, config: EngineConfig, **parts: Any) -> EngineLoop:
    """Make an engine. parts: other fields of EngineParts."""
    return make_engine(EngineParts(model=model, source=source, config=config, **parts))


@dataclass
class Written:
    """One completion, from its deltas."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cache_report: dict[str, int] = field(default_factory=dict)


def drain(engine: EngineLoop, written: dict[tuple[str, int], Written] | None = None) -> dict[tuple[str, int], Written]:
    """Run until nothing is left: completions by request id and index."""
    written = {} if written is None else written
    while engine.has_unfinished:
        for delta in engine.step():
            one = written.setdefault((delta.request_id, delta.completion), Written())
            assert one.finish_reason is None, "a delta after the last"
            one.token_ids += delta.new_token_ids
            one.logprobs += delta.logprobs
            one.prompt_logprobs += delta.prompt_logprobs
            one.cache_report |= delta.cache_report or {}
            one.finish_reason, one.error, one.num_cached_tokens = delta.finish_reason, delta.error, delta.num_cached_tokens
    engine.blocks.check_integrity([])
    assert engine.blocks.num_free == engine.blocks.num_pages
    return written


def generate(
    engine: EngineLoop, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Written]:
    """The first completion of each prompt."""
    wishes = params if isinstance(params, Sequence) else [params] * len(prompts)
    for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        engine.add_request(str(number), engine.limits.checked(prompt, wish))
    written = drain(engine)
    for (name, _), one in written.items():  # every token of a prompt has one source
        if one.token_ids:
            found = one.cache_report.get("device", 0) + one.cache_report.get("offload", 0)
            assert (sum(one.cache_report.values()), found) == (len(prompts[int(name)]), one.num_cached_tokens)
    return [written[str(number), 0] for number in range(len(prompts))]


def tokens_of(written: Sequence[Written]) -> list[list[int]]:
    """The tokens of each completion."""
    return [each.token_ids for each in written]


class Told:
    """propose: function from all tokens of a sequence to draft tokens."""

    def __init__(self, propose: Callable[[list[int]], Sequence[int]]) -> None:
        self._propose = propose
        self.finished: list[list[int]] = []

    def begin(self, num_prompt_tokens: int) -> Told:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return list(self._propose(list(token_ids)))[:most]

    def finish(self, token_ids: Sequence[int]) -> None:
        self.finished.append(list(token_ids))


def told_of(texts: Sequence[Sequence[int]], most: int = 7, wrong_every: int = 5) -> Told:
    """Guesses what follows in one of these texts, with a mistake now and then, and sometimes nothing."""

    def propose(token_ids: list[int]) -> list[int]:
        text = next((text for text in texts if list(text[: len(token_ids)]) == token_ids), [])
        if len(token_ids) % 6 == 0:
            return []
        guesses = text[len(token_ids) : len(token_ids) + 1 + len(token_ids) % most]
        return [(guess + ((len(token_ids) + place) % wrong_every == 0)) % 50 for place, guess in enumerate(guesses)]

    return Told(propose)
