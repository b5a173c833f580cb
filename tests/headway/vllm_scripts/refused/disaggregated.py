# shows: KV caches that are passed between engines
# refused: caches are not handed from engine to engine
from vllm import LLM
from vllm.config import KVTransferConfig

config = KVTransferConfig(kv_connector="SharedStorageConnector", kv_role="kv_both")
llm = LLM("facebook/opt-125m", kv_transfer_config=config)
