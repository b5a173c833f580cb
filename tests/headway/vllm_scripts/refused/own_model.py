# shows: a model class registered with ModelRegistry
# refused: model_impl='transformers'
from vllm import ModelRegistry

ModelRegistry.register_model("MyModel", "my_model:MyModel")
