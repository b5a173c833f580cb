"""Headway's backends in other libraries. Importing this package imports none of them."""
