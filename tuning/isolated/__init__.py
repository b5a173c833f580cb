"""Plugins tried and measured in processes of their own."""
