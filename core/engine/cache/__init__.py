"""The paged KV cache on the host: blocks, free pages, prefixes."""
