"""`headway diff`: the same tokens through two attention backends, layer by layer and head by head."""
