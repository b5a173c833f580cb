# shows: images, with limits and processor options
# refused: models read text alone
from vllm import LLM, SamplingParams
from vllm.assets.image import ImageAsset

llm = LLM(model="facebook/opt-125m", limit_mm_per_prompt={"image": 1}, mm_processor_kwargs={"num_crops": 4})
image = ImageAsset("cherry_blossom").pil_image
llm.generate({"prompt": "<image> what is it?", "multi_modal_data": {"image": image}}, SamplingParams(max_tokens=4))
