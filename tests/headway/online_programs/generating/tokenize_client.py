# shows: /tokenize and /detokenize for a text and a conversation
import requests

url = "http://localhost:8000"
model = requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
ids = requests.post(f"{url}/tokenize", json={"model": model, "prompt": "the quick brown"}, timeout=10).json()["tokens"]
text = requests.post(f"{url}/detokenize", json={"model": model, "tokens": ids}, timeout=10).json()["prompt"]
assert text == "the quick brown"
chat = {"model": model, "messages": [{"role": "user", "content": "fox"}]}
print(requests.post(f"{url}/tokenize", json=chat, timeout=10).json())
