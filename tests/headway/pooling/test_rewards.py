"""Models that say something of each token against transformers: reward models, those of steps, classifiers of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway import LLM, PoolingParams
from headway.core.contract.errors import ConfigError, ModelError, PromptError
from tiny_encoders import LONGEST, TEXTS, embedder, scorer
from tiny_rewards import REWARDING, STEP, logits, rewarding


def load(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), autotune_budget=0, num_threads=1, **options)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "robert" in name else ()) for name in REWARDING])
def test_each_token_gets_what_transformers_says_of_it(name: str, tmp_path: Path) -> None:
    """Texts of several batches and lengths, of one token too; a reward is the logit, labels have probabilities."""
    model = rewarding(name, tmp_path)
    llm = load(tmp_path, max_num_batched_tokens=90)
    step = llm.get_tokenizer().convert_tokens_to_ids(STEP)
    ids = [*(llm.get_tokenizer()(text)["input_ids"] for text in TEXTS), [7], [9, step, step, 8, step], [*range(3, 3 + LONGEST)]]
    outputs = llm.reward([{"prompt_token_ids": each} for each in ids], use_tqdm=False)
    assert llm.pooling.engine.stats.num_batches > 2
    of_labels = torch.sigmoid if REWARDING[name][1].num_labels == 1 else lambda found: found.softmax(-1)
    made = {"reward": lambda found: found, "process reward": lambda found: found.softmax(-1)}.get(name, of_labels)
    for each, output in zip(ids, outputs, strict=True):
        expected = made(logits(model, each))
        if name == "process reward":
            expected = expected[torch.tensor(each) == step]
        close(output.outputs.data, expected)
        assert output.prompt_token_ids == each
    rows = torch.cat([output.outputs.data for output in outputs])
    assert float((rows - rows[0]).abs().max()) > 0.05, "tokens are told apart"
    outputs[0].outputs.data += 1  # a tensor of the caller's


def test_a_judge_of_steps_says_one_thing_behind_each_of_them(tmp_path: Path) -> None:
    rewarding("process reward", tmp_path)
    llm = load(tmp_path)
    one, none = llm.reward([f"the quick{STEP} brown fox{STEP}", "the quick"], use_tqdm=False)
    assert one.outputs.data.shape == (2, 2)
    close(one.outputs.data.sum(-1), torch.ones(2))
    assert none.outputs.data.shape == (0, 2)
    (first,) = llm.reward(f"the quick{STEP} lazy dogs{STEP}", use_tqdm=False)
    close(first.outputs.data[0], one.outputs.data[0])
    assert not torch.allclose(first.outputs.data[1], one.outputs.data[1], atol=1e-3)
    with pytest.raises(ModelError, match=rf"needs its tokenizer for {STEP}"):
        load(tmp_path, skip_tokenizer_init=True)


def test_encode_says_the_same_under_vllms_words(tmp_path: Path) -> None:
    rewarding("reward", tmp_path)
    llm = load(tmp_path, task="reward")
    (expected,) = llm.reward(TEXTS[2], use_tqdm=False)
    for task in (None, "token_classify", "reward"):
        (found,) = llm.encode(TEXTS[2], pooling_task=task, use_tqdm=False)
        assert torch.equal(found.outputs.data, expected.outputs.data)
    cut = llm.reward("the quick brown fox " * 40, PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)
    assert cut[0].outputs.data.shape == (5, 1)
    with pytest.raises(ConfigError, match=r"pooling_task: needs embed, classify, token_embed or token_classify, got 'plugin'"):
        llm.encode("a", pooling_task="plugin", use_tqdm=False)
    with pytest.raises(ConfigError, match=r"token_embed: needs a model that embeds texts, got .*which rewards tokens"):
        llm.encode("a", pooling_task="token_embed", use_tqdm=False)
    llm.pooling.engine.warm_up()  # as on a GPU


def test_the_wrong_kind_of_request_is_one_line(tmp_path: Path) -> None:
    for name in ("bert", "reward"):
        rewarding(name, tmp_path / name)
        llm = load(tmp_path / name)
        with pytest.raises(ConfigError, match=r"embed: needs a model that embeds texts, got .*which rewards tokens .*use reward"):
            llm.embed("a", use_tqdm=False)
        with pytest.raises(ConfigError, match=r"score: needs .*which rewards tokens"):
            llm.score("a", "b", use_tqdm=False)
        with pytest.raises(ConfigError, match=r"classify: needs a sequence classifier, got .*use reward"):
            llm.encode("a", pooling_task="classify", use_tqdm=False)
        with pytest.raises(ConfigError, match=r"needs a model that generates text, got .*which rewards tokens"):
            llm.generate("a")
        with pytest.raises(PromptError, match="prompt 1: needs at most"):
            llm.reward(["a", "the quick brown fox " * 40], use_tqdm=False)
    embedder("bert", tmp_path / "embedder")
    scorer("bert", tmp_path / "scorer")
    for other, hint in (("embedder", "use embed"), ("scorer", "use score")):
        with pytest.raises(ConfigError, match=rf"reward: needs a reward model, .*one thing of a whole text .*{hint}"):
            load(tmp_path / other).reward("a", use_tqdm=False)
        with pytest.raises(ModelError, match="reward needs BertForTokenClassification"):
            load(tmp_path / other, task="reward")
