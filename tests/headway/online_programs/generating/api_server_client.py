# shows: the client of vLLM's simple api_server: /generate, with and without streaming
import json

import requests

body = {"prompt": "San Francisco is a", "n": 2, "temperature": 0.0, "max_tokens": 8, "stream": False}
texts = requests.post("http://localhost:8000/generate", json=body, timeout=60).json()["text"]
assert all(text.startswith("San Francisco is a") for text in texts)
answer = requests.post("http://localhost:8000/generate", json={**body, "stream": True}, stream=True, timeout=60)
for chunk in answer.iter_lines(chunk_size=8192, decode_unicode=False, delimiter=b"\n"):
    if chunk:
        print(json.loads(chunk.decode())["text"])
