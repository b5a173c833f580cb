# shows: GuidedDecodingParams: choice, and the JSON schema of a pydantic model
from enum import Enum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams


class Kind(str, Enum):
    sedan = "sedan"
    truck = "truck"


class Car(BaseModel):
    year: int
    kind: Kind


llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", guided_decoding_backend="xgrammar", max_model_len=200)

guided = GuidedDecodingParams(choice=["Positive", "Negative"])
outputs = llm.generate(prompts="is it good?", sampling_params=SamplingParams(guided_decoding=guided))
print(outputs[0].outputs[0].text)
assert outputs[0].outputs[0].text in ("Positive", "Negative")

guided = GuidedDecodingParams(json=Car.model_json_schema(), backend="auto")
outputs = llm.generate("a car:", SamplingParams(guided_decoding=guided, max_tokens=100, temperature=0))
print(outputs[0].outputs[0].text)
