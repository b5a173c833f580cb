# shows: /pooling with a text, and with a conversation in the model's chat template
# model: rewards
import requests

url = "http://localhost:8000"
model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
chat = [{"role": "user", "content": [{"type": "text", "text": "the quick brown fox"}]}]
for prompt in ({"model": model, "input": "the quick brown fox"}, {"model": model, "messages": chat}):
    answer = requests.post(f"{url}/pooling", json=prompt, timeout=60)
    assert answer.status_code == 200, answer.text
    print(answer.json()["data"])
