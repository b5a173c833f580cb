# shows: a batch file through /v1/files and /v1/batches
# server: --files-dir FOLDER
import io
import json
import time

from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
data = io.BytesIO("\n".join(json.dumps(line) for line in lines).encode())
file = client.files.create(file=("requests.jsonl", data), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
print([json.loads(line)["custom_id"] for line in client.files.content(batch.output_file_id).text.splitlines()])
