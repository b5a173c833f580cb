# shows: AsyncLLMEngine: several requests at once, one of them aborted
import asyncio
import uuid

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.utils import random_uuid


async def ask(engine, prompt):
    last = None
    params = SamplingParams(temperature=0.2, max_tokens=8)
    async for output in engine.generate(prompt, params, request_id=str(uuid.uuid4())):
        last = output
    return last.outputs[0].text


async def cancelled(engine):
    request_id = random_uuid()
    async for _ in engine.generate("the", SamplingParams(max_tokens=80, ignore_eos=True), request_id):
        await engine.abort(request_id)


async def main():
    engine_args = AsyncEngineArgs(
        model="facebook/opt-125m", tensor_parallel_size=1, gpu_memory_utilization=0.8, max_num_seqs=8, disable_log_requests=True
    )
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    texts = await asyncio.gather(*(ask(engine, prompt) for prompt in ("the quick", "brown fox", "lazy dog")))
    await cancelled(engine)
    print(texts)
    assert len(texts) == 3
    engine.shutdown()


asyncio.run(main())
