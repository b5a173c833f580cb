"""/v1/messages: Anthropic's API over chats."""
