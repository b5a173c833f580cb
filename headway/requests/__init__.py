"""Request handling: prompts, their validation, request state and output texts."""
