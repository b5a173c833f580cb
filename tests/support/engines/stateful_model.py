"""A small model with alternating attention and recurrent layers: enough for the engine, with the expected outputs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.model import Attention, AttentionFunctions, StateLayer
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import CONV, GATED_DELTA, KDA, LIGHTNING, MAMBA1, MAMBA2, StateParameters, StateSpec
from headway.core.oracle.state_reference import SequenceState, advance
from tiny_engine import TextModel

WIDTH = 32
"""Elements of the residual stream."""


def _spec(kind: str) -> StateSpec:
    if kind == CONV:
        return StateSpec(kind, 0, 0, 0, 0, conv_channels=WIDTH, conv_width=3, activation="none")
    heads = StateSpec(kind, num_heads=4, num_key_heads=2, key_dim=4, value_dim=8, scale=0.5, qk_norm=True)
    if kind == MAMBA1:
        return replace(heads, num_heads=WIDTH, num_key_heads=WIDTH, value_dim=1)
    if kind == LIGHTNING:
        return replace(heads, num_key_heads=4)
    return replace(heads, conv_channels=heads.input_channels, conv_width=4)


class Stateful(TextModel):
    """Layers of attention (a window or None) and of kinds of states (names); a token depends on all that came before it."""

    max_position_embeddings = 512

    def __init__(self, *layers: int | str | None) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
        self.layers = layers
        self.attention_specs = [replace(spec, sliding_window=each) for each in layers if not isinstance(each, str)]
        self.state_layers = [StateLayer(_spec(each), _parameters(_spec(each), draw)) for each in layers if isinstance(each, str)]
        self.embed, self.places = draw(self.vocab_size, WIDTH), draw(self.max_position_embeddings, WIDTH)
        self.qkv = draw(len(self.attention_specs), WIDTH, 64) * 0.3
        self.inputs = [draw(WIDTH, spec.input_channels) * 0.3 for spec, _ in self.state_layers]
        self.gates = [[draw(WIDTH, *shape) * 0.3 for shape in _gate_shapes(spec)] for spec, _ in self.state_layers]

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + 0.5 * self.places[positions]
        attends, states = 0, 0
        for layer in self.layers:
            if isinstance(layer, str):
                gates = [torch.tensordot(x, gate, 1) for gate in self.gates[states]]
                out = attention.state(states, x @ self.inputs[states], gates)
                states += 1
            else:
                q, k, v = (x @ self.qkv[attends]).view(-1, 8, 8).split([4, 2, 2], dim=1)
                out = attention(attends, q, k, v).flatten(1)
                attends += 1
            x = x + out / (out.norm(dim=-1, keepdim=True) + 1) * 3
            x = x / x.norm(dim=-1, keepdim=True) * 6
        return x

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens, one sequence by itself: its prompt, then token by token."""
        states = [SequenceState.zeros(spec) for spec, _ in self.state_layers]
        keys, values = ([torch.empty(0, spec.num_kv_heads, spec.head_dim) for spec in self.attention_specs] for _ in "kv")

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            spec = self.attention_specs[layer]
            keys[layer], values[layer] = torch.cat([keys[layer], k]), torch.cat([values[layer], v])
            ages = torch.arange(len(keys[layer]))[-len(q) :, None] - torch.arange(len(keys[layer]))
            hidden = (ages < 0) | (ages >= (spec.sliding_window or len(keys[layer])))
            k, v = (each[layer].repeat_interleave(spec.group_size, dim=1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

        def recur(layer: int, x: Tensor, gates: list[Tensor]) -> Tensor:
            spec, parameters = self.state_layers[layer]
            rows = zip(x.double(), *(gate.double() for gate in gates), strict=True)
            out = [advance(spec, parameters, each, list(opened), states[layer]) for each, *opened in rows]
            return torch.stack(out).to(x.dtype)

        text, done = list(prompt), 0
        while len(text) < len(prompt) + max_tokens:
            new, positions = torch.tensor(text[done:]), torch.arange(done, len(text))
            hidden, done = self(new, positions, AttentionFunctions(attend, recur)), len(text)
            text.append(int(self.compute_logits(hidden[-1]).argmax()))
        return text[len(prompt) :]


def _gate_shapes(spec: StateSpec) -> list[tuple[int, ...]]:
    heads, dim = spec.num_heads, spec.key_dim
    shapes: dict[str, list[tuple[int, ...]]] = {
        GATED_DELTA: [(heads,), (heads,)],
        KDA: [(heads, dim), (heads,)],
        MAMBA2: [(heads,)],
        MAMBA1: [(heads,), (dim,), (dim,)],
    }
    return shapes.get(spec.kind, [])


def _parameters(spec: StateSpec, draw: type[Tensor]) -> StateParameters:
    conv = draw(spec.conv_channels, spec.conv_width) * 0.5 if spec.conv_channels else None
    if spec.kind == CONV:
        return StateParameters(conv)
    by_key = (spec.num_heads, spec.key_dim)
    return StateParameters(
        conv_weight=conv,
        A_log=draw(*(by_key if spec.kind == MAMBA1 else by_key[:1])) - (3 if spec.kind == LIGHTNING else 1) * math.log(2),
        dt_bias=draw(*(by_key if spec.kind == KDA else by_key[:1])),
        D=draw(spec.num_heads),
    )


MODELS = {
    "gated delta": Stateful(GATED_DELTA, None, GATED_DELTA),
    "kda": Stateful(KDA, KDA, None),
    "mamba2 and a window": Stateful(MAMBA2, 20, MAMBA2, None),
    "mamba1": Stateful(None, CONV, MAMBA1),
    "lightning": Stateful(LIGHTNING, None),
}
NO_ATTENTION = Stateful(MAMBA2, CONV)
"""Not in MODELS, because it has no keys and values to offload to host memory."""
