"""`headway bench serve`: load test for a server, by its URL."""
