"""Batches of requests in files, answered in the background of a server or without a server, and resumed after a restart."""
