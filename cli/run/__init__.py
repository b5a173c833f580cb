"""Commands that run a model: generate, chat, batch, serve, warm."""
