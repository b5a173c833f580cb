"""Any value in any field of a request: it is answered, or refused in one line as the client's fault; never as a fault of ours."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from headway.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server_thread import Running

BODIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "the", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "the"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [3]}),
}
NUMBERS = [0, 1, -1, 2, 5, 63, 299, 300, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.0, 0.5, 1e-300, 1e39, 1e308, -1.5]
TEXTS = ["", "a", "auto", "none", "5", "\x00", "\u2028", "<eos>", "{{ 1 }}", "{% for i in x %}", "a" * 300]
SCALARS = st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
NAMES = ["type", "role", "content", "text", "name", "function", "arguments", "id", "tool_calls", "schema", "json_schema", "regex"]
NAMES += ["choice", "grammar", "json", "json_object", "include_usage", "messages", "self", "tools", "0", "5", "299", "bos_token"]
NAMES += ["add_generation_prompt", "documents", "range", "raise_exception", "loop", "disable_any_whitespace", "parameters"]
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_no_field_of_a_request_makes_a_fault(served: Running, path: str, examples: int) -> None:
    kind, usual = BODIES[path]
    fields = st.sampled_from(sorted(field.alias or name for name, field in kind.model_fields.items()))
    messages = st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), min_size=1, max_size=2)
    changes = st.dictionaries(fields, JSON, min_size=1, max_size=3) | st.fixed_dictionaries({"messages": messages})

    with httpx.Client(base_url=served.url, timeout=30) as http:

        @seed(19)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(changes)
        def check(changed: dict[str, Any]) -> None:
            body = json.dumps({**usual, **changed}).encode()
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            told = answer.text
            assert answer.status_code in (200, 400, 404), (changed, told)
            assert '"server_error"' not in told, (changed, told)  # in a stream that has begun
            if answer.status_code != 200:
                message = answer.json()["error"]["message"]
                assert "\n" not in message, (changed, told)
                assert len(message) < 600, (changed, told)

        check()
