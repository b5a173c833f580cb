# shows: an image in a conversation
# refused: a part that is a text
from vllm import LLM

llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct")
content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
llm.chat([{"role": "user", "content": content}])
