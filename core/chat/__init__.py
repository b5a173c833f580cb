"""Streaming parsers for the reasoning and tool calls of each model family."""
