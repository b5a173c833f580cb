"""`headway bench serve`: a server under load, by its URL."""
