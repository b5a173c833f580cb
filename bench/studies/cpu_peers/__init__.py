"""Generation on a CPU by Headway, llama.cpp and transformers: one model, prompts of equal length, greedy tokens."""
