"""What a CPU computes by our C: products over weights in panels, and the steps around them."""
