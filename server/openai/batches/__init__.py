"""Requests in files: answered in the background of a server or without one, and resumed after a restart."""
