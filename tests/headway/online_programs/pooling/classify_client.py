# shows: /classify and /pooling for labels of texts
# model: classifier
import requests

body = {"input": ["the quick", "brown fox"]}
for each in requests.post("http://localhost:8000/classify", json=body, timeout=60).json()["data"]:
    print(each["label"], each["probs"], each["num_classes"])
print(requests.post("http://localhost:8000/pooling", json=body, timeout=60).json()["data"])
