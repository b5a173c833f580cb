"""Embeddings, scores and rewards against transformers: every architecture, texts of mixed lengths, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel, Qwen3ForCausalLM

from headway import LLM, AsyncLLM, PoolingParams
from headway.backends.sdpa import SDPAMath
from headway.core.contract.errors import ConfigError, ModelError, PromptError, UnsupportedError
from headway.core.pooling.engine import EncodedText
from sandbox import save_tiny_model
from tiny_encoders import (
    EMBEDDERS,
    LONGEST,
    REWARDING,
    SCORERS,
    STEP,
    TEXTS,
    classifier,
    embedder,
    logits,
    rewarding,
    save,
    score,
    scorer,
    states,
    vector,
    write_modules,
)

OPTIONS = {"autotune_budget": 0, "num_threads": 1}


def load(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), **OPTIONS, **options)


def embedded(llm: LLM, prompts: object = TEXTS, **options: object) -> torch.Tensor:
    outputs = llm.embed(list(prompts) if isinstance(prompts, tuple) else prompts, use_tqdm=False, **options)
    return torch.tensor([output.outputs.embedding for output in outputs])


def close(found: object, expected: object) -> None:
    """In float32: sums in another order differ by up to 1.1e-5 in these models, on the CPUs that were tried."""
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=5e-5)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[BertModel, Path, LLM]:
    folder = tmp_path_factory.mktemp("bert")
    return embedder("bert", folder), folder, load(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "roberta" in name or "," in name else ()) for name in EMBEDDERS]
)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Also a text of one token, and one as long as the model takes."""
    model = embedder(name, tmp_path)
    llm = load(tmp_path, max_num_batched_tokens=90, runner="pooling" if name == "qwen3-embedding" else "auto")
    ids = [*(llm.get_tokenizer()(text)["input_ids"] for text in TEXTS), [7], [*range(3, 3 + LONGEST)]]
    assert len(set(map(len, ids))) > 5
    expected = torch.stack([vector(model, each, EMBEDDERS[name][2]) for each in ids])
    outputs = llm.embed([*TEXTS, {"prompt_token_ids": [7]}, ids[-1]], use_tqdm=False)
    close([output.outputs.embedding for output in outputs], expected)
    assert [output.prompt_token_ids for output in outputs] == ids
    assert llm.pooling.engine.stats.num_batches > 2
    assert float((expected[1] - expected[2]).abs().max()) > 0.05, "the texts are told apart"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "," in name else ()) for name in SCORERS])
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, llm = scorer(name, tmp_path), load(tmp_path)
    query, documents = TEXTS[1], [TEXTS[0], *TEXTS[3:]]
    outputs = llm.score(query, documents, use_tqdm=False)
    expected = [score(model, tmp_path, query, document) for document in documents]
    close([output.outputs.score for output in outputs], expected)
    assert max(expected) - min(expected) > 1e-3
    assert [output.outputs.score for output in llm.score(documents, documents, use_tqdm=False)] != expected


def test_the_kinds_of_a_pairs_tokens_are_told(tmp_path: Path) -> None:
    model, llm = scorer("bert", tmp_path), load(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)(TEXTS[1], TEXTS[3])["input_ids"]
    with torch.no_grad():
        untold = float(model(torch.tensor([ids])).logits[0, 0].sigmoid())
    (found,) = llm.score(TEXTS[1], TEXTS[3], use_tqdm=False)
    assert abs(found.outputs.score - untold) > 1e-3
    assert found.prompt_token_ids == ids


def test_a_yes_beside_a_no_is_a_score(tmp_path: Path) -> None:
    kind, config, _ = EMBEDDERS["qwen3-embedding"]
    model: Qwen3ForCausalLM = save(kind, config.__class__(**{**config.to_dict(), "max_position_embeddings": 512}), tmp_path, True)
    llm = load(tmp_path, task="score")
    outputs = llm.score(TEXTS[1], [TEXTS[0], "{query} {document}"], use_tqdm=False)
    yes, no = llm.get_tokenizer().convert_tokens_to_ids(["yes", "no"])
    for output in outputs:
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        close(output.outputs.score, float(torch.stack([logits[yes], logits[no]]).softmax(0)[0]))
    text = llm.get_tokenizer().decode(outputs[1].prompt_token_ids)
    assert f"<Query>: {TEXTS[1]}\n<Document>: {{query}} {{document}}<|im_end|>" in text
    (cut,) = llm.score("a" * 40, "b" * 2000, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(cut.prompt_token_ids) == 512
    assert cut.prompt_token_ids[-8:] == outputs[0].prompt_token_ids[-8:]


def test_an_embedding_model_scores_by_the_cosine(bert: tuple[BertModel, Path, LLM]) -> None:
    _, _, llm = bert
    rows = embedded(llm)
    found = [output.outputs.score for output in llm.score(TEXTS[1], list(TEXTS), use_tqdm=False)]
    close(found, rows @ rows[1])
    assert found[1] == pytest.approx(1.0)


MODES: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], torch.Tensor]]] = {
    "old switches": ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, lambda found: found.mean(0)),
    "old last token": ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 32}, lambda found: found[-1]),
    "new name": ({"pooling_mode": "cls"}, lambda found: found[0]),
}


@pytest.mark.parametrize(("mode", "normal"), [("old switches", False), ("old last token", True), ("new name", True)])
def test_sentence_transformers_files_say_how_states_are_pooled(mode: str, normal: bool, tmp_path: Path) -> None:
    model, (config, pool) = embedder("bert", tmp_path), MODES[mode]
    write_modules(tmp_path, config, normal=normal)
    llm = load(tmp_path)
    expected = torch.stack([pool(states(model, llm.get_tokenizer()(text)["input_ids"])) for text in TEXTS])
    close(embedded(llm), normalize(expected, dim=-1) if normal else expected)


def test_products_behind_the_pooling_are_computed(tmp_path: Path) -> None:
    """As EmbeddingGemma has them."""
    model = embedder("embeddinggemma", tmp_path)
    layers = write_modules(tmp_path, {"pooling_mode": "mean"}, [(32, 48, "linear.Identity"), (48, 24, "activation.Tanh")])
    llm = load(tmp_path)
    x = torch.stack([states(model, llm.get_tokenizer()(text)["input_ids"]).mean(0) for text in TEXTS])
    (first, more), (second, last) = layers
    close(embedded(llm), normalize(torch.tanh((x @ first.T + more) @ second.T + last), dim=-1))


def test_a_decoder_with_files_of_sentence_transformers_embeds(tmp_path: Path) -> None:
    model = embedder("qwen3-embedding", tmp_path)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    llm = load(tmp_path)
    close(embedded(llm)[2], vector(model, llm.get_tokenizer()(TEXTS[2])["input_ids"], "last"))


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("{", "modules.json cannot be used: it is not a valid JSON"),
        ('[{"type": "sentence_transformers.models.Transformer", "path": ""}]', "names no Pooling"),
        ('[{"type": "x.WordEmbeddings", "path": ""}]', "a Transformer in the folder itself at first, got WordEmbeddings"),
        ('[{"type": "x.Transformer", "path": "../elsewhere"}]', "needs paths in its folder"),
        ('[{"type": "x.Transformer", "path": ""}, {"type": "x.LSTM", "path": "1"}]', "got LSTM as number 1"),
        (
            '[{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]',
            "one pooling mode of .*, got max",
        ),
    ],
)
def test_modules_that_are_not_computed_are_refused(modules: str, words: str, tmp_path: Path) -> None:
    embedder("bert", tmp_path)
    write_modules(tmp_path, {"pooling_mode_max_tokens": True})
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_empty_long_and_foreign_texts(bert: tuple[BertModel, Path, LLM]) -> None:
    model, _, llm = bert
    long = "the quick brown fox " * 40
    close(embedded(llm, [""])[0], vector(model, [1, 2], "cls"))
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(PromptError, match=rf"prompt 1: needs at most {LONGEST} tokens .*truncate_prompt_tokens"):
        llm.embed(["a", long], use_tqdm=False)
    with pytest.raises(PromptError, match="at least one token"):
        llm.embed({"prompt_token_ids": []}, use_tqdm=False)
    with pytest.raises(PromptError, match="token ids from 0 to 299, got 300"):
        llm.embed([[5, 300]], use_tqdm=False)
    ids = llm.get_tokenizer()(long, truncation=True, max_length=LONGEST)["input_ids"]
    assert ids[-1] == 2
    close(embedded(llm, long, truncate_prompt_tokens=-1)[0], vector(model, ids, "cls"))
    with pytest.raises(ConfigError, match=f"truncate_prompt_tokens: needs -1 or a whole number from 1 to {LONGEST}, got 65"):
        llm.embed("a", truncate_prompt_tokens=LONGEST + 1, use_tqdm=False)
    with pytest.raises(ConfigError, match="one for each of the 2 documents, got 3"):
        llm.score(["a", "b", "c"], ["d", "e"], use_tqdm=False)
    with pytest.raises(ConfigError, match="queries: needs a text"):
        llm.score([], ["d"], use_tqdm=False)


def test_the_wrong_kind_of_request_is_one_line(bert: tuple[BertModel, Path, LLM], tmp_path: Path) -> None:
    _, folder, llm = bert
    for call in (lambda: llm.generate("a"), lambda: llm.stream("a").__next__(), llm.stats, lambda: llm.engine):
        with pytest.raises(ConfigError, match=r"needs a model that generates text, got .*which embeds texts"):
            call()
    with pytest.raises(ModelError, match="generates no text"):
        AsyncLLM(str(folder))
    with pytest.raises(ModelError, match="generates no text"):
        load(folder, runner="generate")
    scorer("bert", tmp_path / "scorer")
    with pytest.raises(ConfigError, match="embed: needs a model that embeds texts, got .*use score"):
        load(tmp_path / "scorer").embed("a", use_tqdm=False)
    generator = LLM(str(save_tiny_model(tmp_path / "generator")), kv_cache_memory="4MiB", **OPTIONS)
    with pytest.raises(ConfigError, match="needs a model that is pooled, got .*which generates text .*runner='pooling'"):
        generator.embed("a", use_tqdm=False)
    with pytest.raises(ConfigError, match="task: needs one that runner=generate has, got embed"):
        load(folder, runner="generate", task="embed")
    with pytest.raises(ConfigError, match="runner: needs auto or generate or pooling"):
        load(folder, runner="embed")
    with pytest.raises(ConfigError, match="speculate: needs a model that generates text"):
        load(folder, speculate="ngram")


def test_a_length_that_embeddings_may_be_cut_to(bert: tuple[BertModel, Path, LLM], tmp_path: Path) -> None:
    _, _, llm = bert
    with pytest.raises(ConfigError, match="dimensions: needs 32, the length of this model's embeddings, got 8"):
        llm.embed("a", dimensions=8, use_tqdm=False)
    embedder("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    cut = load(tmp_path)
    close(embedded(cut, dimensions=8), normalize(embedded(llm)[:, :8], dim=-1))
    with pytest.raises(ConfigError, match="dimensions: needs one of 8, 16, got 7"):
        cut.embed("a", dimensions=7, use_tqdm=False)


def test_a_named_backend_serves_and_another_is_refused_with_reasons(bert: tuple[BertModel, Path, LLM]) -> None:
    class CausalAlone(SDPAMath):
        name = "causal_alone"
        capabilities = replace(SDPAMath.capabilities, non_causal=False)

    _, folder, llm = bert
    named = load(folder, attn_backend="sdpa.math")
    close(embedded(named), embedded(llm))
    assert set(named.pooling.engine.stats.batches_by_backend) == {"sdpa.math"}
    with pytest.raises(
        UnsupportedError, match=r'causal: needs a backend that declares non_causal(.|\n)*nearest fix: attn_backend="auto"'
    ):
        load(folder, attn_backend="causal_alone", backends=[CausalAlone])


def test_a_classifier_of_several_labels_gives_their_probabilities_and_scores_no_pair(tmp_path: Path) -> None:
    model = classifier(tmp_path, 3)
    llm = load(tmp_path)
    outputs = llm.classify(list(TEXTS), use_tqdm=False)
    with torch.no_grad():
        logits = [model(torch.tensor([output.prompt_token_ids])).logits[0] for output in outputs]
    assert outputs[0].outputs.num_classes == 3
    close(torch.tensor([output.outputs.probs for output in outputs]), torch.stack(logits).softmax(-1))
    assert llm.encode(TEXTS[0], use_tqdm=False)[0].outputs.data.shape == (3,)
    with pytest.raises(ConfigError, match="score: needs a classifier of one label, got .*which has 3"):
        llm.score("a", "b", use_tqdm=False)


@pytest.mark.parametrize("name", ["Identity", "Sigmoid"])
def test_a_cross_encoder_says_what_makes_a_score_of_its_logit(name: str, tmp_path: Path) -> None:
    kind, config = SCORERS["bert"]
    config = config.__class__(**config.to_dict(), sentence_transformers={"activation_fn": f"torch.nn.modules.linear.{name}"})
    model: BertForSequenceClassification = save(kind, config, tmp_path)
    expected = score(model, tmp_path, "a", "the")
    (found,) = load(tmp_path).score("a", "the", use_tqdm=False)
    close(found.outputs.score, expected if name == "Sigmoid" else float(torch.tensor(expected).logit()))


@pytest.mark.parametrize("name", ["bert", "embeddinggemma", "qwen3-embedding"])
def test_each_token_gets_a_vector(name: str, tmp_path: Path) -> None:
    """Products and norms behind the pooling come behind each token, and texts that are pooled may be beside them."""
    model = embedder(name, tmp_path)
    layers = write_modules(tmp_path, {"pooling_mode": "mean"}, [(32, 24, "activation.Tanh")] if name == "embeddinggemma" else [])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8]}))
    llm = load(tmp_path, max_num_batched_tokens=90)
    outputs = llm.encode(list(TEXTS), pooling_task="token_embed", use_tqdm=False)
    cut = llm.encode(list(TEXTS), PoolingParams(dimensions=8), pooling_task="token_embed", use_tqdm=False)
    for output, shorter in zip(outputs, cut, strict=True):
        expected = states(model, output.prompt_token_ids)
        for weight, bias in layers:
            expected = torch.tanh(expected @ weight.T + bias)
        close(output.outputs.data, normalize(expected, dim=-1))
        close(shorter.outputs.data, normalize(expected[:, :8], dim=-1))
    texts = [EncodedText(output.prompt_token_ids, None, number % 2 == 0) for number, output in enumerate(outputs)]
    for number, (row, output) in enumerate(zip(llm.pooling.engine.run(texts), outputs, strict=True)):
        close(row, output.outputs.data if number % 2 == 0 else embedded(llm)[number])


def test_a_warm_up_runs_every_kind_of_batch_and_changes_no_answer(bert: tuple[BertModel, Path, LLM]) -> None:
    _, folder, llm = bert
    warmed = load(folder, max_num_batched_tokens=150, max_num_seqs=6)
    planned: list[int] = []
    engine = warmed.pooling.engine
    begin = engine.attention.begin_with
    engine.attention.begin_with = lambda backends, lens: (planned.append(sum(lens)), begin(backends, lens))[1]
    engine.warm_up()
    assert {1, 2, 17, 64, 150} <= set(planned)
    assert engine.stats.num_batches == 0
    close(embedded(warmed), embedded(llm))


def close_rewards(found: Tensor, expected: Tensor) -> None:
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
        close_rewards(output.outputs.data, expected)
        assert output.prompt_token_ids == each
    rows = torch.cat([output.outputs.data for output in outputs])
    assert float((rows - rows[0]).abs().max()) > 0.05, "tokens are told apart"
    outputs[0].outputs.data += 1  # a tensor of the caller's


def test_a_judge_of_steps_says_one_thing_behind_each_of_them(tmp_path: Path) -> None:
    rewarding("process reward", tmp_path)
    llm = load(tmp_path)
    one, none = llm.reward([f"the quick{STEP} brown fox{STEP}", "the quick"], use_tqdm=False)
    assert one.outputs.data.shape == (2, 2)
    close_rewards(one.outputs.data.sum(-1), torch.ones(2))
    assert none.outputs.data.shape == (0, 2)
    (first,) = llm.reward(f"the quick{STEP} lazy dogs{STEP}", use_tqdm=False)
    close_rewards(first.outputs.data[0], one.outputs.data[0])
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


def test_the_wrong_kind_of_request_of_a_reward_model_is_one_line(tmp_path: Path) -> None:
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
