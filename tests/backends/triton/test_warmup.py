"""What a warm-up launches is all that any later step launches: compared by what Triton compiles for, with nothing compiled."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from attention_layer import AttentionLayer, variant_of
from headway.backends.triton import backend as triton_backend
from headway.backends.triton.backend import TritonAttention
from headway.backends.triton.configs import SM_90
from headway.core.contract.backend import StepLimits
from headway.core.contract.kernel import compile_ahead
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import NHD, VLLM_5D, CacheLayout
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES
from headway.core.engine.data.config import EngineConfig
from headway.core.sampling.params import SamplingParams
from headway.kernels.runtime import triton_launch as launch
from headway.kernels.runtime.triton_launch import INTERPRETED
from tiny_engine import TinyModel, Told, drain, made_engine, registering

CPU = torch.device("cpu")
LIMITS = StepLimits(max_num_tokens=2100, max_num_seqs=70, max_model_len=9000, max_decode_len=4)

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


class Compilations:
    """In place of Triton: notes what it would compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[object, ...]] = set()
        self.new: list[tuple[object, ...]] = []
        compilations = self

        def call(
            self: Any, key: object, grid: object, arguments: Sequence[Any], constants: Mapping[str, Any], **options: int
        ) -> None:
            compilations.note(variant_of(self._kernel, arguments, {**constants, **options}))

        monkeypatch.setattr(launch.Launcher, "__call__", call)

    def note(self, found: tuple[object, ...]) -> None:
        if found not in self.seen:
            self.seen.add(found)
            self.new.append(found)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    monkeypatch.setattr(triton_backend, "architecture", lambda capability: SM_90)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return Compilations(monkeypatch)


def layer_of(spec: AttentionSpec, layout: CacheLayout, block_size: int) -> AttentionLayer:
    layer = AttentionLayer(spec, layout, block_size, LIMITS)
    layer.backend.decode_kernels.multiprocessors = layer.backend.prefill_kernels.multiprocessors = 132
    return layer


def random_step(draw: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Prompts, chunks of prompts, decodes and verifications, as a scheduler may put them together."""
    rows: list[tuple[int, int, int]] = []
    tokens, verifies = LIMITS.max_num_tokens, draw.random() < 0.2
    for _ in range(draw.choice((0, 0, 1, 1, 2, 5, 20))):
        query = min(tokens, draw.choice((1, 5, 16, 17, 33, 100, 400, 1500, 2100)), draw.randint(1, 2100))
        context = draw.choice((0, 0, draw.randint(1, LIMITS.max_model_len - query)))
        if query and not (context and query == 1):
            rows.append((query, context, 0))
            tokens -= query
    most = min(LIMITS.max_num_seqs - len(rows), tokens // 4)
    for _ in range(draw.choice((0, 1, 3, 9, 40, 70)) if most else 0):
        if len(rows) < LIMITS.max_num_seqs and tokens >= 4:
            drafts = draw.randint(0, 3) if verifies else 0
            rows.append((drafts + 1, draw.randint(1, draw.choice((20, 500, LIMITS.max_model_len - 4))), drafts))
            tokens -= drafts + 1
    rows = rows or [(1, 1, 0)]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


BF16 = torch.bfloat16
KINDS = {
    "qwen3-0.6b": (AttentionSpec(16, 8, 128, 0.088, BF16, CPU), NHD, 16),
    "8b, large blocks": (AttentionSpec(32, 8, 128, 0.088, BF16, CPU), NHD, 256),
    "one kv head of 256, window": (AttentionSpec(8, 1, 256, 0.0625, BF16, CPU, sliding_window=512), NHD, 64),
    "vllm_5d": (AttentionSpec(14, 2, 64, 0.125, BF16, CPU), VLLM_5D, 16),
    "fp8": (AttentionSpec(16, 8, 128, 0.088, BF16, CPU, kv_dtype=torch.float8_e4m3fn), NHD, 16),
    "invariant": (AttentionSpec(16, 8, 128, 0.088, BF16, CPU, invariance=Invariance.BATCH), NHD, 16),
    "heads of 512": (AttentionSpec(16, 2, 512, 0.044, BF16, CPU), NHD, 64),
    "heads of 320, sinks": (AttentionSpec(16, 2, 320, 0.056, BF16, CPU, sinks=(0.0,) * 16), NHD, 16),
}


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_compiles_after_the_warm_up(compilations: Compilations, kind: str) -> None:
    layer = layer_of(*KINDS[kind])
    layer.warm_up()
    assert len(compilations.seen) > 5
    draw = random.Random(7)
    compilations.new.clear()
    for _ in range(150):
        step = random_step(draw)
        layer.step(*step)
        assert not compilations.new, (step, compilations.new)


class Wide(TinyModel):
    """Two layers of any size, whose output is finite whatever attention leaves in memory."""

    max_position_embeddings = LIMITS.max_model_len

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.attention_specs = [spec] * 2
        self.wide = torch.randn(32, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x, spec = self.embed[input_ids] + self.places[positions], self.attention_specs[0]
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        for layer in range(2):
            q, k, v = (x @ self.wide).to(spec.dtype).view(len(x), sum(heads), spec.head_dim).split(heads, dim=1)
            x = x + attention(layer, q, k, v).flatten(1)[:, :32].float().nan_to_num().clamp(-1, 1)
        return x


@pytest.mark.slow
@pytest.mark.sampled(4, then="soak")
@pytest.mark.parametrize(
    ("kind", "drafts"), [("vllm_5d", 3), ("qwen3-0.6b", 0), ("one kv head of 256, window", 3), ("invariant", 0)]
)
def test_requests_launch_only_what_the_engine_has_compiled_and_launched(
    monkeypatch: pytest.MonkeyPatch, kind: str, drafts: int
) -> None:
    queued, launched, make = set[object](), set[object](), TritonAttention.__init__
    for owner, name, value in (
        (triton.JITFunction, "warmup", lambda self, *given, grid, **named: queued.add(variant_of(self, given, named))),
        (triton.JITFunction, "__getitem__", lambda self, _: lambda *given, **named: launched.add(variant_of(self, given, named))),
        (launch.Compiled, "__call__", lambda self, grid, *arguments: None),
        (triton_backend, "architecture", lambda capability: SM_90),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (TritonAttention, "capabilities", replace(TritonAttention.capabilities, devices=("cpu",))),
        (TritonAttention, "available", classmethod(lambda cls: YES)),
    ):
        monkeypatch.setattr(owner, name, value)

    def made(self: TritonAttention, *arguments: Any) -> None:
        make(self, *arguments)
        self.decode_kernels.multiprocessors = self.prefill_kernels.multiprocessors = 132

    monkeypatch.setattr(TritonAttention, "__init__", made)
    spec, layout, block_size = KINDS[kind]
    draw = random.Random(7)
    config = EngineConfig(
        attn_backend="triton", kv_layout=layout.name, block_size=block_size, kv_cache_memory=2**28,
        max_model_len=LIMITS.max_model_len, max_num_seqs=LIMITS.max_num_seqs, max_num_batched_tokens=LIMITS.max_num_tokens,
        speculate="ngram" if drafts else None, num_speculative_tokens=drafts or 1,
    )  # fmt: skip
    proposer = Told(lambda token_ids: [draw.randrange(50) for _ in range(draw.randint(0, drafts))]) if drafts else None
    engine = made_engine(Wide(spec), registering(), config, compile_ahead=compile_ahead, proposer=proposer)
    assert len(queued) > 5
    assert queued <= launched, "each once: a kernel is loaded at its first launch"
    known = set(launched)
    for group in range(8):
        for number in range(draw.choice((1, 2, 8, 30))):
            length = draw.randint(1, draw.choice((1, 5, 17, 100, 400, 1500, 6000)))
            params = SamplingParams(temperature=0.0, max_tokens=draw.randint(1, 6), ignore_eos=True)
            prompt = [draw.randrange(50) for _ in range(length)]
            engine.add_request(f"{group} {number}", engine.limits.checked(prompt, params))
        for _ in range(draw.randint(0, 8)):
            if engine.has_unfinished:
                engine.step()
        assert launched == known, f"after {group} groups of requests"
    drain(engine)
    assert launched == known
