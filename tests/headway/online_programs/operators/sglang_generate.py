# shows: SGLang's /generate: a text, a batch, a stream, structured output
import json

import requests

url = "http://localhost:30000"
assert requests.get(f"{url}/get_model_info", timeout=10).json()["is_generation"]
params = {"temperature": 0, "max_new_tokens": 16, "stop": ["\n\n\n"]}
print(requests.post(f"{url}/generate", json={"text": "The capital of France is", "sampling_params": params}, timeout=60).json())
batch = requests.post(f"{url}/generate", json={"text": ["Hello", "A cache is"], "sampling_params": params}, timeout=60).json()
assert len(batch) == 2
stream = requests.post(
    f"{url}/generate", json={"text": "Hello", "sampling_params": params, "stream": True}, stream=True, timeout=60
)
written = 0
for line in stream.iter_lines(decode_unicode=True):
    if line and line.startswith("data:"):
        if line == "data: [DONE]":
            break
        text = json.loads(line[5:].strip("\n"))["text"]
        print(text[written:], end="", flush=True)
        written = len(text)
