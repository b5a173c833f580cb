# shows: OpenAI's embeddings client, with floats and base64
# model: embedder
import base64

import numpy
import requests
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
texts = ["Hello my name is", "The best thing about a cache"]
found = client.embeddings.create(input=texts, model=model)
print([len(each.embedding) for each in found.data], found.usage)
body = {"model": model, "input": texts[0], "encoding_format": "base64"}
coded = requests.post("http://localhost:8000/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]
assert numpy.allclose(numpy.frombuffer(base64.b64decode(coded), dtype="float32"), found.data[0].embedding, atol=1e-5)
