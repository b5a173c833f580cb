"""Triton kernels that choose tokens: greedy, temperature, top_k, top_p, min_p, verified drafts.

They exist beside FlashInfer's because a token here depends on its row's logits, filters and key alone: masses are added as
integers and noise is a hash of key and column, so neither the batch nor the path of a step (eager, graph, verify) changes it.
"""
