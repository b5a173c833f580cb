# shows: an image in a chat
# refused: a part that is a text
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
content = [{"type": "text", "text": "What is in this image?"}, image]
client.chat.completions.create(
    model=client.models.list().data[0].id, messages=[{"role": "user", "content": content}], max_tokens=4
)
