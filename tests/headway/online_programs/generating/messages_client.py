# shows: Anthropic's messages API, called with httpx
import httpx

body = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
answer = httpx.post("http://localhost:8000/v1/messages", json=body, headers={"x-api-key": "none"}, timeout=60).json()
print(answer["content"][0]["text"], answer["usage"])
