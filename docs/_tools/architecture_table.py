"""Table of supported architectures in docs/models.md, determined with small random models."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from headway.core.contract.errors import ModelError
from headway.core.system.files import write_whole
from headway.models.families.families import FAMILIES
from headway.models.transformers_adapter.interface import NAME
from headway.models.transformers_adapter.load import refusal
from headway.models.transformers_adapter.model import TransformersModel

BEGIN = "<!-- architectures: made by python docs/_tools/architecture_table.py -->"
END = "<!-- architectures: end -->"
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_SMALLER = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": 6,
}
"""Sizes that are set if a configuration has them."""
_OWN: tuple[dict[str, int], ...] = ({}, {"head_dim": 16}, {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1})
"""Further settings for some configurations, tried in turn until a model runs."""
_MOST_PARAMETERS = 50e6
"""Maximum number of parameters of a test model. Models whose configuration has other names for its sizes stay large, and are
skipped."""


class Outcome(NamedTuple):
    """Result for an architecture in the transformers adapter."""

    architecture: str
    refused: str = ""
    """Reason for a refusal; "" if it is accepted, or was not tried."""
    tried: bool = True


def outcomes() -> list[Outcome]:
    """Return the result for each causal language model class of the installed transformers."""
    found: dict[str, Outcome] = {}
    for config_class in CONFIG_MAPPING.values():
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
        if model_class is None:
            continue
        outcome, before = _outcome(model_class, config_class), found.get(model_class.__name__)
        if before is None or before.refused:  # a class may have a configuration for text only besides a multimodal one
            found[model_class.__name__] = outcome
    return sorted(found.values())


def _outcome(model_class: Any, config_class: Any) -> Outcome:
    name = model_class.__name__
    try:
        refused = refusal(model_class, config_class())
    except Exception:  # it has no defaults
        return Outcome(name, tried=False)
    if refused:
        return Outcome(name, refused)
    model = tiny(model_class, config_class)
    if model is None:
        return Outcome(name, tried=False)
    try:
        adapt(model)
    except ModelError as error:
        return Outcome(name, str(error).partition(": ")[2].partition("; Headway")[0])
    return Outcome(name)


@torch.inference_mode()
def adapt(model: Any) -> TransformersModel:
    """Return a float32 model on the CPU wrapped in the adapter."""
    return TransformersModel(model, torch.float32, torch.device("cpu"))


def tiny(model_class: Any, config_class: Any) -> Any:
    """Return a small random model of a class that runs, or None if the usual names of sizes do not make one."""
    for own in _OWN:
        try:
            known = config_class()
            sizes = {**_SIZES, **{name: size for name, size in _SMALLER.items() if getattr(known, name, None) is not None}}
            if hasattr(known, "kv_lora_rank"):  # every head has its own key and value
                sizes["num_key_value_heads"] = sizes["num_attention_heads"]
            config = config_class(**{**sizes, **own}, attn_implementation=NAME)
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in model_class(config).parameters())
            if count > _MOST_PARAMETERS:
                continue
            model = model_class(config).eval()
            adapt(model)
        except ModelError:
            return model
        except Exception:  # the sizes contradict each other
            continue
        return model
    return None


def render(found: list[Outcome]) -> str:
    """Return the table as Markdown."""
    native = {family.architecture for family in FAMILIES.values()}
    accepted = {each.architecture for each in found if each.tried and not each.refused}
    refused = defaultdict(list)
    for each in found:
        if each.refused:
            refused[each.refused].append(each.architecture)
    rows = [
        f"| `{name}` | {'✓' if name in native else '–'} | {'✓' if name in accepted else '–'} |"
        for name in sorted(accepted | native)
    ]
    reasons = [f"| {reason} | {_listed(names)} |" for reason, names in sorted(refused.items(), key=lambda item: -len(item[1]))]
    untried = [each.architecture for each in found if not each.tried]
    return "\n".join(
        [
            f"Results with transformers {transformers.__version__}, from tiny random models:",
            "",
            "| architecture | Headway's decoder | through transformers |",
            "|---|---|---|",
            *rows,
            "",
            "The transformers implementation refuses these architectures:",
            "",
            "| reason: the model | architectures |",
            "|---|---|",
            *reasons,
            "",
            f"Not tried, because their configurations name sizes differently: {_listed(untried)}. "
            "Headway checks such a model when it loads it.",
        ]
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def replace_in(text: str, table: str) -> str:
    """Return the document with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main(
    docs: Annotated[Path | None, typer.Option(help="Replace the table between the markers of this document.")] = None,
) -> None:
    """Try all architectures of transformers and print which of them Headway runs."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    table = render(outcomes())
    if docs is None:
        typer.echo(table)
    else:
        write_whole(docs, replace_in(docs.read_text(encoding="utf-8"), table).encode())


if __name__ == "__main__":
    typer.run(main)
