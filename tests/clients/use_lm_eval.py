# pip: lm-eval[api] tokenizers transformers
"""lm-evaluation-harness: its client of /v1/completions, whose answers it scores by log-probabilities of the prompt's tokens."""

import os

from lm_eval.models.openai_completions import LocalCompletionsAPI


class Request:
    """What the harness asks a model."""

    def __init__(self, *args):
        self.args = args


model = LocalCompletionsAPI(
    model="smollm2", base_url=f"{os.environ['OPENAI_BASE_URL']}/completions", tokenizer_backend=None, max_gen_toks=8, batch_size=1
)
(text,) = model.generate_until([Request("The capital of France is", {"until": ["\n"], "max_gen_toks": 5, "temperature": 0})])
assert "Paris" in text, text
