# shows: AsyncLLM: streaming with RequestOutputKind.DELTA
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine, prompt, request_id):
    sampling_params = SamplingParams(max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            pieces.append(completion.text)
        if output.finished:
            break
    return "".join(pieces)


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="facebook/opt-125m", enforce_eager=True, disable_log_stats=True))
    try:
        for number, prompt in enumerate(["the quick", "over the lazy"], 1):
            text = await stream_response(engine, prompt, f"stream-{number}")
            print(text)
            assert text
    finally:
        engine.shutdown()


asyncio.run(main())
