"""OpenAI's API, and SGLang's /generate."""
