"""The parts that a decoder layer is put together from: each takes the residual stream and gives the new one back."""
