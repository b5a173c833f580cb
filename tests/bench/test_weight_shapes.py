"""Folders with weights in published forms: an engine fills them with random numbers and runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from headway import LLM, SamplingParams
from headway.bench.studies.weight_shapes import weight_shapes
from headway.core.contract.errors import ConfigError
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.locate import locate

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
LABELS = {
    "bf16": "bf16",
    "fp8": "fp8 (a scale for each row)",
    "fp8-blocks": "fp8 (blocks of 128 x 128)",
    "w4a16": "pack-quantized (4 bits, groups of 128)",
}


@pytest.mark.parametrize("form", LABELS)
def test_an_engine_runs_each_form(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((locate("llama-3-8b", weights=False) / "config.json").read_text())
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({**config, **SMALL, "num_hidden_layers": 1}))
    weight_shapes(form, tmp_path / form, str(tmp_path / "small"))
    assert capsys.readouterr().out == f"{tmp_path / form}\n"
    stated = json.loads((tmp_path / form / "config.json").read_text())
    read = read_quantization(tmp_path / form, stated)
    assert ("bf16" if read is None else read.label) == LABELS[form]
    llm = LLM(
        str(tmp_path / form), load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=64, autotune_budget=0
    )
    (answer,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 4


def test_random_weights_spread_tokens_over_the_experts(tmp_path: Path) -> None:
    config = json.loads((locate("gpt-oss-20b", weights=False) / "config.json").read_text())
    config |= {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2], "vocab_size": 512, "pad_token_id": 0}
    small, folder = tmp_path / "small", tmp_path / "written"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(config))
    weight_shapes("mxfp4", folder, str(small), weights=True)
    llm = LLM(str(folder), skip_tokenizer_init=True, device="cpu", dtype="float32", max_model_len=64, autotune_budget=0)
    prompts = [[5, 6, 7], [8, 9]]
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        use_tqdm=False,
    )
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    picked: set[int] = set()
    for layer in reference.model.layers:
        layer.mlp.router.register_forward_hook(lambda _, __, out: picked.update(out[-1].flatten().tolist()))
    for prompt, answer in zip(prompts, answers, strict=True):
        written = list(answer.outputs[0].token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == written
    assert len(picked) > config["num_local_experts"] // 2


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="form: needs bf16, fp8, fp8-blocks, w4a16, mxfp4, got int3"):
        weight_shapes("int3", tmp_path)
