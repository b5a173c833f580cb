"""Two ranks on two GPUs, over NCCL: the tokens of one rank, with graphs and without, and an end for a rank that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch

from headway import LLM
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.sampling.params import SamplingParams
from headway.core.system.child import module_path
from ranked_model import assert_ended, pids_of, ranked_engine
from tiny_engine import generate, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
CONFIG = {"block_size": 16, "kv_cache_memory": 2**22, "max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_gpus_write_what_one_writes(enforce_eager: bool) -> None:
    config = EngineConfig(**CONFIG, enforce_eager=enforce_eager)
    prompts = [[7] * 16 + [number, 3] for number in range(12)]
    wishes = [SamplingParams(temperature=number % 3 / 2, top_p=0.95, seed=number, max_tokens=30) for number in range(12)]
    written = []
    for size in (1, 2):
        engine = ranked_engine(size, config, device="cuda")
        written.append(tokens_of(generate(engine, prompts, wishes)))
        engine.executor.shutdown()
    assert written[0] == written[1]


def test_a_model_over_two_gpus_writes_what_it_writes_on_one(caplog: pytest.LogCaptureFixture) -> None:
    """In float32, in which the order of a sum hardly ever turns one token into another. The long prompt is summed in chunks."""
    prompts = [{"prompt_token_ids": [number + 5, 17, 3 + number * number]} for number in range(6)]
    prompts.append({"prompt_token_ids": [number * number % 997 for number in range(17_000)]})
    written = []
    caplog.set_level("INFO", "headway")
    for size in (1, 2):
        llm = LLM("qwen3-0.6b", load_format="dummy", dtype="float32", tensor_parallel_size=size, max_model_len=18_432,
                  max_num_batched_tokens=18_432, autotune_budget=0, kv_cache_memory="5GiB", skip_tokenizer_init=True)  # fmt: skip
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
        assert llm.engine.stats.num_graph_steps > 0
        written.append([each.outputs[0].token_ids for each in outputs])
        del llm
    assert written[0] == written[1]
    assert "copies: overlaps with" in caplog.text


WITHOUT_PEERS = """
import logging
from headway.core.engine.data.config import EngineConfig
from headway.core.sampling.params import SamplingParams
from ranked_model import ranked_engine
from tiny_engine import generate, tokens_of
logging.basicConfig()
engine = ranked_engine(2, EngineConfig(block_size=16, kv_cache_memory=2**22), device="cuda")
print(tokens_of(generate(engine, [[7, 3, 9]] * 2, SamplingParams(temperature=0, max_tokens=30))))
engine.executor.shutdown()
"""


def test_gpus_without_peer_access_sum_by_nccl() -> None:
    """In processes of their own, because NCCL reads its variables once per process."""
    environment, done = {**os.environ, "PYTHONPATH": module_path()}, []
    for disabled in ("0", "1"):
        options = {"env": {**environment, "NCCL_P2P_DISABLE": disabled}, "capture_output": True, "text": True, "timeout": 60}
        done.append(subprocess.run([sys.executable, "-c", WITHOUT_PEERS], check=True, **options))
    assert done[0].stdout
    assert done[0].stdout == done[1].stdout
    assert "excluding" not in done[0].stderr
    for name in ("one_shot", "two_shot", "copies"):
        assert re.search(f"excluding {name}; nccl is used instead: .*NCCL_P2P_DISABLE", done[1].stderr)


MEETS_NOBODY = """
from functools import partial
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import ExecutorLostError
from ranked_model import make_rank
processes = RankProcesses(2, "rank_that_leaves", ["cuda:0", "cuda:1"])
try:
    processes.join(partial(make_rank, config=EngineConfig(), max_decode_len=1))
except ExecutorLostError as error:
    print(error)
processes.end()
"""


def test_a_rank_that_dies_before_it_meets_the_others_fails_the_start_at_once() -> None:
    """NCCL waits for it in a thread that is left behind, with which the process must end all the same."""
    environment = {**os.environ, "PYTHONPATH": module_path()}
    done = subprocess.run([sys.executable, "-c", MEETS_NOBODY], env=environment, capture_output=True, text=True, timeout=60)
    assert re.match(r"rank 1 of 2 failed at its start: its process \d+ was killed by SIGKILL", done.stdout), done


@pytest.mark.parametrize("fault", ["kill", "raise", "stop", "loop"])
def test_a_rank_that_fails_in_a_step_ends_the_engine(fault: str) -> None:
    engine = ranked_engine(2, EngineConfig(**CONFIG, enforce_eager=True), device="cuda", fault=fault)
    pids = pids_of(engine)
    generate(engine, [[1, 2, 3]], SamplingParams(temperature=0))
    began = time.monotonic()
    with pytest.raises(ExecutorLostError, match=r"^rank 1 of 2 failed in step \d+"):
        generate(engine, [[1] * 13], SamplingParams(temperature=0))
    assert time.monotonic() - began < 10
    assert_ended(pids)
    engine.executor.shutdown()
