"""The Triton backend: paged split-KV decode, varlen prefill and extend, and the cache writer, for every built-in layout."""
