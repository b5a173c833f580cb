"""Mixture of experts: routing, grouped products, and the choice between ways of computing them."""
