"""What runs in the next step, and what a step has brought."""
