"""`headway diff` on the command line: what it prints, writes and refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.bench.diff.results import DiffReport
from headway.core.contract.metadata import Phase
from quantized_models import FORMATS, QWEN3, save_both
from sandbox import TOY, Result, assert_refused, install

Headway = Callable[..., Result]
WRONG = TOY.replace("weights, v)", "weights, v) * (1.0 if queries > 1 else 1.01)")
"""The toy backend, one percent too large in decode."""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("the quick fox\n\nthe lazy dog jumps over\n")
    return path


@pytest.fixture
def diff(headway: Headway, tiny_model_folder: Path, texts: Path) -> Headway:
    return lambda *arguments: headway(
        "diff", "--model", str(tiny_model_folder), "--prompts-file", str(texts), "--max-tokens", "3", *arguments
    )


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plugins"
    install(folder, "headway_wrong", WRONG)  # a name of its own: modules are imported once a process
    monkeypatch.syspath_prepend(str(folder))


def test_a_backend_against_the_reference(diff: Headway, tmp_path: Path) -> None:
    output = tmp_path / "out" / "diff.json"
    result = diff("sdpa", "--output", str(output), "--picture", str(tmp_path / "diff.png"))
    assert result.code == 0, result
    assert (tmp_path / "diff.png").read_bytes().startswith(b"\x89PNG")
    report = DiffReport.model_validate_json(output.read_text())
    assert (report.a.name, report.b.name, report.prompts, report.max_tokens) == ("sdpa", "reference", 2, 3)
    assert {phase.phase for phase in report.phases} == set(Phase)
    assert '"schema": "headway.diff/1"' in output.read_text()
    for words in ("prefill, ", "extend, ", "decode, 6 tokens", "sdpa against reference", "worst head", "within tolerance"):
        assert words in result.out


def test_a_backend_against_itself_in_a_layout(diff: Headway) -> None:
    result = diff("sdpa", "sdpa", "--kv-layout", "hnd", "--block-size", "8", "--no-extend", "--prompt", "dog")
    assert result.code == 0, result
    assert "A = sdpa (kv_layout=hnd, block_size=8)" in result.out
    assert "3 prompts" in result.out
    assert "e-0" not in result.out.replace("tolerance 4.0e-06", ""), "nothing but zeros"
    assert "extend" not in result.out


def test_a_wrong_plugin_is_told_by_its_phase_and_exit_code_1(diff: Headway, plugins: None) -> None:
    result = diff("toy")
    assert result.code == 1, result
    assert result.err == ""
    last = " ".join(result.out.split("next tokens, free-running")[1].split())
    assert "beyond tolerance: decode, first in layer 0: 1.0e-02 (tolerance 2.0e-06); worst head" in last
    assert "4 of 4 heads beyond it" in last
    assert "beyond tolerance: prefill" not in last


BAD = {
    "unknown second backend": (["sdpa", "flsh"], ("'flsh'", "sdpa.math")),
    "unknown option": (["sdpa", "--attn-opt", "sdpa.x=1"], ("--attn-opt", "got sdpa.x")),
    "no such file": (["sdpa", "--prompts-file", "nowhere"], ("--prompts-file", "got nowhere", "No such file")),
    "empty prompt": (["sdpa", "--prompt", ""], ("prompt 0", "an empty text")),
    "too long": (["sdpa", "--prompt", "fox " * 300], ("prompt 0", "1 to 253 tokens", "lower --max-tokens")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_users_mistake_is_one_message(diff: Headway, name: str) -> None:
    arguments, words = BAD[name]
    assert_refused(diff(*arguments), *words)


def test_a_backend_that_cannot_serve_the_model_is_refused_with_reasons(diff: Headway, plugins: None) -> None:
    result = diff("sdpa", "toy.decode")
    assert_refused(result, "toy.decode", "phase: needs decode, got prefill")
    assert "--attn-backend" not in result.err, "not an option here"


def test_random_weights_and_tokens_where_there_is_nothing_but_a_config(headway: Headway, model_copy: Path) -> None:
    for path in model_copy.iterdir():
        if path.name != "config.json":
            path.unlink()
    arguments = ("diff", "sdpa", "--model", str(model_copy), "--load-format", "dummy", "--max-tokens", "2")
    result = headway(*arguments)
    assert result.code == 0, result
    assert "decode, 8 tokens" in result.out
    assert_refused(headway(*arguments, "--prompt", "fox"), "--prompt", "a model with a tokenizer", "leave it out")


def test_a_file_without_prompts_is_refused(diff: Headway, texts: Path) -> None:
    texts.write_text("\n\n")
    assert_refused(diff("sdpa"), "--prompts-file", "which has none")
    texts.write_bytes(b"\xff\xfe\xff")
    assert_refused(diff("sdpa"), "--prompts-file", "UTF-8")


def test_an_fp8_cache_is_compared_with_the_models_own(diff: Headway) -> None:
    result = diff("sdpa.math", "sdpa.math", "--kv-cache-dtype", "fp8_e4m3", "--no-extend")
    assert result.code == 1, result
    assert "A = sdpa.math with a fp8_e4m3 cache (" in result.out
    assert "B = sdpa.math (" in result.out
    assert "beyond tolerance: decode" in result.out


@pytest.fixture(scope="module")
def stored_int4(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 bits in groups of 32, whose plain one lies beside it; both with the tiny model's tokenizer."""
    config = QWEN3.from_dict({**QWEN3.to_dict(), "vocab_size": 300, "tie_word_embeddings": False})
    quantized, dense = save_both(
        tmp_path_factory.mktemp("int4"), FORMATS["compressed int4"], config, plain=lambda name: name == "lm_head"
    )
    for folder in (quantized, dense):
        for path in tiny_model_folder.glob("tokenizer*"):
            shutil.copy(path, folder)
    return quantized


WEIGHTS = ("diff", "sdpa", "sdpa", "--max-tokens", "3", "--prompt", "the quick fox", "--model")


def test_weights_of_fp8_are_compared_with_the_plain_ones(headway: Headway, tiny_model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "diff.json"
    result = headway(*WEIGHTS, str(tiny_model_folder), "--quantization", "fp8", "--output", str(output))
    assert result.code == 0, result
    assert "A's weights: rounded to fp8, expanded to float32 again\nB's weights: the checkpoint's, in float32" in result.out
    assert "weights have no declared tolerance" in " ".join(result.out.split())
    assert max(map(len, result.out.splitlines()[1:])) <= 80  # the first line has the folder's name
    report = DiffReport.model_validate_json(output.read_text())
    for phase in report.phases:
        assert [layer.relative_error for layer in phase.layers] == [0.0, 0.0], "the attention is the same"
        assert all(0.005 < layer.free_running < 0.3 for layer in phase.layers), "its inputs are not"
        assert 0.005 < phase.logits_error < 0.3
        assert 0 < phase.kl_mean <= phase.kl_max


def test_a_checkpoints_own_form_is_compared_with_its_expanded_weights(headway: Headway, stored_int4: Path) -> None:
    result = headway(*WEIGHTS, str(stored_int4), "--quantization", "checkpoint", "--dtype", "bfloat16")
    assert result.code == 0, result
    assert "A's weights: pack-quantized (4 bits, groups of 32), read" in result.out
    assert " as they are by 8 of 8 products\n" in result.out
    assert "expanded to bfloat16\n" in result.out


def test_weights_that_cannot_be_compared_are_refused(headway: Headway, stored_int4: Path) -> None:
    def refused(folder: Path, *arguments: str) -> tuple[Result, str]:
        return headway(*WEIGHTS, str(folder), *arguments), "--quantization"

    dense = stored_int4.parent / "dense"
    assert_refused(*refused(dense, "--quantization", "fp3"), "fp8 or checkpoint")
    assert_refused(*refused(dense, "--quantization", "checkpoint"), "plain ones in", "--quantization fp8 rounds them")
    assert_refused(*refused(dense, "--quantization", "fp8", "--load-format", "dummy"), "whose next tokens say something")
    assert_refused(*refused(stored_int4, "--quantization", "fp8"), "needs plain weights", "--quantization checkpoint compares")
    result = refused(stored_int4, "--quantization", "checkpoint")
    assert_refused(*result, "expanded to float32 on a cpu: both sides would be the same", "--dtype bfloat16")
