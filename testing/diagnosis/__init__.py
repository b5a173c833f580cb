"""From a wrong answer to its likely cause."""
