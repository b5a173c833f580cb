# shows: LLMEngine: add_request, step, abort_request
# argv: --model facebook/opt-125m
import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.usage.usage_lib import UsageContext


def test_prompts():
    return [
        ("the quick brown", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=12)),
        ("jumps over", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=10)),
        ("the lazy dog", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=9)),
    ]


def process_requests(engine, waiting):
    request_id, finished = 0, {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, sampling_params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                print(output)
                finished[output.request_id] = output
    return finished


def main():
    parser = argparse.ArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args()), usage_context=UsageContext.ENGINE_CONTEXT)
    finished = process_requests(engine, test_prompts())
    assert len(finished) == 3
    assert len(finished["2"].outputs) == 2
    engine.add_request("again", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=50))
    engine.step()
    engine.abort_request(["again"])
    assert engine.get_num_unfinished_requests() == 0


if __name__ == "__main__":
    main()
