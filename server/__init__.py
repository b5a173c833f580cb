"""HTTP server of `headway serve`: OpenAI's API for an AsyncLLM."""
