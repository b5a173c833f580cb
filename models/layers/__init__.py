"""Parts of decoder layers. Each takes the residual stream and returns the new one."""
