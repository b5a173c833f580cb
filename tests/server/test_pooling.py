"""A server of a model that is pooled: OpenAI's client for embeddings, vLLM's rerank and score, and what is refused."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Event

import httpx
import numpy
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from headway import LLM
from headway.pooling.assembly import AsyncPooling
from headway.server.launch import ready_lines
from headway.server.options import ServerOptions
from server_clients import posted
from server_thread import pooled
from tiny_encoders import LONGEST, STEP, TEXTS, classifier, embedder, rewarding, scorer

CALLS = {"embeds": "/v1/embeddings", "classifies": "/classify", "scores": "/score"}


@pytest.mark.parametrize("which", CALLS)
def test_the_call_shown_at_the_start_works_as_printed(which: str, request: pytest.FixtureRequest) -> None:
    llm, url = request.getfixturevalue(which)
    lines = ready_lines(url, AsyncPooling(llm.pooling), ServerOptions(served_model_names=("tiny",)))
    assert f"{url}{CALLS[which]} " in lines[-1]
    assert posted(lines[-1])["data"]
    assert not [line for line in lines if line.startswith("web UI")], "a pooling model has none"


LONG = "the quick brown fox " * 40


def serving(llm: LLM, **options: object) -> AbstractContextManager[tuple[str, AsyncPooling]]:
    return pooled(llm, "tiny", "small", **options)


def load(folder: Path) -> LLM:
    return LLM(str(folder), autotune_budget=0, num_threads=1)


def served_from(save: Callable[[Path], object], folder: Path) -> Iterator[tuple[LLM, str]]:
    save(folder)
    llm = load(folder)
    with serving(llm) as (url, _):
        yield llm, url


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, str]]:
    yield from served_from(partial(embedder, "bert"), tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def classifies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, str]]:
    yield from served_from(partial(classifier, num_labels=3), tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, str]]:
    yield from served_from(partial(scorer, "bert"), tmp_path_factory.mktemp("scorer"))


@pytest.fixture
def client(embeds: tuple[LLM, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embeds[1]}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def expected(llm: LLM, texts: list[str]) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def test_openais_client_gets_embeddings_with_their_usage(embeds: tuple[LLM, str], client: OpenAI) -> None:
    """The client asks for base64 unless told otherwise, and reads both."""
    llm, _ = embeds
    tokens = sum(len(output.prompt_token_ids) for output in llm.embed(list(TEXTS), use_tqdm=False))
    for more in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="tiny", input=list(TEXTS), **more)
        assert [each.index for each in answer.data] == [*range(len(TEXTS))]
        numpy.testing.assert_allclose([each.embedding for each in answer.data], expected(llm, list(TEXTS)), atol=1e-5)
        assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("tiny", tokens, tokens)
    ids = llm.get_tokenizer()(TEXTS[1])["input_ids"]
    for given in (ids, [ids], TEXTS[1]):
        (one,) = client.embeddings.create(model="small", input=given).data
        numpy.testing.assert_allclose(one.embedding, expected(llm, [TEXTS[1]])[0], atol=1e-5)


def test_what_cannot_be_embedded_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=f"prompt 1: needs at most {LONGEST} tokens") as refused:
        client.embeddings.create(model="tiny", input=["a", LONG])
    assert refused.value.code == "context_length_exceeded"
    assert (
        client.embeddings.create(model="tiny", input=LONG, extra_body={"truncate_prompt_tokens": -1}).usage.prompt_tokens
        == LONGEST
    )
    for given in ([], "a", [[]]):
        more = {"dimensions": 8} if given == "a" else {}
        with pytest.raises(BadRequestError):
            client.embeddings.create(model="tiny", input=given, **more)
    with pytest.raises(NotFoundError, match="this server has tiny, small"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(NotFoundError, match="needs a model that generates text"):
        client.completions.create(model="tiny", prompt="a")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_are_ordered_by_their_scores(scores: tuple[LLM, str], path: str) -> None:
    llm, url = scores
    documents = [TEXTS[0], *TEXTS[3:6]]
    found = [output.outputs.score for output in llm.score(TEXTS[1], documents, use_tqdm=False)]
    order = sorted(range(4), key=lambda index: -found[index])
    answer = httpx.post(f"{url}{path}", json={"model": "tiny", "query": TEXTS[1], "documents": documents, "top_n": 3}).json()
    assert [each["index"] for each in answer["results"]] == order[:3]
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([found[index] for index in order[:3]])
    assert answer["results"][0]["document"] == {"text": documents[order[0]]}
    assert answer["usage"]["total_tokens"] > 20
    bare = httpx.post(f"{url}{path}", json={"query": "a", "documents": ["b"], "return_documents": False}).json()
    assert set(bare["results"][0]) == {"index", "relevance_score"}


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored(scores: tuple[LLM, str], embeds: tuple[LLM, str], names: tuple[str, str]) -> None:
    for llm, url in (scores, embeds):
        for first, second in ((TEXTS[1], list(TEXTS[3:6])), (list(TEXTS[:2]), list(TEXTS[3:5])), ("a", "b")):
            answer = httpx.post(f"{url}/v1/score", json={names[0]: first, names[1]: second}).json()
            found = [output.outputs.score for output in llm.score(first, second, use_tqdm=False)]
            assert [each["score"] for each in answer["data"]] == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/score", {"text_1": "a"}, "documents: needs a text or a list of texts"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "queries: needs one"),
        ("/score", {"text_1": LONG, "text_2": "c"}, "at most 64 tokens"),
        ("/v1/embeddings", {"input": "a"}, "a model that embeds texts"),
        ("/v1/embeddings", {"input": 5}, "input"),
    ],
)
def test_a_mistake_is_answered_in_one_line(scores: tuple[LLM, str], path: str, body: dict[str, object], words: str) -> None:
    answer = httpx.post(f"{scores[1]}{path}", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_models_health_and_figures(embeds: tuple[LLM, str]) -> None:
    _, url = embeds
    httpx.post(f"{url}/v1/embeddings", json={"input": "a"})
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [(each["id"], each["max_model_len"]) for each in listed] == [("tiny", LONGEST), ("small", LONGEST)]
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ping").status_code == 200
    figures = httpx.get(f"{url}/metrics").text
    assert 'headway:steps_total{backend="sdpa"' in figures
    assert "vllm:prompt_tokens_total" in figures


def test_requests_that_wait_share_batches(embeds: tuple[LLM, str], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = embeds
    engine, gate = llm.pooling.engine, Event()
    run = engine.run
    rounds: list[int] = []

    def gated(texts: list) -> object:
        gate.wait(10)
        rounds.append(len(texts))
        return run(texts)

    right = expected(llm, list(TEXTS))
    monkeypatch.setattr(engine, "run", gated)
    with serving(llm) as (url, pooling), ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(httpx.post, f"{url}/v1/embeddings", json={"input": text}) for text in TEXTS]
        time.sleep(0.3)
        gate.set()
        answers = [each.result().json()["data"][0]["embedding"] for each in asked]
        numpy.testing.assert_allclose(answers, right, atol=1e-5)
        assert len(rounds) < len(TEXTS)
        assert sum(rounds) == len(TEXTS)

        def broken(texts: list) -> object:
            raise RuntimeError("no more")

        monkeypatch.setattr(engine, "run", broken)
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 500
        monkeypatch.setattr(engine, "run", run)
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 200
    assert not pooling.has_lost_engine


def test_a_key_and_a_limit_hold_here_too(embeds: tuple[LLM, str]) -> None:
    llm, _ = embeds
    with serving(llm, api_key="secret", max_body_bytes=100, request_timeout=20.0) as (url, _):
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a" * 200}, headers=headers).status_code == 413
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_classifier_names_the_likeliest_label(classifies: tuple[LLM, str]) -> None:
    llm, url = classifies
    wanted = [each.outputs.probs for each in llm.classify(TEXTS, use_tqdm=False)]
    found = httpx.post(f"{url}/classify", json={"model": "tiny", "input": TEXTS}).json()["data"]
    assert [each["probs"] for each in found] == [pytest.approx(each, abs=1e-5) for each in wanted]
    assert [each["label"] for each in found] == [f"LABEL_{each.index(max(each))}" for each in wanted]
    assert {each["num_classes"] for each in found} == {3}
    pooled = httpx.post(f"{url}/pooling", json={"input": TEXTS}).json()["data"]
    assert [each["data"] for each in pooled] == [each["probs"] for each in found]
    assert httpx.post(f"{url}/invocations", json={"input": TEXTS}).json()["data"] == found


def test_one_path_takes_every_body_of_an_embedder(embeds: tuple[LLM, str]) -> None:
    _, url = embeds
    body = {"input": TEXTS, "encoding_format": "base64"}
    found = httpx.post(f"{url}/v1/embeddings", json=body).json()["data"]
    for path in ("/pooling", "/invocations"):
        again = httpx.post(f"{url}{path}", json=body).json()["data"]
        assert [each.get("data") or each.get("embedding") for each in again] == [each["embedding"] for each in found]
    rows = httpx.post(f"{url}/pooling", json={"input": TEXTS, "task": "token_embed"}).json()["data"]
    wanted = embeds[0].encode(list(TEXTS), pooling_task="token_embed", use_tqdm=False)
    for each, expected_rows in zip(rows, wanted, strict=True):
        numpy.testing.assert_allclose(each["data"], expected_rows.outputs.data, atol=1e-5)
    scores = httpx.post(f"{url}/invocations", json={"text_1": "fox", "text_2": TEXTS}).json()
    assert [each["object"] for each in scores["data"]] == ["score"] * len(TEXTS)
    refused = httpx.post(f"{url}/classify", json={"input": TEXTS})
    assert refused.json()["error"]["message"].startswith("classify: needs a sequence classifier")
    assert httpx.post(f"{url}/invocations", json={}).json()["error"]["code"] == "unknown_body"


@pytest.mark.slow
def test_tokens_and_steps_are_rewarded(tmp_path: Path) -> None:
    for name, text in (("reward", TEXTS[1]), ("process reward", f"the quick{STEP} brown fox{STEP}")):
        rewarding(name, tmp_path / name)
        llm = load(tmp_path / name)
        texts = [text, TEXTS[2]]
        found = [each.outputs.data for each in llm.reward(texts, use_tqdm=False)]
        with serving(llm) as (url, _):
            for path, more in (("/pooling", {"task": "token_classify"}), ("/invocations", {})):
                data = httpx.post(f"{url}{path}", json={"model": "tiny", "input": texts, **more}).json()["data"]
                for each, expected in zip(data, found, strict=True):
                    numpy.testing.assert_allclose(numpy.array(each["data"]).reshape(expected.shape), expected, atol=1e-5)
            asked = [{"role": "user", "content": [{"type": "text", "text": "fox"}]}, {"role": "assistant", "content": "dog"}]
            ids = llm.get_tokenizer()(f"user fox{STEP}assistant dog{STEP}", add_special_tokens=False)["input_ids"]
            (expected,) = llm.reward([ids], use_tqdm=False)
            answer = httpx.post(f"{url}/pooling", json={"messages": asked, "encoding_format": "base64"}).json()
            coded = numpy.frombuffer(base64.b64decode(answer["data"][0]["data"]), "<f4")
            numpy.testing.assert_allclose(coded, expected.outputs.data.flatten(), atol=1e-5)
            assert answer["usage"]["prompt_tokens"] == len(ids)
            for path, body, words in (
                ("pooling", {}, "needs either input or messages, got neither"),
                ("pooling", {"input": "a", "messages": asked}, "needs either input or messages, got both"),
                ("pooling", {"messages": asked, "chat_template": "{{ 1 }}"}, "chat_template: needs the model's own"),
                ("pooling", {"messages": [{"content": "a"}]}, "messages"),
                ("pooling", {"input": "a", "task": "plugin"}, "needs embed, classify, token_embed or token_classify"),
                ("v1/embeddings", {"input": texts}, "which rewards tokens (use reward, or /pooling)"),
            ):
                assert words in httpx.post(f"{url}/{path}", json=body).json()["error"]["message"]
