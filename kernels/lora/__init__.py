"""Adapters of low rank: their folders, their slots beside a decoder's products, and what adds them to these."""
