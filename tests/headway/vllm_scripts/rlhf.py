# shows: new weights into a running engine, by collective_rpc
# refused: llm.model.decoder
from vllm import LLM

llm = LLM("facebook/opt-125m", enforce_eager=True)
llm.collective_rpc("update_weight", args=("lm_head.weight",))
