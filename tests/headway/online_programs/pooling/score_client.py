# shows: /score of one pair, of one text with several, and of several pairs
# model: embedder
import requests

for pair in (("a", "b"), ("a", ["b", "c"]), (["a", "b"], ["c", "d"])):
    body = {"text_1": pair[0], "text_2": pair[1]}
    print(requests.post("http://localhost:8000/score", json=body, timeout=60).json()["data"])
