"""`headway diff`: comparison of two attention backends on the same tokens, by layer and head."""
