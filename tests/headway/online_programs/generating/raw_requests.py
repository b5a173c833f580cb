# shows: a streamed chat by requests alone, line by line
import json

import requests

body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 6, "temperature": 0.5, "top_k": 5}
answer = requests.post("http://localhost:8000/v1/chat/completions", json=body, stream=True, timeout=60)
answer.raise_for_status()
for line in answer.iter_lines():
    if line.startswith(b"data: ") and line != b"data: [DONE]":
        print(json.loads(line[6:])["choices"][0]["delta"].get("content", ""), end="")
