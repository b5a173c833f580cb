"""The HTTP server of `headway serve`: OpenAI's API over an AsyncLLM."""
