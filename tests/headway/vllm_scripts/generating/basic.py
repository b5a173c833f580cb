# shows: prompts and sampling parameters
from vllm import LLM, SamplingParams

prompts = ["the quick brown fox", "jumps over", "the lazy dog is", "bar ber bir"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="facebook/opt-125m", dtype="half", tensor_parallel_size=1, trust_remote_code=False)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) <= 16 for output in outputs)


if __name__ == "__main__":
    main()
