# shows: LLM.chat with a custom template and a list of conversations
from vllm import LLM, SamplingParams

llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", max_model_len=200, enforce_eager=True)
sampling_params = llm.get_default_sampling_params()
assert isinstance(sampling_params, SamplingParams)

conversation = [
    {"role": "system", "content": "the fox"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "over the dog"},
    {"role": "user", "content": [{"type": "text", "text": "jumps"}]},
]
outputs = llm.chat(conversation, sampling_params=sampling_params, use_tqdm=False)
for output in outputs:
    print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
assert outputs[0].prompt.endswith("user: jumps\nassistant:")

conversations = [conversation for _ in range(3)]
outputs = llm.chat(conversations, SamplingParams(temperature=0.5, max_tokens=None), use_tqdm=False)
assert len(outputs) == 3

template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
outputs = llm.chat(conversation[:1], sampling_params, use_tqdm=False, chat_template=template)
assert outputs[0].prompt == "[the fox]"
