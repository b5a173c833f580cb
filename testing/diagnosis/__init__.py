"""Diagnosis of a wrong answer: its likely cause."""
