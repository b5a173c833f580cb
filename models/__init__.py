"""Models: the packed decoder, encoders, checkpoints and loaders. Of Headway's packages it imports only core."""
