# shows: reranking with the paths of Cohere and Jina
# model: embedder
import requests

body = {
    "query": "What is the capital of France?",
    "documents": ["Brasilia", "The capital of France is Paris", "Horses"],
    "top_n": 2,
}
for path in ("rerank", "v1/rerank", "v2/rerank"):
    results = requests.post(f"http://localhost:8000/{path}", json=body, timeout=60).json()["results"]
    assert len(results) == 2
print(results)
