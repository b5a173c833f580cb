"""Every form a prompt may have, embeddings too, what is refused, and chat templates that write BOS themselves."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, Gemma2Config, GPT2Config

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError, PromptError
from headway.requests.chat_template import chat_prompt
from headway.requests.prompts import ParsedPrompt, parse_prompts
from headway.server.options import ServerOptions
from server_thread import running

IDS = [1, 2, 3]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def ids(*rows: list[int]) -> list[ParsedPrompt]:
    return [ParsedPrompt(None, row) for row in rows]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("fox", [ParsedPrompt("fox", None)]),
        ({"prompt": "fox"}, [ParsedPrompt("fox", None)]),
        ({"prompt": "fox", "multi_modal_data": None}, [ParsedPrompt("fox", None)]),
        ({"prompt_token_ids": IDS}, ids(IDS)),
        ({"prompt": "fox", "prompt_token_ids": IDS}, [ParsedPrompt("fox", IDS)]),
        (
            ["fox", {"prompt": "dog"}, {"prompt_token_ids": IDS}],
            [ParsedPrompt("fox", None), ParsedPrompt("dog", None), *ids(IDS)],
        ),
        (IDS, ids(IDS)),
        (tuple(IDS), ids(IDS)),
        ([IDS, [7]], ids(IDS, [7])),
        (np.array(IDS), ids(IDS)),
        (list(np.array(IDS)), ids(IDS)),
        (np.array([[1, 2], [3, 4]]), ids([1, 2], [3, 4])),
        (torch.tensor(IDS), ids(IDS)),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), ids([1, 2], [3, 4])),
        ([torch.tensor(IDS), np.array([7])], ids(IDS, [7])),
        (BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}), ids(IDS)),
        (BatchEncoding({"input_ids": [[0, 0, 5], IDS], "attention_mask": [[0, 0, 1], [1, 1, 1]]}), ids([5], IDS)),
        ({"input_ids": torch.tensor([IDS])}, ids(IDS)),
        ([{"input_ids": torch.tensor([IDS]), "attention_mask": torch.tensor([[1, 1, 0]])}], ids([1, 2])),
        ([], []),
        (iter(["fox"]), [ParsedPrompt("fox", None)]),
    ],
)
def test_a_prompt_may_have_each_of_these_forms(prompts: object, expected: list[ParsedPrompt]) -> None:
    parsed = parse_prompts(prompts)
    assert parsed == expected
    assert all(type(token) is int for prompt in parsed for token in prompt.token_ids or ())


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompt: needs .* got a NoneType"),
        (5, "prompt: needs .* got a int"),
        (b"fox", "prompt: needs .* got a bytes"),
        *(
            (wrong, "token ids")
            for wrong in ([b"ab"], bytearray(b"ab"), memoryview(b"ab"), {"prompt_token_ids": memoryview(b"a")})
        ),
        ([None], "prompt 0: needs .* got a NoneType"),
        (["fox", 2.5], "prompt 1: needs .* got a float"),
        ([[1, "a"]], "prompt 0: needs .* of str"),
        ([True, False], "prompt 0: needs .* of bool"),
        (np.array([1.5]), "prompt 0: needs .* of float"),
        (torch.tensor(3), "prompt 0: needs .* got a int"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), "prompt 0: needs .* of list"),
        (["fox", {}], "prompt 1: needs .* without either key"),
        ({"text": "fox"}, "prompt 0: needs .* with 'text'"),
        ({"prompt": ["fox"]}, 'prompt 0: needs a text under "prompt", got a list'),
        ({"prompt": "fox", "multi_modal_data": {"image": 1}}, "prompt 0: needs .* 'multi_modal_data'"),
        ({"input_ids": [1], "pixel_values": [2]}, "prompt 0: needs .* 'pixel_values'"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "prompt 0: needs an attention_mask with a number for each"),
        ({"input_ids": [1, 2], "attention_mask": [[1, 1]]}, "prompt 0: needs an attention_mask with a number for each"),
        ({"input_ids": [1, 2], "attention_mask": 1}, "prompt 0: needs an attention_mask with a number for each"),
        (range(10**13), "prompts: needs .* longer than memory holds"),
        ([range(10**30)], "prompt 0: needs .* longer than memory holds"),
        (torch.tensor([1, 2], device="meta"), "prompt: needs .* got a Tensor that cannot be read"),
        ([np.array([[1], [2]])], "prompt 0: needs one prompt in each place of the list, got a batch of 2"),
    ],
)
def test_invalid_prompt_is_refused_with_its_index_and_type(prompts: object, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        parse_prompts(prompts)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), attn_backend="sdpa", num_threads=1, kv_cache_memory=2**20)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (5, {}, "messages: needs a list of messages, got a int"),
        (None, {}, "messages: needs a list of messages, got a NoneType"),
        ({"role": "user", "content": "fox"}, {}, "messages: needs a list of messages, got a dict"),
        ([[{"role": "user", "content": "fox"}], 5], {}, "messages: needs a list of messages, got a int"),
        ("fox", {"chat_template_kwargs": 5}, "chat_template_kwargs: needs a mapping"),
    ],
)
def test_a_chat_without_messages_is_refused(messages: Any, options: dict[str, Any], words: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=words):
        llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False, chat_template=TEMPLATE, **options)


def test_a_text_is_one_conversation(llm: LLM) -> None:
    asked: list[Any] = ["the fox", [{"role": "user", "content": "the fox"}], iter([{"role": "user", "content": "the fox"}])]
    found = [llm.chat(each, SamplingParams(max_tokens=2), use_tqdm=False, chat_template=TEMPLATE) for each in asked]
    assert [[output.prompt for output in outputs] for outputs in found] == [["user: the fox\na:"]] * 3


@pytest.fixture(scope="module")
def bos_tokenizer(tiny_model_folder: Path) -> Any:
    """A tokenizer that adds BOS to a text, and whose chat template writes BOS as well: Llama's are like this."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder, bos_token="<eos>")
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", start)])
    tokenizer.chat_template = TEMPLATE
    assert tokenizer("fox")["input_ids"][0] == start
    return tokenizer


def test_messages_are_a_conversation(bos_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    (prompt,) = parse_prompts(chat_prompt(bos_tokenizer, "tiny", messages, add_generation_prompt=False))
    assert prompt.text == "<eos>system: be brief\nuser: the fox\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "the\nfox"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text or p }}{% endfor %}{% endfor %}", "thefox"),
    ],
)
def test_texts_of_a_message_are_lines_unless_the_template_joins_them(bos_tokenizer: Any, template: str, text: str) -> None:
    fox = ({"type": "text", "text": "fox"}, {"type": "output_text", "text": "fox"}, {"type": "refusal", "refusal": "fox"}, "fox")
    for part in fox:
        messages = [{"role": "user", "content": [{"type": "text", "text": "the"}, part]}]
        (prompt,) = parse_prompts(chat_prompt(bos_tokenizer, "tiny", messages, chat_template=template))
        assert prompt.text == text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        (["hello"], "messages.0: needs a message such as .*, got 'hello'"),
        ([{"content": "hello"}], "messages.0.role: needs a text, got none"),
        ([{"role": "user"}], "messages.0.content: needs a text or a list of parts, got None"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages.0.content.0: needs a part that is a text \(.*, got 'image_url'",
        ),
    ],
    ids=str,
)
def test_invalid_messages_are_refused(bos_tokenizer: Any, messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        chat_prompt(bos_tokenizer, "tiny", messages)


def test_error_of_a_chat_template_is_one_line(bos_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bos_tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="the chat template accepts, got TemplateError: roles must alternate"):
        chat_prompt(bos_tokenizer, "tiny", "hello")
    monkeypatch.setattr(bos_tokenizer, "chat_template", "{% if x %}\n{% endif %")
    words = r"^chat template: needs a template that Jinja reads, got .* in line 2 \(correct the model's chat_template.jinja"
    with pytest.raises(PromptError, match=words):
        chat_prompt(bos_tokenizer, "a model", "Hi")


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "macros that call each other without end"),
        ("{{ 9 ** 9 ** 9 }}", r"a power \(\*\*\)"),
        ("{{ 'a' * 10_000_000_000 }}", r"a product \(\*\) and the number 10_000_000_000"),
        ("{% for a in range(1000000000) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_chat_template_that_computes_too_much_is_refused_in_one_line(
    bos_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str, got: str
) -> None:
    monkeypatch.setattr(bos_tokenizer, "chat_template", template)
    with pytest.raises(PromptError, match=f"got .*{got}") as caught:
        chat_prompt(bos_tokenizer, "tiny", "hello")
    assert "\n" not in str(caught.value)
    harmless = (
        "{{ '=' * 40 }}{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages * 3 %}{{ f( **{'x': m.content}) }}{% endfor %}"
    )
    monkeypatch.setattr(bos_tokenizer, "chat_template", harmless)
    assert chat_prompt(bos_tokenizer, "tiny", "hello")["prompt"] == "=" * 40 + "hello" * 3  # type: ignore[call-overload, index]


def test_llm_takes_every_form_and_chats(tiny_model_folder: Path, bos_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def generate(prompts: Any) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]

    (expected,) = generate("the fox")
    assert generate({"prompt": "the fox"}) == generate(llm.tokenizer("the fox")) == [expected]
    assert generate(llm.tokenizer(["the fox"] * 2, return_tensors="pt")) == [expected] * 2
    assert generate(["the fox", llm.tokenizer("the fox")["input_ids"]]) == [expected] * 2
    assert generate([]) == []
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat([{"role": "user", "content": "the fox"}], greedy, use_tqdm=False)
    monkeypatch.setattr(llm.driver.validator, "tokenizer", bos_tokenizer)
    conversation = [{"role": "user", "content": "the fox"}]
    (one,) = llm.chat(conversation, greedy, use_tqdm=False)
    two = llm.chat([conversation, conversation], greedy, use_tqdm=False)
    assert one.prompt == "<eos>user: the fox\na:"
    assert [output.prompt_token_ids for output in two] == [one.prompt_token_ids] * 2
    assert one.prompt_token_ids.count(bos_tokenizer.bos_token_id) == 1


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [list(range(1, 60)), [5], list(range(1, 40))]


@pytest.fixture(scope="module")
def own(tiny_model_folder: Path) -> LLM:
    options = {"kv_cache_memory": "8MiB", "num_threads": 1, "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return LLM(str(tiny_model_folder), enable_prompt_embeds=True, **options)


@pytest.fixture(scope="module")
def table(tiny_model_folder: Path) -> Tensor:
    return load_file(tiny_model_folder / "model.safetensors")["model.embed_tokens.weight"]


def test_rows_of_the_embedding_write_what_their_ids_write(own: LLM, table: Tensor) -> None:
    plain = own.generate(PROMPTS, GREEDY, use_tqdm=False)
    own.reset_prefix_cache()
    both = [{"prompt_embeds": table[ids]} if number % 2 == 0 else ids for number, ids in enumerate(PROMPTS)]
    found = own.generate(both, GREEDY, use_tqdm=False)  # in chunks of 32 tokens, beside a prompt of ids
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert len(found[0].prompt_token_ids) == 59


def test_equal_rows_share_the_cache_and_others_do_not(own: LLM, table: Tensor) -> None:
    own.reset_prefix_cache()
    rows = table[PROMPTS[0]]
    first, again, other, zeros = (
        own.generate(each, GREEDY, use_tqdm=False)[0]
        for each in ({"prompt_embeds": rows}, {"prompt_embeds": rows[None]}, {"prompt_embeds": rows.flip(0)}, [0] * 59)
    )
    assert (first.num_cached_tokens, other.num_cached_tokens, zeros.num_cached_tokens) == (0, 0, 0)
    assert again.num_cached_tokens > 40
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(4, 64), r"needs \[num_tokens, 32\], got \[4, 64\]"),
        (torch.zeros(4), r"needs a dense tensor \[num_tokens, hidden_size\].* got \[4\] of float32"),
        (torch.zeros(4, 32, dtype=torch.int64), "got .*int64"),
        (torch.zeros(0, 32), "at least one token"),
        (torch.full((4, 32), torch.nan), "needs finite numbers"),
        ("text", "needs a torch.Tensor .* got a str"),
    ],
    ids=str,
)
def test_other_rows_are_refused(own: LLM, rows: object, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        own.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
    assert not own.engine.has_unfinished


def test_parameters_that_read_ids_are_refused(own: LLM, llm: LLM, table: Tensor) -> None:
    for params in (SamplingParams(prompt_logprobs=1), SamplingParams(repetition_penalty=1.5)):
        with pytest.raises(ConfigError, match="prompt_embeds: needs no prompt_logprobs and no repetition_penalty"):
            own.generate({"prompt_embeds": table[:3]}, params, use_tqdm=False)
    with pytest.raises(PromptError, match="prompt 0: needs an engine with enable_prompt_embeds=True"):
        llm.generate({"prompt_embeds": table[:3]}, GREEDY, use_tqdm=False)


def test_a_prompt_is_cut_at_its_end(own: LLM, table: Tensor) -> None:
    cut = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, truncate_prompt_tokens=5)
    (found,) = own.generate({"prompt_embeds": table[PROMPTS[0]]}, cut, use_tqdm=False)
    (plain,) = own.generate([PROMPTS[0]], cut, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, max_position_embeddings=64),
        GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ],
    ids=lambda config: config.model_type,
)
def test_rows_are_those_that_the_embedding_gives(config: Gemma2Config | GPT2Config, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    options = {"kv_cache_memory": "8MiB", "num_threads": 1, "skip_tokenizer_init": True, "dtype": "float32"}
    own = LLM(str(tmp_path), enable_prompt_embeds=True, model_impl="headway", **options)
    ids = list(range(1, 20))
    rows = model.get_input_embeddings()(torch.tensor(ids))
    (plain,) = own.generate([ids], GREEDY, use_tqdm=False)
    (found,) = own.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


def encoded(value: object) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_server_takes_embeddings(own: LLM, table: Tensor) -> None:
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    rows = [encoded(table[ids]) for ids in PROMPTS[:2]]
    with running(own, ServerOptions(served_model_names=("tiny",))) as server, httpx.Client(base_url=server.url) as http:

        def post(**more: object) -> httpx.Response:
            return http.post("/v1/completions", json={**body, **more}, timeout=30)

        plain = post(prompt=PROMPTS[:2]).json()
        found = post(prompt="", prompt_embeds=rows).json()
        assert [each["text"] for each in found["choices"]] == [each["text"] for each in plain["choices"]]
        assert found["usage"]["prompt_tokens"] == 60
        assert post(prompt_embeds=rows[0]).json()["choices"][0]["text"] == plain["choices"][0]["text"]
        mixed = post(prompt=[PROMPTS[1]], prompt_embeds=rows[0]).json()
        assert [each["text"] for each in mixed["choices"]] == [each["text"] for each in plain["choices"]]
        for more, words in (
            (
                {"prompt_embeds": "no base64!"},
                r"needs base64 of torch\.save\(tensor\), floating point .*, got text that is not base64$",
            ),
            ({"prompt_embeds": "AAAA"}, r"got 3 bytes in which torch\.load\(weights_only=True\) finds no tensor$"),
            ({"prompt_embeds": rows[0][:400]}, "got 300 bytes in which"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32, dtype=torch.int64))}, r"of float32, .*, got \[2, 32\] of int64$"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32).to(torch.float8_e4m3fn))}, r"got \[2, 32\] of float8_e4m3fn$"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32, device="meta"))}, r"got \[2, 32\] of float32 without elements"),
            ({"prompt_embeds": encoded(torch.zeros(2, 32).to_sparse())}, r"got \[2, 32\] of float32, sparse_coo"),
            ({"prompt_embeds": encoded(torch.zeros(32))}, r"got \[32\] of float32"),
            ({"prompt_embeds": encoded(torch.zeros(2, 31))}, r"needs \[num_tokens, 32\], got \[2, 31\]"),
            ({"prompt_embeds": encoded({"a": 1})}, "needs a torch.Tensor"),
            ({"prompt_embeds": encoded(torch.zeros(2, 1).expand(2, 32))}, "whose rows follow one another"),
            ({"prompt_embeds": rows[0], "echo": True}, "needs no echo"),
            ({}, "prompt: needs a text, token ids, or prompt_embeds"),
        ):
            refused = post(**more)
            assert refused.status_code == 400
            assert re.search(words, refused.json()["error"]["message"])


def test_a_salt_beside_a_prompt_keeps_its_prefix_apart(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder))
    prompts = [{"prompt_token_ids": [5] * 60, "cache_salt": salt} for salt in ("one", "one", "other", None)]
    found = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for prompt in prompts]
    assert found == [0, 59, 0, 0]
    with pytest.raises(ConfigError, match="cache_salt: needs a text that is not empty, or None"):
        llm.generate({"prompt_token_ids": [5], "cache_salt": 7}, GREEDY)
