"""Paths for operators: adapters, engine control, profiles, metrics, traces."""
