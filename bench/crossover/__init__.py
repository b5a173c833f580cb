"""Crossover tables: the fastest backend by phase, batch size and length on this machine; measurement, reports and exports."""
