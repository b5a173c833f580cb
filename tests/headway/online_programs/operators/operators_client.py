# shows: /version, /ping, /health, /metrics, /load and one model by name
import requests
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0]
assert client.models.retrieve(model.id).max_model_len == model.max_model_len
url = "http://localhost:8000"
assert all(requests.get(f"{url}/{path}", timeout=10).ok for path in ("version", "ping", "health", "load"))
print([line for line in requests.get(f"{url}/metrics", timeout=10).text.splitlines() if "num_requests_running" in line])
