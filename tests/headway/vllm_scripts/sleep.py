# shows: sleep and wake_up
# refused: del llm frees the device's memory
from vllm import LLM

llm = LLM("facebook/opt-125m", enable_sleep_mode=True)
llm.sleep(level=1)
llm.wake_up()
