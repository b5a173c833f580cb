"""The proposers that Headway brings."""

from __future__ import annotations

from headway.core.contract.proposers import ProposerInfo, ProposerOptions
from headway.core.speculation.ngram import NgramProposer
from headway.core.speculation.suffix import SuffixProposer


def _ngram(options: ProposerOptions) -> NgramProposer:
    return NgramProposer(options.prompt_lookup_max)


BUILTIN = (
    ProposerInfo("ngram", "what followed the longest earlier match of the last few tokens in the same sequence", _ngram),
    ProposerInfo(
        "suffix", "what most often followed the longest match, in the same sequence and in finished outputs", SuffixProposer
    ),
)
"""By the names that `speculate` takes."""
