# shows: transcription of a recording
# refused: reads texts alone
import io

from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
client.audio.transcriptions.create(file=("a.wav", io.BytesIO(b"RIFF")), model="openai/whisper-large-v3", language="en")
