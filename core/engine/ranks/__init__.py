"""Several ranks under one engine: what they hand each other, the executor that leads them, and what a rank does that follows."""
