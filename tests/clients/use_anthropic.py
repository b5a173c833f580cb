# pip: anthropic
"""Anthropic's client: messages, whole and streamed, tools, and the count of tokens."""

from anthropic import Anthropic, NotFoundError

client = Anthropic()
GREEDY = {"temperature": 0}  # releases from 2 on have no argument for it
ask = [{"role": "user", "content": "What is the capital of France?"}]
message = client.messages.create(model="smollm2", max_tokens=12, messages=ask, extra_body=GREEDY)
assert "Paris" in message.content[0].text, message
with client.messages.stream(model="smollm2", max_tokens=12, messages=ask, extra_body=GREEDY) as stream:
    assert "".join(stream.text_stream) == message.content[0].text
    assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
count = client.messages.count_tokens(model="smollm2", messages=ask)
assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
tool = {
    "name": "look_up",
    "description": "Look a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"enum": ["fox"]}}, "required": ["word"]},
}
called = client.messages.create(
    model="smollm2",
    max_tokens=60,
    messages=ask,
    tools=[tool],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
    extra_body=GREEDY,
)
(block,) = [each for each in called.content if each.type == "tool_use"]
assert (called.stop_reason, block.name, block.input) == ("tool_use", "look_up", {"word": "fox"}), called
try:
    client.messages.create(model="none", max_tokens=1, messages=ask)
except NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("there is no such model")
