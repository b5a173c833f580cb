# shows: several LoRA adapters in one batch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(model="facebook/opt-125m", enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2)
params = SamplingParams(temperature=0, max_tokens=4)
sql = LoRARequest("sql", 1, "adapter")
for output in llm.generate(["the", "the"], params, lora_request=[sql, None]):
    print(output.lora_request.lora_name if output.lora_request else "the model", output.outputs[0].text)
