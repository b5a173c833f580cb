# shows: StructuredOutputsParams: choice, regex, JSON, grammar
import json
import re

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 60

structured_outputs_choice = StructuredOutputsParams(choice=["Positive", "Negative"])
structured_outputs_regex = StructuredOutputsParams(regex=r"\w{2,8}@\w{2,8}\.com")
schema = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 6}, "year": {"type": "integer", "minimum": 1990, "maximum": 2030}},
    "required": ["brand", "year"],
    "additionalProperties": False,
}
structured_outputs_json = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
structured_outputs_grammar = StructuredOutputsParams(grammar='root ::= "SELECT " column " FROM table_1"\ncolumn ::= "a" | "b"')


def generate_output(llm, prompt, structured_outputs):
    sampling_params = SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=structured_outputs)
    outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
    return outputs[0].outputs[0].text


def main():
    llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", max_model_len=100)
    choice = generate_output(llm, "is it good?", structured_outputs_choice)
    regex = generate_output(llm, "an address:", structured_outputs_regex)
    car = generate_output(llm, "a car:", structured_outputs_json)
    grammar = generate_output(llm, "a query:", structured_outputs_grammar)
    print(choice, regex, car, grammar, sep="\n")
    assert choice in ("Positive", "Negative")
    assert re.fullmatch(r"\w{2,8}@\w{2,8}\.com", regex)
    assert 1990 <= json.loads(car)["year"] <= 2030
    assert re.fullmatch("SELECT [ab] FROM table_1", grammar)


if __name__ == "__main__":
    main()
