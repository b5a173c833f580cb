# shows: new weights for a running engine, through collective_rpc and through the model
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams


def update(worker, weights):
    return worker.model_runner.model.load_weights(weights=weights)


llm = LLM("facebook/opt-125m", enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
before = llm.generate("The capital of France is", params)[0].outputs[0].token_ids

trained = AutoModelForCausalLM.from_pretrained("facebook/opt-125m", dtype=torch.float32)
with torch.no_grad():
    for parameter in trained.parameters():
        parameter.mul_(-1)
for name, tensor in trained.named_parameters():
    llm.collective_rpc(update, args=([(name, tensor)],))
after = llm.generate("The capital of France is", params)[0].outputs[0].token_ids
assert after != before

worker = llm.llm_engine.model_executor.driver_worker
worker.model_runner.model.load_weights((name, -tensor) for name, tensor in trained.state_dict().items())
assert llm.generate("The capital of France is", params)[0].outputs[0].token_ids == before
llm.reset_prefix_cache()
print(before, after)
