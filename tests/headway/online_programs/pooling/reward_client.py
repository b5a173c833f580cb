# shows: rewards of tokens through /pooling
# model: rewards
import requests

body = {"input": ["the quick", "brown fox"], "task": "token_classify"}
for each in requests.post("http://localhost:8000/pooling", json=body, timeout=60).json()["data"]:
    print(each["index"], each["data"][-1], len(each["data"]))
