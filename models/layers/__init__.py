"""Parts of decoder layers. Each part takes the residual stream and returns the updated residual stream."""
