"""A batch invariant decoder: a row's bits are the same at any place among any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.layer import Invariance
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import ACTIVATE, Activation
from headway.kernels.step.invariant import ON_CPU, invariant_operations
from headway.kernels.step.torch_operations import TorchOperations
from headway.models.checkpoints.formats.rounding import int8
from headway.models.checkpoints.weights import Weights
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from plain_models import sizes

SMALL = sizes(97, 48, 84, 2, head_dim=12, initializer_range=0.2)  # 84 is not a multiple of a vector
CONFIGS = {
    "llama, tied, biased": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**{name: value for name, value in SMALL.items() if name != "head_dim"}),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "gemma2": transformers.Gemma2Config(**SMALL, final_logit_softcapping=2.0),
    "gpt2": transformers.GPT2Config(**{**SMALL, "n_inner": 84, "activation_function": "gelu"}),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SMALL, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=28, shared_expert_intermediate_size=44
    ),
    "gpt_oss": transformers.GptOssConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
}
ROWS = (2, 3, 7, 15, 16, 17, 33, 64)
CPU = torch.device("cpu")
ROPE = torch.tensor([[1.0, 0.1]]), torch.ones(1, 2)


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for attention: row by row, and alive to every input."""
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)


def logits(decoder: Decoder, ids: Tensor, positions: Tensor) -> Tensor:
    return decoder.compute_logits(decoder(ids, positions, attend))


SLOW = ("gpt2", "gemma2", "olmo2")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CONFIGS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path)
    return request.param, tmp_path


def decoder(folder: tuple[str, Path], dtype: torch.dtype, device: str = "cpu", level: Invariance = Invariance.BATCH) -> Decoder:
    config = read_decoder_config(CONFIGS[folder[0]])
    with torch.inference_mode():
        return Decoder(config, Weights(folder[1], dtype, torch.device(device)), level)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_rows_bits_are_its_own(folder: tuple[str, Path], dtype: torch.dtype, device: str) -> None:
    model = decoder(folder, dtype, device)
    assert all(spec.batch_invariant for spec in model.attention_specs)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (max(ROWS),), generator=generator).to(device)
    positions = torch.randint(0, 60, (max(ROWS),), generator=generator).to(device)
    alone = torch.cat([logits(model, ids[row : row + 1], positions[row : row + 1]) for row in range(max(ROWS))])
    for count in ROWS:
        assert torch.equal(logits(model, ids[:count], positions[:count]), alone[:count]), count
    assert torch.equal(logits(model, ids.flip(0), positions.flip(0)), alone.flip(0))
    assert model.compute_logits(model(ids, positions, attend)[:0]).shape == (0, model.vocab_size)


@torch.inference_mode()
def test_it_computes_what_the_plain_decoder_computes(folder: tuple[str, Path]) -> None:
    ids, positions = torch.arange(40) % 97, torch.arange(40)
    pair = [logits(decoder(folder, torch.float32, level=level), ids, positions) for level in (Invariance.PHASE, Invariance.NONE)]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-4)


class Misplaced(Linear):
    """Weight of a library in which a row's place in a tile changes its result."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return super().__call__(x, out) * torch.where(torch.arange(len(x)) == 5, 1 + 2**-20, 1.0)[:, None]


def test_products_in_which_a_rows_place_matters_are_refused() -> None:
    right, wrong = Linear(torch.randn(40, 24)), Misplaced(torch.randn(24, 40))
    invariant_operations(TorchOperations(*ROPE), [right], CPU)
    with pytest.raises(
        ModelError, match=r"deterministic: needs products .* got others from 16 x 40 times 40 x 24 \(plain\) in torch.float32"
    ):
        invariant_operations(TorchOperations(*ROPE), [right, wrong], CPU)


def test_each_form_of_weights_of_one_shape_is_tried() -> None:
    right, wrong = Linear(torch.randn(24, 40)), Misplaced(int8(torch.randn(24, 40)), kept=True)
    with pytest.raises(ModelError, match=r"16 x 40 times 40 x 24 \(int8\) in torch.float32"):
        invariant_operations(TorchOperations(*ROPE), [wrong, right], CPU)


@pytest.mark.parametrize("activation", ACTIVATE)
@torch.inference_mode()
def test_an_activation_does_not_depend_on_a_threads_share(activation: Activation) -> None:
    ours = ON_CPU[activation]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    gate = torch.randn(16, 22016, generator=torch.Generator().manual_seed(0)).chunk(2, dim=1)[0]
    whole = ours(gate)
    assert all(torch.equal(ours(gate[row : row + 1]), whole[row : row + 1]) for row in range(16))
    torch.testing.assert_close(whole, ACTIVATE[activation](gate))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_tiles_leave_a_product_as_it_is(count: int) -> None:
    linear, x, residual = Linear(torch.randn(24, 40)), torch.randn(count, 40), torch.randn(count, 24)
    ops = invariant_operations(TorchOperations(*ROPE), [linear], CPU)
    torch.testing.assert_close(ops.product(x, linear), linear(x))
    out = torch.empty(count, 24)
    assert ops.product(x, linear, out) is out
    assert torch.equal(out, ops.product(x, linear))
    torch.testing.assert_close(ops.add_product(residual.clone(), x, linear), residual + linear(x))
