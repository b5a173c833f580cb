# shows: start_profile and stop_profile
import os
import time

os.environ["VLLM_TORCH_PROFILER_DIR"] = "./profile"

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    profiler = {"profiler": "torch", "torch_profiler_dir": "./profile"}
    llm = LLM(model="facebook/opt-125m", tensor_parallel_size=1, profiler_config=profiler)
    llm.start_profile()
    outputs = llm.generate(["the quick", "lazy dog"], SamplingParams(temperature=0.8, top_p=0.95))
    llm.stop_profile()
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
    time.sleep(0.1)
    assert os.listdir("profile")
    del os.environ["VLLM_TORCH_PROFILER_DIR"]
