# shows: embeddings from a server for a generation model
# refused: --runner pooling
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
client.embeddings.create(input=["Hello"], model=client.models.list().data[0].id)
