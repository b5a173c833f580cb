# shows: multi_modal_data beside a prompt
# refused: models read text alone
from vllm import LLM

llm = LLM(model="facebook/opt-125m")
llm.generate({"prompt": "<image> what is it?", "multi_modal_data": {"image": object()}})
