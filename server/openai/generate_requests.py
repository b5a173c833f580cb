"""The bodies of /generate: SGLang's own, and that of vLLM's small server, as the request that /v1/completions would get."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import SamplingParams
from headway.core.system.text import shown
from headway.server.openai.requests import CompletionRequest, TokenIds
from headway.server.unknown_fields import Fields

_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""SGLang's name of a sampling parameter -> OpenAI's or vLLM's."""
_SAME: Final = (
    *("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "logit_bias"),
    *("presence_penalty", "repetition_penalty", "skip_special_tokens"),
)
_FORMS: Final = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's form of an answer -> the field of structured_outputs."""
_NOT_READ: Final = ("spaces_between_special_tokens", "no_stop_trim", "stream_interval", "custom_params")
"""Parameters that are taken at the value which asks for nothing."""


class NativeRequest(Fields):
    """SGLang's body: a text, token ids, or a list of either."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    rid: str | list[str] | None = None
    """Not read: an answer has an id of the server's own."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First token of the prompt whose log-probability is told; -1: that of none."""
    top_logprobs_num: int = Field(default=0, ge=0)
    return_text_in_logprobs: bool = False

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list."""
        listed = isinstance(self.text, list) or (bool(self.input_ids) and isinstance(self.input_ids[0], list))  # type: ignore[index]
        return listed or (self.sampling_params.get("n") or 1) > 1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are told."""
        return self.return_logprob and self.logprob_start_len >= 0

    def as_completion(self) -> CompletionRequest:
        """The request of the same prompts and parameters for /v1/completions.

        :raises ConfigError: no prompt or two, or a parameter that is unknown or cannot be served.
        """
        if (self.text is None) == (self.input_ids is None):
            raise ConfigError("text", "a text or input_ids, and not both", "both" if self.text is not None else "neither")
        given, forms = dict(self.sampling_params), {}
        for name, own in _FORMS.items():
            if (value := given.pop(name, None)) is not None:
                forms[own] = value
        fields: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
        fields |= {own: given.pop(name) for name, own in _NAMES.items() if name in given}
        for name in _NOT_READ:
            if given.pop(name, None) and name == "no_stop_trim":
                fields["include_stop_str_in_output"] = True
        wrong = next((name for name, value in given.items() if value is not None), None)
        if wrong is not None:
            raise ConfigError("sampling_params", f"{', '.join((*_SAME, *_NAMES, *_FORMS))}", shown(wrong))
        if fields.get("max_tokens", 1) == 0:  # what SGLang's `select` asks for: the prompt's log-probabilities alone
            fields["max_tokens"] = 1
        fields.setdefault("max_tokens", 128)
        logprobs = self.top_logprobs_num if self.return_logprob else None
        return CompletionRequest(
            prompt=self.input_ids if self.text is None else self.text,
            stream=self.stream,
            logprobs=logprobs,
            prompt_logprobs=logprobs if self.scores_prompt else None,
            structured_outputs=forms or None,
            **fields,
        )


class TokensRequest(Fields):
    """vLLM's body of token ids, whose answer is token ids: {token_ids, sampling_params}."""

    request_id: str | None = None
    token_ids: TokenIds
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False
    priority: int = 0

    def as_completion(self) -> CompletionRequest:
        """The request of the same prompt and parameters for /v1/completions.

        :raises ConfigError: a stream, or a parameter that is unknown.
        """
        if self.stream:
            raise ConfigError("stream", "false, because the tokens come at once on this path", "true", "/v1/completions streams")
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        for name in ("output_kind", "detokenize", "spaces_between_special_tokens"):  # which change no token id
            given.pop(name, None)
        wrong = next((name for name in given if name not in CompletionRequest.model_fields), None)
        if wrong is not None:
            raise ConfigError("sampling_params", "fields of SamplingParams", shown(wrong))
        return CompletionRequest(prompt=self.token_ids, return_token_ids=True, priority=self.priority, **given)


class DemoRequest(Fields):
    """The body of vLLM's api_server: a text beside the fields of SamplingParams."""

    prompt: str = Field(max_length=10_000_000)
    stream: bool = False

    def as_completion(self) -> CompletionRequest:
        """The request of the same prompt and parameters for /v1/completions.

        :raises ConfigError: a field that is no sampling parameter, or cannot be served.
        """
        given = dict(self.model_extra or {})
        if given.pop("use_beam_search", False):
            raise ConfigError("use_beam_search", "false, because tokens are drawn or chosen one by one", "true")
        wrong = next((name for name in given if name not in CompletionRequest.model_fields), None)
        if wrong is not None:
            hint = "this path takes vLLM's {prompt, stream, n, max_tokens, ...}, or SGLang's {text or input_ids, sampling_params}"
            raise ConfigError(shown(wrong), "a field of SamplingParams", "another", hint)
        most = given.pop("max_tokens", SamplingParams().max_tokens)
        return CompletionRequest(prompt=self.prompt, stream=self.stream, max_tokens=most, **given)
