# shows: beam search in a server
# refused: use_beam_search
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
client.completions.create(model=model, prompt="a", n=2, extra_body={"use_beam_search": True})
