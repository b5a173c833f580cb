"""The attention specs of a model of transformers without its weights: a probe over tensors that have shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headway.core.contract.errors import HeadwayError, ModelError
from headway.core.contract.spec import AttentionSpec
from headway.models.transformers_adapter import interface, probe
from headway.models.transformers_adapter.load import causal_lm_class, quiet
from headway.models.transformers_adapter.model import spec_of


def adapted_specs(config: Any, dtype: torch.dtype, device: torch.device) -> Sequence[AttentionSpec]:
    """One spec for each layer, as `device` is to run it. config: of transformers. Sinks, which are weights, are 0.

    :raises ModelError: the adapter does not take the model, or transformers cannot make it without memory for its weights.
    """
    model_class = causal_lm_class(config)
    try:
        with quiet(), torch.inference_mode(), torch.device("meta"):
            options = {"dtype": dtype, "attn_implementation": interface.NAME}
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)  # type: ignore[no-untyped-call]
            count = probe.NUM_TOKENS
            ids, mask = torch.zeros(1, count, dtype=torch.int64), torch.ones(1, 1, count, count, dtype=torch.bool)

            def forward() -> Tensor:
                logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True).logits
                return logits

            with probe.probing(model, interface.NAME):
                _, calls = probe.run(model, forward)
        if not calls:
            raise ModelError(f"{model_class.__name__}: never calls its attention through transformers' attention interface")
        return [spec_of(call, dtype, device) for call in calls]
    except HeadwayError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model {model_class.__name__}: its layers show only with weights ({type(error).__name__}: {words})"
        ) from error
