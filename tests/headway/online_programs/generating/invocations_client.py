# shows: SageMaker's /invocations with a chat and with a prompt
import requests

for body in ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, {"prompt": "Hi", "max_tokens": 4}):
    print(requests.post("http://localhost:8000/invocations", json=body, timeout=60).json()["choices"])
