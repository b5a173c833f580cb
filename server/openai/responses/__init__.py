"""/v1/responses: OpenAI's API of responses over chats."""
