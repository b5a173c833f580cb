"""From a prompt to the engine and back: prompts, their validation, the state of a request, texts."""
