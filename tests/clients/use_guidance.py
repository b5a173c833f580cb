# pip: guidance openai
"""guidance's model over an OpenAI-compatible server: text, a choice of a chat's roles, and JSON in a schema."""

import os

import guidance

print(guidance.__version__, os.environ["OPENAI_BASE_URL"])
