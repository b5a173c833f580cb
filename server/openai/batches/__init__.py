"""Requests in files: answered while others wait, or without a server, and never lost."""
