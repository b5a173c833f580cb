"""Wrapper that gives a transformers decoder the engine's `Model` protocol, with Headway's attention and KV cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway.core.contract.errors import ModelError
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.models.families.dense import size_of
from headway.models.transformers_adapter.interface import (
    NAME,
    NUM_TOKENS,
    SITE,
    AttentionSite,
    Call,
    Current,
    differ,
    probing,
    run_probe,
)


class TransformersModel:
    """transformers decoder that receives all tokens of a step as a batch of one row, without padding or mask.

    Positions restart with each sequence. The layers run transformers' code; each attention module calls Headway's attention
    (`interface`). Hidden states come from the decoder inside the causal language model, and logits from the modules after it, so
    that they are computed only for sampled rows.
    """

    kv_scales: None = None
    """Always None, since transformers reads no scales from a checkpoint. FP8 caches therefore have scales of 1."""
    expert_kinds: tuple[()] = ()
    """Always empty: transformers' experts have only one kernel."""
    linear_choices: tuple[()] = ()
    """Always empty: transformers' linear layers have only one kernel."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, longest: int | None = None) -> None:
        """model: a causal language model of transformers (PreTrainedModel), in `dtype` on `device`.

        longest: see `rope.read_rope`.

        :raises ModelError: if the model cannot run on packed sequences and a paged cache; the message states the reason.
        """
        model.requires_grad_(False).eval()
        text = model.config.get_text_config()
        self.model = model
        self.name = type(model).__name__
        self.implementation = f"transformers {transformers.__version__} ({self.name})"
        """Name of the implementation, for messages."""
        self.vocab_size: int = text.vocab_size
        self.max_position_embeddings = size_of(text, "max_position_embeddings")
        fix_rope(model, longest or self.max_position_embeddings)
        self._current = Current()
        self.device = device
        self.dtype = dtype
        with probing(model, NAME):
            calls = self._probe()
        self.attention_specs = [spec_of(call, dtype, device) for call in calls]
        for layer, call in enumerate(calls):
            setattr(call.module, SITE, AttentionSite(call.name, layer, call.passed, call.sinks, self._current))

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the last hidden states [num_tokens, hidden_size], normed. input_ids, positions: int32 or int64 [num_tokens]."""
        self._current.attention = attention
        try:
            return self._hidden(input_ids, positions)
        finally:
            self._current.attention = None

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [rows, vocab_size]; see core.contract.Model. hidden: [rows, hidden_size], only the rows to sample."""
        found: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return found.to(hidden.dtype) if out is None else out.copy_(found)

    def _hidden(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        places = positions.long()[None]
        hidden: Tensor = self._decoder(
            input_ids=input_ids[None], position_ids=places, use_cache=False, return_dict=True
        ).last_hidden_state[0]
        return hidden

    def _probe(self) -> list[Call]:
        """Return the model's attention calls. First find the decoder inside the model, and check that decoder and head together
        give the model's logits.

        :raises ModelError: if the logits differ, or tokens affect one another outside attention.
        """
        model, order = self.model, torch.arange(NUM_TOKENS)
        ids = ((order * 7 + 3) % self.vocab_size).to(self.device)
        places = order.to(self.device)

        def whole() -> Tensor:
            logits: Tensor = model(input_ids=ids[None], position_ids=places[None], use_cache=False, return_dict=True).logits[0]
            return logits

        logits, calls = run_probe(model, whole, self.max_position_embeddings)
        if not calls:
            raise ModelError(f"{self.name}: never calls its attention through transformers' attention interface")
        layers = _layers_path(model, [call.name for call in calls])
        path = layers.rpartition(".")[0]
        self.layers: list[nn.Module] = list(model.get_submodule(layers).children())
        self._decoder: nn.Module = model.get_submodule(path)
        self._head = _with(model, path, _Given())
        hidden, _ = run_probe(model, lambda: self._hidden(ids, places))
        if differ(logits, self.compute_logits(hidden)):
            raise ModelError(f"{self.name}: its logits are no function of what {path} returns alone")
        if logits.shape[1] != self.vocab_size:
            raise ModelError(f"{self.name}: vocab_size={self.vocab_size} in config.json, and {logits.shape[1]} logits")
        flipped, flipped_calls = run_probe(model, lambda: self._hidden(ids.flip(0), places.flip(0)))
        meet = differ(hidden, flipped.flip(0))
        for call, other in zip(calls, flipped_calls, strict=True):
            meet |= any(differ(a, b.flip(2)) for a, b in zip(call.tensors, other.tensors, strict=True))
        if meet:
            raise ModelError(
                f"{self.name}: its tokens meet outside attention (a convolution, a state space or a recurrence), and "
                "the adapter keeps no state of a sequence but keys and values"
            )
        return calls


class _Given(nn.Module):
    """Replacement for a decoder; returns the given embeddings as hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Hidden:
        """Return the embeddings as hidden states. inputs_embeds: [1, rows, hidden_size]."""
        return _Hidden(inputs_embeds)


class _Hidden:
    """Decoder output with only the last hidden states; the causal language model around the decoder reads nothing else."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _layers_path(model: nn.Module, names: list[str]) -> str:
    """Return the path of the layer list that contains all named attention modules; its parent is the decoder.

    :raises ModelError: if no such list exists.
    """
    parts = names[0].split(".")
    for depth in range(1, len(parts)):
        path = ".".join(parts[: depth + 1])
        if isinstance(model.get_submodule(path), nn.ModuleList) and all(name.startswith(f"{path}.") for name in names):
            return path
    raise ModelError(f"{type(model).__name__}: its attentions ({names[0]}, ...) do not stand in one list of layers")


def _with(module: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """Return a copy of `module` that shares everything except the submodule at `path`, which is `other`."""
    first, _, rest = path.partition(".")
    twin = copy.copy(module)
    below = _with(module.get_submodule(first), rest, other) if rest else other
    twin._modules = {**module._modules, first: below}
    return twin


def spec_of(call: Call, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    """Return the attention spec of a layer's call. :raises ModelError: if the call's dtypes are not the model's."""
    dtypes = {tensor.dtype for tensor in call.tensors}
    if dtypes != {dtype}:
        named = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        raise ModelError(
            f"attention of {call.name}: needs elements of the model's {str(dtype).removeprefix('torch.')}, got {named}"
        )
    passed = call.passed
    return AttentionSpec(
        num_heads=passed.num_heads,
        num_kv_heads=passed.num_kv_heads,
        head_dim=passed.head_dim,
        v_head_dim=passed.v_head_dim,
        scale=float(passed.scaling),
        dtype=dtype,
        device=device,
        sliding_window=passed.sliding_window,
        softcap=passed.softcap,
        sinks=_sinks(call.sinks),
    )


def _sinks(given: Tensor | None) -> tuple[float, ...] | None:
    """Return one sink logit per query head, all 0 on torch's `meta` device; None without sinks."""
    if given is None or given.is_meta:
        return None if given is None else (0.0,) * len(given)
    return tuple(given.float().tolist())


def fix_rope(model: Any, longest: int) -> None:
    """Set RoPE frequencies that depend on a batch's longest sequence to fixed values, for up to `longest` tokens.

    Otherwise one sequence would change the rotation of other sequences' keys, which may be cached. `longrope` uses its short or
    long factors; see `original_length`. `dynamic` would change its frequencies only above max_position_embeddings, which no
    sequence exceeds.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        by_layer = kind if isinstance(kind, dict) else {None: kind}
        for layer_type, each in by_layer.items():
            if not isinstance(each, str) or ("dynamic" not in each and each != "longrope"):
                continue
            if each == "longrope":
                found = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
                nested = {} if layer_type is None else {"layer_type": layer_type}
                found.copy_(ROPE_INIT_FUNCTIONS[each](module.config, found.device, seq_len=longest, **nested)[0])
            by_layer[layer_type] = "fixed"
            module.rope_type = kind if isinstance(kind, dict) else "fixed"
