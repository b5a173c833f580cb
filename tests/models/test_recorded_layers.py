"""Decode steps that are repeated as one call of our C write the tokens of steps that Python runs, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from headway.core.sampling.params import SamplingParams
from headway.kernels.runtime.native.library import functions, native_support
from headway.llm import LLM

pytest.importorskip("gguf")
from gguf_block_models import save_block_model
from plain_models import sizes

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
PROMPTS = [[3, 4, 5], [7] * 20, list(range(30, 90))]
"""Prompts of different lengths, which end at different steps: batches of three, two and one."""

pytestmark = pytest.mark.skipif(functions() is None, reason=f"our C is not built here: {native_support()}")


def written(folder: Path, repeats: bool, backend: str = "prefill=sdpa,decode=native") -> tuple[list[object], int]:
    """Tokens and log-probabilities of two passes, and how many steps were repeated."""
    llm = LLM(
        str(folder), attn_backend=backend, kv_cache_memory="4MiB", num_threads=1, skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    recorded = llm.model.decoder.recorded
    if not repeats:
        llm.model.decoder.recorded = None
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1) for count in (12, 17, 25)]
    found: list[object] = []
    for _ in range(2):
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            one = output.outputs[0]
            assert one.logprobs is not None
            found.append((one.token_ids, [[(token, each.logprob) for token, each in place.items()] for place in one.logprobs]))
    return found, recorded.repeated


@pytest.mark.parametrize("norms_after", [False, True])
def test_repeated_steps_write_what_steps_in_python_write(norms_after: bool, tmp_path: Path) -> None:
    if norms_after:
        shapes = sizes(160, 512, 512, 3, head_dim=128, sliding_window=16, sliding_window_pattern=2)
        Gemma3ForCausalLM(Gemma3TextConfig(**shapes)).save_pretrained(tmp_path)
    else:
        save_block_model(tmp_path, dict.fromkeys(PRODUCTS, "Q8_0"))
    repeated, count = written(tmp_path, repeats=True)
    plain, none = written(tmp_path, repeats=False)
    assert repeated == plain
    assert none == 0
    assert count >= 2 * 24 - 3  # the first step of each number of sequences is run by Python


@pytest.mark.parametrize(("products", "backend"), [(PRODUCTS[1:], "prefill=sdpa,decode=native"), (PRODUCTS, "sdpa")])
def test_steps_with_torch_operations_are_not_repeated(products: tuple[str, ...], backend: str, tmp_path: Path) -> None:
    """A linear layer too small for Headway's C, and torch's attention."""
    save_block_model(tmp_path, dict.fromkeys(products, "Q8_0"))
    found, count = written(tmp_path, repeats=True, backend=backend)
    assert count == 0
    assert found == written(tmp_path, repeats=False, backend=backend)[0]
