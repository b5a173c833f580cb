"""What requests cost: sampling parameters, guessed tokens, a second turn, more sequences than the cache holds."""
