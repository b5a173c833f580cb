"""Every form a prompt may have, what is refused, and chat templates that write BOS themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BatchEncoding

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError, PromptError
from headway.requests.chat_template import chat_prompt
from headway.requests.prompts import ParsedPrompt, parse_prompts

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
        ([], {}, "messages: needs at least one message"),
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


def test_a_chat_begins_with_one_bos(bos_tokenizer: Any) -> None:
    (prompt,) = parse_prompts(chat_prompt(bos_tokenizer, "tiny", "the fox"))
    assert prompt.text == "<eos>user: the fox\na:"
    assert prompt.token_ids.count(bos_tokenizer.bos_token_id) == 1
    assert bos_tokenizer.decode(prompt.token_ids) == prompt.text


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
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat([{"role": "user", "content": "the fox"}], greedy, use_tqdm=False)
    monkeypatch.setattr(llm.driver.validator, "tokenizer", bos_tokenizer)
    conversation = [{"role": "user", "content": "the fox"}]
    (one,) = llm.chat(conversation, greedy, use_tqdm=False)
    two = llm.chat([conversation, conversation], greedy, use_tqdm=False)
    assert one.prompt == "<eos>user: the fox\na:"
    assert [output.prompt_token_ids for output in two] == [one.prompt_token_ids] * 2
    assert one.prompt_token_ids.count(bos_tokenizer.bos_token_id) == 1
