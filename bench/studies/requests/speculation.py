"""What guessing gains: a model whose every token follows from the one before, and guesses that are right as often as is asked.

With random weights the two likeliest tokens of some steps are nearly equal, and the order in which a kernel adds decides between
them: texts with and without guesses part, and the workload is another one. So the weights of the model, whose shapes and work are
those of the model that was named, are chosen such that token t is followed by successor[t] by far.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headway.bench.studies.requests.engines import Engines, Sizes, ask, cell, same, sequences
from headway.bench.studies.requests.results import RequestsCell
from headway.core.contract.sampling_plugins import ProposerInfo, ProposerOptions, SequenceProposer
from headway.models.checkpoints.locate import SHAPES, locate, shape_names
from headway.registry import hookimpl

_NAME: Final = "following"


def write_successor_model(model: str, folder: Path, device: torch.device, dtype: torch.dtype) -> list[int]:
    """Write a checkpoint of a model's shapes that continues t by successor[t]. Returns successor, one cycle of all tokens.

    The residual stream stays close to the token's embedding, since all other weights are small, and row successor[t] of the
    output layer is that embedding.
    """
    config = AutoConfig.from_pretrained(SHAPES / model if model in shape_names() else locate(model))
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    with device:
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        order = torch.randperm(config.vocab_size)
        successor = torch.empty_like(order)
        successor[order] = order.roll(-1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1 * parameter.shape[-1] ** -0.5)
        given = made.get_input_embeddings().weight.normal_()
        made.get_output_embeddings().weight[successor] = given
    config.save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in made.state_dict().items()}, folder / "model.safetensors")
    return [int(token) for token in successor.tolist()]


@dataclass(eq=False)
class Following:
    """Guesses for all sequences: each token's successor, or now and then another."""

    successor: Sequence[int]
    acceptance: float
    random: Random

    def begin(self, num_prompt_tokens: int) -> SequenceProposer:
        """The same for each."""
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """As many as may be."""
        guesses, token = [], token_ids[-1]
        for _ in range(most):
            token = self.successor[token if self.random.random() < self.acceptance else token - 1]
            guesses.append(token)
        return guesses

    def finish(self, token_ids: Sequence[int]) -> None:
        """Nothing is learnt."""


@dataclass(frozen=True, eq=False)
class _Plugin:
    proposer: Following

    def _make(self, options: ProposerOptions) -> Following:
        return self.proposer

    @hookimpl
    def headway_register_proposers(self) -> list[ProposerInfo]:
        return [ProposerInfo(_NAME, "the known successor of each token, right as often as is asked", self._make)]


def speculation(engines: Engines, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[RequestsCell]:
    """Measure with and without drafts in turn, in one process."""
    with tempfile.TemporaryDirectory(prefix="headway-") as name:
        successor = write_successor_model(engines.model, Path(name), device, dtype)
        common: dict[str, Any] = {
            "max_model_len": 2 * (sizes.input_len + sizes.output_len),
            "max_num_seqs": max(sizes.batch_sizes),
        }
        common |= {"model": name, "load_format": "auto"}
        plugin = _Plugin(Following(successor, sizes.acceptance, Random(0)))
        tokens = max(sizes.batch_sizes) * (sizes.input_len + sizes.output_len + 16) + 4096
        plain = engines.start(tokens=tokens, **common)
        plugins = [*engines.options.get("plugins", ()), plugin]
        guessing = engines.start(tokens=tokens, plugins=plugins, speculate=_NAME, **common)
        for batch in sizes.batch_sizes:
            found, turns = (plain, guessing), []
            for _ in range(1 + sizes.repeat):
                prompts = engines.prompts(batch, sizes.input_len)
                turns.append([ask(llm, prompts, sizes.output_len) for llm in found])
            base = cell("speculation", sequences(batch), "without guesses", "tok/s", [each[0].rate for each in turns[1:]])
            yield base
            stats, equal = turns[-1][1].stats, min(same(one.tokens, other.tokens) for one, other in turns)
            counts = {
                "tokens a step and sequence": stats.num_output_tokens / (stats.num_steps * batch),
                "guesses verified": stats.num_draft_tokens,
                "of them right": stats.num_accepted_tokens,
                "steps": stats.num_steps,
                "of them one graph": stats.num_graph_steps,
            }
            counts |= {f"without guesses: {reason}": count for reason, count in stats.steps_without_drafts.items()}
            rates = [each[1].rate for each in turns[1:]]
            way = f"{sizes.acceptance:.0%} are right"
            yield cell("speculation", base.load, way, "tok/s", rates, base.median, equal=equal, counts=counts)
