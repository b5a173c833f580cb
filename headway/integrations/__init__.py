"""Headway's backends inside other people's code; nothing is imported until somebody asks for it."""
